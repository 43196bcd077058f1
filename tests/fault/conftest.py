"""Nodes in network namespaces."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from netns_world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made
