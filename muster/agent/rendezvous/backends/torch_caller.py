"""A rendezvous handler that is an object of the program that drives this agent: its calls run in that program.

This end sends the commands of `torch_handler` over the control socket and carries out what comes back; the other end,
`muster.elastic.rendezvous`, owns a `torch_thread.HandlerThread`. One JSON object a line: {"rendezvous": name, ...}.
"""

import json
import os
import socket
from typing import TYPE_CHECKING, Any

from muster.agent.control_socket import send_message
from muster.agent.diagnosis.report import Failure
from muster.agent.rendezvous.backends.torch_thread import Layout
from muster.agent.rendezvous.backends.torch_watch import FailedElsewhere
from muster.agent.runtime.loop import Loop

if TYPE_CHECKING:
    from muster.agent.rendezvous.backends.torch_handler import TorchRendezvous


class CallerThread:
    """Stands for the thread that owns the handler."""

    def __init__(self, control_fd: int, loop: Loop, owner: "TorchRendezvous") -> None:
        self._fd = control_fd
        self._loop = loop
        self._owner = owner
        self._socket: socket.socket | None = None
        self._rest = b""

    def start(self) -> None:
        """Begin to receive."""
        self._socket = socket.socket(fileno=os.dup(self._fd))
        self._loop.watch_readable(self._socket.fileno(), self._receive)

    def send_command(self, command: str, reason: str = "", root: Failure | None = None) -> None:
        """See `HandlerThread.send_command`."""
        send_message(self._fd, rendezvous=command, reason=reason, root=None if root is None else root.to_json())

    def stop(self) -> None:
        """End; the program ends the handler's thread when the job has ended."""
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _receive(self) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.stop()  # the program has ended: the guard ends this agent
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._handle(json.loads(line))

    def _handle(self, message: dict[str, Any]) -> None:
        owner, name = self._owner, message["rendezvous"]
        if name == "formed":
            layout = Layout(**message["layout"])
            owner.on_formed(message["rank"], message["size"], layout, use_agent_store=message["use_agent_store"])
        elif name == "waiting":
            owner.on_waiting(message["count"])
        elif name == "node_lost":
            owner.on_node_lost(message["rank"], message["silence_s"])
        elif name == "failed_elsewhere":
            root = message["root"]
            found = FailedElsewhere(reason=message["reason"], root=None if root is None else Failure.from_json(root))
            owner.on_failed_elsewhere(found)
        elif name == "end_acknowledged":
            owner.on_end_acknowledged(succeeded=message["succeeded"])
        elif name == "handler_failed":
            owner.on_handler_failed(message["reason"], usage=message["usage"])
        elif name == "notice":
            owner.post_notice(message["text"])
