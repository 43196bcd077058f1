"""A rendezvous handler that is an object of the program that drives this agent: its calls run in that program.

This end sends the commands of `torch_handler` over the control socket and passes on what comes back; the other end,
`muster.elastic.rendezvous`, owns a `torch_thread.HandlerThread`. `torch_messages` has the messages.
"""

import json
import os
import socket

from muster.agent.control_socket import send_line
from muster.agent.rendezvous.backends.torch_messages import THREAD_FINDINGS, Command, encode_line
from muster.agent.rendezvous.backends.torch_thread import Owner
from muster.agent.runtime.loop import Loop


class CallerThread:
    """Stands for the thread that owns the handler."""

    def __init__(self, control_fd: int, loop: Loop, owner: Owner) -> None:
        self._fd = control_fd
        self._loop = loop
        self._owner = owner
        self._socket: socket.socket | None = None
        self._rest = b""

    def start(self) -> None:
        """Begin to receive."""
        self._socket = socket.socket(fileno=os.dup(self._fd))
        self._loop.watch_readable(self._socket.fileno(), self._receive)

    def send_command(self, command: Command) -> None:
        """See `HandlerThread.send_command`."""
        send_line(self._fd, encode_line(command))

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
            found = THREAD_FINDINGS.read(json.loads(line)["rendezvous"])
            if found is not None:
                self._owner.post_finding(found)
