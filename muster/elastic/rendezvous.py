"""A rendezvous handler that the caller made: any of torch's, or a subclass of `RendezvousHandler` of its own.

Its calls run in this process, in a thread of their own; the ranks are assigned through the store that it returns, by
the same code as for the agent's own handlers. `agent.rendezvous.backends.torch_caller` is the other end.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from muster.agent.config import RendezvousConfig
from muster.agent.diagnosis.report import Failure
from muster.agent.rendezvous.backends.torch_thread import HandlerThread, Layout
from muster.agent.rendezvous.backends.torch_watch import FailedElsewhere

BACKEND = "caller"


class CallersRendezvous:
    """Owns the thread, and passes what it finds to the agent. `connect` once, then `handle` each message."""

    def __init__(self, handler: Any, *, nproc: int, role: str, local_addr: str | None = None) -> None:
        """Nothing is called before the agent asks.

        Args:
            handler: its `shutdown` is called when the job has ended.
            nproc: workers on this node.
            role: whose role ranks are counted together.
            local_addr: this node's address; None: found.
        """
        config = RendezvousConfig(
            backend=BACKEND,
            run_id=handler.get_run_id(),
            host=None,
            port=0,
            node_index=None,
            min_nodes=1,
            max_nodes=1,
            local_addr=local_addr,
        )
        self._thread = HandlerThread(config, nproc, role, self, handler=handler)
        self._send: Callable[[bytes], None] | None = None

    def connect(self, send: Callable[[bytes], None]) -> None:
        """Start the thread.

        Args:
            send: sends bytes to the agent; called by the thread.
        """
        self._send = send
        self._thread.start()

    def handle(self, message: dict[str, Any]) -> None:
        """Carry out a command of the agent."""
        root = message["root"]
        self._thread.send_command(
            message["rendezvous"], message["reason"], None if root is None else Failure.from_json(root)
        )

    def close(self) -> None:
        """End the thread; one that is blocked in the handler ends with this process."""
        self._thread.stop()

    def _tell(self, name: str, **values: Any) -> None:
        if self._send is not None:
            self._send(json.dumps({"rendezvous": name, **values}).encode() + b"\n")

    # -- called by the thread, see `torch_thread.Owner` -------------------------------------------------------------

    def run_on_loop(self, result: Callable[[], None]) -> None:
        """The agent's loop is elsewhere: the result is sent there."""
        result()

    def on_formed(self, rank: int, size: int, layout: Layout, *, use_agent_store: bool) -> None:
        """A round is complete."""
        self._tell("formed", rank=rank, size=size, layout=asdict(layout), use_agent_store=use_agent_store)

    def on_waiting(self, count: int) -> None:
        """Nodes wait to join."""
        self._tell("waiting", count=count)

    def on_node_lost(self, rank: int, silence_s: float) -> None:
        """A node sends no heartbeat."""
        self._tell("node_lost", rank=rank, silence_s=silence_s)

    def on_failed_elsewhere(self, found: FailedElsewhere) -> None:
        """The job has failed for good on another node."""
        root = None if found.root is None else found.root.to_json()
        self._tell("failed_elsewhere", reason=found.reason, root=root)

    def on_end_acknowledged(self, *, succeeded: bool) -> None:
        """Every node that can know the job's end knows it."""
        self._tell("end_acknowledged", succeeded=succeeded)

    def on_handler_failed(self, reason: str, *, usage: bool) -> None:
        """The handler has failed."""
        self._tell("handler_failed", reason=reason, usage=usage)

    def post_notice(self, text: str) -> None:
        """One line for the console."""
        self._tell("notice", text=text)
