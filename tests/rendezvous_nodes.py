"""Nodes of a rendezvous over real sockets, in this process: each has a loop of its own and keeps what it posted."""

import time
from collections.abc import Callable
from typing import Any

from harness import LIMIT_S

from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.interface import Notice
from muster.agent.rendezvous.selection import create_rendezvous
from muster.agent.runtime.loop import Loop


class Node:
    """A member of a job of two nodes; it joins when the test says so."""

    def __init__(self, index: int | None, port: int, *, clock: Any = None, **changes: Any) -> None:
        settings = {"backend": "muster", "run_id": "run", "host": "127.0.0.1", "min_nodes": 2, "max_nodes": 2}
        config = RendezvousConfig(**{**settings, "port": port, "node_index": index, "max_restarts": 1, **changes})
        self.port = port
        self.loop = Loop(clock) if clock else Loop()
        self.events: list[Any] = []
        self.member = create_rendezvous(config, 2, "default", self.loop, None, f"host-{index}", self.events.append)

    def find(self, kind: type) -> Any:
        """The last event of this kind, or None."""
        return next((event for event in reversed(self.events) if isinstance(event, kind)), None)

    def list_notices(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Notice)]

    def close(self) -> None:
        self.member.close()
        self.loop.close()


def wait_for(condition: Callable[[], object], *nodes: Node) -> None:
    """Turn the loops until the condition holds."""
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, [node.events for node in nodes]
        for node in nodes:
            node.loop.turn(0.005)


def wait_for_each(kind: type, *nodes: Node) -> None:
    """Turn the loops until each node has posted an event of this kind."""
    wait_for(lambda: all(node.find(kind) for node in nodes), *nodes)
