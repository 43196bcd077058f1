"""A rendezvous handler that is an object of the program that drives this agent: its calls run in that program.

This end sends the commands of `rendezvous` over the control socket and passes on what comes back. The other end,
`muster.elastic.rendezvous`, owns a `thread.HandlerThread`. `messages` has the messages.
"""

import json
import os
import socket
from collections import deque

from muster.agent.rendezvous.interface import Notice
from muster.agent.rendezvous.torch_handlers.messages import (
    COMMAND_LIMIT_BYTES,
    THREAD_FINDINGS,
    Command,
    encode_line,
)
from muster.agent.rendezvous.torch_handlers.thread import Owner
from muster.agent.runtime.loop import Loop, Timer

LATE_S = 10.0
"""After this time, a line says that the program does not read."""


class CallerThread:
    """Stands for the thread that owns the handler."""

    def __init__(self, control_fd: int, loop: Loop, owner: Owner) -> None:
        self._fd = control_fd
        self._loop = loop
        self._owner = owner
        self._socket: socket.socket | None = None
        self._rest = b""
        self._unsent: deque[bytes] = deque()
        """Commands that the socket has not taken.

        They wait as long as the program lives, because it could learn of no other end of the job. When the program
        ends, the guard ends this agent.
        """
        self._late_timer: Timer | None = None

    def start(self) -> None:
        """Begin to receive."""
        self._socket = socket.socket(fileno=os.dup(self._fd))
        self._loop.watch_readable(self._socket.fileno(), self._receive)

    def send_command(self, command: Command) -> None:
        """See `HandlerThread.send_command`.

        The command is kept until the program reads it: if it were lost, the job would never end.
        """
        self._unsent.append(b"\n" + encode_line(command, COMMAND_LIMIT_BYTES))  # ends a record that was cut off
        if len(self._unsent) == 1:
            self._send_next()

    def _send_next(self) -> None:
        """Send what the socket takes. A command that it takes only in part is sent again as a whole.

        The event log's records go through the same socket, and may come in between.
        """
        while self._socket is not None and self._unsent:
            try:
                sent = self._socket.send(self._unsent[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait_until_writable(self._socket)
                return
            except OSError:
                self.stop()  # program ended: the guard ends this agent
                return
            if sent == len(self._unsent[0]):
                self._unsent.popleft()
        self._stop_waiting()

    def _wait_until_writable(self, sock: socket.socket) -> None:
        self._loop.watch_writable(sock.fileno(), self._send_next)
        if self._late_timer is None:
            self._late_timer = self._loop.call_later(LATE_S, self._report_late)

    def _report_late(self) -> None:
        text = f"the program that started this job has read nothing for {LATE_S:g} s: the job goes on when it does"
        self._owner.post_finding(Notice(text=text))

    def _stop_waiting(self) -> None:
        if self._late_timer is not None:
            self._late_timer.cancel()
            self._late_timer = None
        if self._socket is not None:
            self._loop.unwatch_writable(self._socket.fileno())

    def stop(self) -> None:
        """End this side. The program ends the handler's thread when the job has ended."""
        self._stop_waiting()
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
            self.stop()  # as above
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            found = THREAD_FINDINGS.read(json.loads(line)["rendezvous"])
            if found is not None:
                self._owner.post_finding(found)
