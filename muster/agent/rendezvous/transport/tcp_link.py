"""One TCP connection on the agent's loop: bytes to messages and back, never blocking."""

import socket
from collections.abc import Callable, Iterator

from muster.agent.rendezvous.interface import Stream
from muster.agent.rendezvous.protocol.framing import Frame, ProtocolError, RefusalError
from muster.agent.rendezvous.protocol.handshake import Codec
from muster.agent.rendezvous.protocol.messages import Message
from muster.agent.rendezvous.transport.addresses import normalise
from muster.agent.rendezvous.transport.links import Cause, LinkEnd, LinkOwner
from muster.agent.runtime.loop import Loop

READ_BYTES = 64 * 1024
"""The C library maps memory anew for each larger buffer, which takes more time than all else that a message needs."""
UNSENT_LIMIT_BYTES = 64 * 1024 * 1024
"""A member that leaves this much unread counts as lost."""


class TcpLink:
    """One connection. Only `TcpNetwork` makes it."""

    def __init__(self, loop: Loop, sock: socket.socket, token: str | None, *, is_server: bool) -> None:
        self.owner: LinkOwner | None = None
        self.on_open: Callable[[], None] | None = None
        self.on_first_message: Callable[[Frame], None] | None = None
        self.on_settled: Callable[[], None] | None = None
        """Called once, when the other side is trusted or the link has ended."""
        self._loop = loop
        self._socket = sock
        self._out = bytearray()
        self._is_waiting = False
        """Whether the kernel accepts no more data at the moment."""
        self._closed = False
        self._has_token = bool(token)
        self._codec = Codec(token, is_server=is_server, write=self._queue)
        self.local_host = normalise(sock.getsockname()[0])
        self.peer_host = normalise(sock.getpeername()[0])
        self.silent_host = ""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch_readable(sock.fileno(), self._on_readable)
        self._codec.start()

    @property
    def is_open(self) -> bool:
        """Whether the handshake is complete."""
        return self._codec.open

    @property
    def is_proved(self) -> bool:
        """See `Link`."""
        return self._codec.open and self._has_token

    @property
    def is_busy(self) -> bool:
        """See `Link`."""
        return bool(self._out)

    def send(self, message: Message) -> None:
        """See `Link`."""
        if not self._closed:
            self._queue(self._codec.encode(message))

    def trust(self) -> None:
        """See `Link`."""
        self._codec.trust()
        self._report_settled()

    def _report_settled(self) -> None:
        if self.on_settled is not None:
            on_settled, self.on_settled = self.on_settled, None
            on_settled()

    def _queue(self, data: bytes) -> None:
        self._out += data
        if len(self._out) > UNSENT_LIMIT_BYTES:
            self.fail(LinkEnd(reason="it does not read what it is sent"))
        elif len(self._out) == len(data):
            self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                sent = self._socket.send(self._out)
                del self._out[:sent]
        except (BlockingIOError, InterruptedError):
            self._is_waiting = True
            self._loop.watch_writable(self._socket.fileno(), self._flush)
            return
        except OSError:
            # Reading fails too and reports it once.
            self._out.clear()
        if self._is_waiting:
            self._is_waiting = False
            self._loop.unwatch_writable(self._socket.fileno())

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.fail(LinkEnd(reason=error.strerror or str(error)))
            return
        if not data:
            self.fail(LinkEnd(reason="connection closed"))
            return
        was_open = self.is_open
        messages = self._codec.receive(data)
        while (message := self._read_next(messages)) is not None:
            self._report_open(was_open)
            was_open = True
            self._deliver(message)
        self._report_open(was_open)

    def _read_next(self, messages: Iterator[Frame]) -> Frame | None:
        """Continue reading.

        Only an error of reading is the other side's fault; an error of handling a message is ours.
        """
        if self._closed:
            return None
        try:
            return next(messages, None)
        except ProtocolError as error:
            cause = Cause.REFUSED if isinstance(error, RefusalError) else Cause.BROKEN
            self.fail(LinkEnd(reason=str(error), cause=cause))
            return None

    def _report_open(self, was_open: bool) -> None:
        if self.is_open and not was_open and self.on_open is not None and not self._closed:
            on_open, self.on_open = self.on_open, None
            on_open()

    def _deliver(self, message: Frame) -> None:
        if self.on_first_message is not None:
            on_first_message, self.on_first_message = self.on_first_message, None
            on_first_message(message)
        elif self.owner is not None:
            self.owner.on_message(self, message)

    def detach(self) -> Stream:
        """See `Link`."""
        from muster.agent.rendezvous.transport.stream import TcpStream

        self._report_settled()
        self._closed = True
        self._loop.unwatch(self._socket.fileno())
        self._codec.trust()
        return TcpStream(self._socket, self._codec)

    def fail(self, end: LinkEnd) -> None:
        """Close the link, and tell the owner."""
        if self._closed:
            return
        self._out.clear()
        self.close()
        if self.owner is not None:
            owner = self.owner
            self._loop.call_soon(lambda: owner.on_closed(self, end))

    def close(self) -> None:
        """See `Link`."""
        if self._closed:
            return
        self._closed = True
        self._report_settled()
        if self._out:
            try:
                self._socket.send(self._out)
            except OSError:
                self._out.clear()
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()
