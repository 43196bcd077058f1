"""Opens the port when all workers of the node exist, and closes it when they are gone."""

import contextlib
import os
import socket
from typing import TYPE_CHECKING

from muster._shared.contract import Env
from muster.agent.config import AgentConfig
from muster.agent.node.events import Event, WorkersGone, WorkerStarted

if TYPE_CHECKING:
    from muster.agent.features.sink import SinkContext
    from muster.agent.node.actions import Finish
    from muster.agent.round import Round
    from muster.agent.runtime.event_log import RunTimes


class ReadyPort:
    """The port of one agent; a `Witness`."""

    is_busy = False

    def __init__(self, context: "SinkContext", port: int) -> None:
        self._context = context
        self._port = port
        self._started: set[int] = set()
        self._listener: socket.socket | None = None

    def read(self, event: Event, current: "Round | None") -> None:  # noqa: ARG002
        """See `Witness`."""
        if isinstance(event, WorkerStarted):
            self._started.add(event.local_rank)
            if self._listener is None and len(self._started) >= self._context.config.nproc:
                self._open()
        elif isinstance(event, WorkersGone):
            self._started.clear()
            self._close()

    def read_end(self, finish: "Finish", last: "Round | None", times: "RunTimes") -> None:  # noqa: ARG002
        """See `Witness`."""
        self._close()

    def shorten(self, limit_s: float) -> None:
        """See `Witness`."""

    def _open(self) -> None:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        try:
            listener = socket.create_server(
                ("", self._port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=128
            )
        except OSError as error:
            why = os.strerror(error.errno or 0)
            line = f"port {self._port}: {why}: roles that wait for this one cannot see that it runs"
            self._context.logs.print_line(line)
            return
        listener.setblocking(False)
        self._context.loop.watch_readable(listener.fileno(), self._accept)
        self._listener = listener

    def _accept(self) -> None:
        """Accept a connection, which says all, and close it."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.accept()[0].close()

    def _close(self) -> None:
        if self._listener is not None:
            self._context.loop.unwatch_readable(self._listener.fileno())
            self._listener.close()
            self._listener = None


def connect(context: "SinkContext") -> AgentConfig:
    """Show on a port that the workers of node 0 run."""
    if context.config.rendezvous.node_index in (None, 0):
        context.add_witness(ReadyPort(context, int(context.environ[Env.READY_PORT])))
    return context.config
