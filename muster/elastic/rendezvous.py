"""A rendezvous handler that the caller made: any of torch's, or a subclass of `RendezvousHandler` of its own.

Its calls run in this process, in a thread of their own; the ranks are assigned through the store that it returns, by
the same code as for the agent's own handlers. `agent.rendezvous.backends.torch_caller` is the other end.
"""

import sys
from collections.abc import Callable
from typing import Any

from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.backends.torch_messages import COMMANDS, ThreadFinding, encode_line
from muster.agent.rendezvous.backends.torch_thread import HandlerThread

BACKEND = "caller"


def build_static_flags(handler: Any) -> list[str] | None:
    """The agent's flags for its own `static` rendezvous, in place of torch's, which cannot ask other nodes.

    Args:
        handler: of torch's registry, or the caller's own.

    Returns:
        None: it is not torch's static one.
    """
    torchs = sys.modules.get("torch.distributed.elastic.rendezvous.static_tcp_rendezvous")
    if torchs is None or type(handler) is not torchs.StaticTCPRendezvous:
        return None
    flags = {
        "rdzv-backend": "static",
        "rdzv-id": handler.run_id,
        "nnodes": handler.world_size,
        "node-rank": handler.rank,
        "master-addr": handler.master_addr,
        "master-port": handler.master_port,
    }
    return [f"--{name}={value}" for name, value in flags.items()]


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

    def handle(self, message: object) -> None:
        """Carry out a command of the agent."""
        command = COMMANDS.read(message)
        if command is not None:
            self._thread.send_command(command)

    def close(self) -> None:
        """End the thread; one that is blocked in the handler ends with this process."""
        self._thread.stop()

    def post_finding(self, finding: ThreadFinding) -> None:
        """See `torch_thread.Owner`: the agent's loop is elsewhere, so it is sent there."""
        if self._send is not None:
            self._send(encode_line(finding))
