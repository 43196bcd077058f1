"""What unit tests get besides: entry points are read once."""

import functools
from collections.abc import Iterator

import pytest
from torchx.util import entrypoints


@pytest.fixture(autouse=True, scope="session")
def entry_points_read_once() -> Iterator[None]:
    """TorchX reads what all installed distributions declare, for each runner: 20 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entrypoints.metadata, "entry_points", functools.cache(entrypoints.metadata.entry_points))
        yield
