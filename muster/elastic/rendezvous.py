"""A rendezvous handler that the caller made: any of torch's, or its own subclass of `RendezvousHandler`.

Its calls run in this process, in a thread of their own. The ranks are assigned through the store that it returns, by
the same code as for the agent's own handlers. `agent.rendezvous.torch_handlers.caller` is the other end.
"""

import sys
from collections.abc import Callable
from typing import Any

from muster._shared.records import replace
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.torch_handlers.messages import (
    COMMANDS,
    HandlerFormedRound,
    ThreadFinding,
    encode_line,
)
from muster.agent.rendezvous.torch_handlers.thread import HandlerThread

BACKEND = "caller"


def build_static_flags(spec: Any) -> list[str] | None:
    """Return the agent's flags for its own `static` rendezvous, in place of torch's.

    torch's has one store for all restarts, at MASTER_PORT, and cannot ask other nodes.

    Args:
        spec: torch's WorkerSpec. Its handler is from torch's registry, or the caller's own.

    Returns:
        The flags. None: the handler is not torch's static one.
    """
    handler = spec.rdzv_handler
    torchs = sys.modules.get("torch.distributed.elastic.rendezvous.static_tcp_rendezvous")
    if torchs is None or type(handler) is not torchs.StaticTCPRendezvous:
        return None
    flags = {
        "rdzv-backend": "static",
        "rdzv-id": handler.run_id,
        "rdzv-conf": f"timeout={handler.timeout.total_seconds():g}",
        "nnodes": handler.world_size,
        "node-rank": handler.rank,
        "master-addr": spec.master_addr or handler.master_addr,
        "master-port": spec.master_port or handler.master_port,
    }
    return [f"--{name}={value}" for name, value in flags.items() if value != ""]


class CallersRendezvous:
    """Owns the thread, and passes what it finds to the agent. `connect` once, then `handle` each message."""

    def __init__(
        self,
        handler: Any,
        *,
        nproc: int,
        role: str,
        local_addr: str | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
    ) -> None:
        """Keep the handler. Nothing is called before the agent asks.

        Args:
            handler: its `shutdown` is called when the job has ended.
            nproc: workers on this node.
            role: the role whose ranks are counted together.
            local_addr: this node's address. None: found.
            master_addr: MASTER_ADDR of this node's workers. None: as the nodes agree.
            master_port: MASTER_PORT of this node's workers. None: as the nodes agree.
        """
        master = {"master_addr": master_addr, "master_port": master_port}
        self._own_master = {name: value for name, value in master.items() if value}
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
            send: sends bytes to the agent. The thread calls it.
        """
        self._send = send
        self._thread.start()

    def handle(self, message: object) -> None:
        """Carry out a command of the agent."""
        command = COMMANDS.read(message)
        if command is not None:
            self._thread.send_command(command)

    def close(self) -> None:
        """End the thread. A thread that is blocked in the handler ends with this process."""
        self._thread.stop()

    def post_finding(self, finding: ThreadFinding) -> None:
        """See `torch_handlers.thread.Owner`: the agent's loop is elsewhere, so it is sent there."""
        if isinstance(finding, HandlerFormedRound):
            finding = replace(finding, **self._own_master)
        if self._send is not None:
            self._send(encode_line(finding))
