"""A job of two nodes at one port."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from harness import find_free_port
from rendezvous_nodes import Node


@pytest.fixture
def port() -> int:
    return find_free_port()


@pytest.fixture
def start(port: int) -> Iterator[Callable[..., Node]]:
    """Let a node join the job."""
    with ExitStack() as stack:

        def start(index: int | None, **changes: Any) -> Node:
            node = Node(index, **{"port": port, **changes})
            stack.callback(node.close)
            node.member.join()
            return node

        yield start
