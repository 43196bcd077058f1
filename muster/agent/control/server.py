"""Listens for people's requests in the agent: reads and checks them, posts them, and sends the answers."""

import contextlib
import hmac
import json
import os
import socket
from collections.abc import Callable

from muster._shared.codec import MalformedMessageError, decode, encode
from muster._shared.contract import AskKind, AskOutcome
from muster._shared.reports import Answer
from muster.agent.control.address import (
    LINE_LIMIT_BYTES,
    Greeting,
    SignedRequest,
    build_address,
    is_same_user,
    sign,
)
from muster.agent.runtime.loop import Loop, Timer

PEERS = 16
"""How many people can be answered at once."""
REQUEST_LIMIT_S = 5.0
"""How long the other side may take to send its request."""
ANSWER_LIMIT_S = 30.0
"""How long the other side may take to read the answer."""
FLUSH_S = 0.5
"""How long the agent's end may wait in total for people to read their answers."""
ACCEPT_PAUSE_S = 0.25
"""A pause if no descriptor is left: otherwise the kernel would report in each turn that a connection waits."""
_ANSWER_LIMIT_BYTES = 15 << 20


class ControlServer:
    """The agent's server for requests. Close it with the agent."""

    def __init__(self, loop: Loop, token: str, on_request: Callable[[int, AskKind, float], None]) -> None:
        """Begin to listen.

        Args:
            loop: the agent's.
            token: the job's.
            on_request: gets each request: its number, what is requested, and how long it may take.

        Raises:
            OSError: no descriptors are left, or the system has no abstract names. Then no person can ask.
        """
        self._loop = loop
        self._token = token
        self._on_request = on_request
        self._peers: dict[int, _Peer] = {}
        """Connections by the number of their request."""
        self._last = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(build_address(token, os.getpid()))
            self._listener.listen(PEERS)
            self._listener.setblocking(False)
        except OSError:
            self._listener.close()
            raise
        self._pause: Timer | None = None
        self._resume()

    def _resume(self) -> None:
        self._loop.watch_readable(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except BlockingIOError:  # already gone
            return
        except OSError:
            self._loop.unwatch_readable(self._listener.fileno())
            self._pause = self._loop.call_later(ACCEPT_PAUSE_S, self._resume)
            return
        if len(self._peers) >= PEERS or not is_same_user(link):
            link.close()
            return
        self._last += 1
        number = self._last
        peer = self._peers[number] = _Peer(
            self._loop,
            link,
            self._token,
            on_request=lambda request: self._pass_on(number, request),
            on_closed=lambda: self._peers.pop(number, None),
        )
        peer.greet()

    def _pass_on(self, number: int, request: SignedRequest) -> None:
        if request.kind is AskKind.REACH:
            self.answer((number,), Answer(outcome=AskOutcome.DONE, line="an agent answers"))
        else:
            self._on_request(number, request.kind, request.limit_s)

    def answer(self, requests: tuple[int, ...], answer: Answer) -> None:
        """Answer these requests; send nothing to people that have gone."""
        for request in requests:
            peer = self._peers.get(request)
            if peer is not None:
                peer.send_answer(answer)

    def close(self) -> None:
        """Answer the remaining requests, and stop listening."""
        lost = Answer(outcome=AskOutcome.LOST, line="the agent that was asked has ended")
        for peer in list(self._peers.values()):
            peer.end(lost)
        deadline_s = self._loop.clock.now_s() + FLUSH_S
        for peer in list(self._peers.values()):
            peer.close(max(0.0, deadline_s - self._loop.clock.now_s()))
        if self._pause is not None:
            self._pause.cancel()
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()


class _Peer:
    """One connection, with a greeting, one request and one answer."""

    def __init__(
        self,
        loop: Loop,
        link: socket.socket,
        token: str,
        *,
        on_request: Callable[[SignedRequest], None],
        on_closed: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._link = link
        self._token = token
        self._on_request = on_request
        self._on_closed = on_closed
        self._nonce = os.urandom(16).hex()
        self._received = b""
        self._unsent = b""
        self._has_request = False
        self._has_answer = False
        link.setblocking(False)
        loop.watch_readable(link.fileno(), self._read)
        self._timer = loop.call_later(REQUEST_LIMIT_S, self._close)

    def greet(self) -> None:
        """Send the greeting. This closes the connection if the other side has gone."""
        self._send(encode(Greeting(nonce=self._nonce), LINE_LIMIT_BYTES))

    def _read(self) -> None:
        try:
            data = self._link.recv(LINE_LIMIT_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close()
            return
        if self._has_request:
            return  # one request per connection
        self._received += data
        line, newline, _ = self._received.partition(b"\n")
        if not newline and len(self._received) <= LINE_LIMIT_BYTES:
            return
        self._has_request = True
        self._timer.cancel()
        try:
            self._on_request(self._parse(line))
        except MalformedMessageError as error:
            self.send_answer(Answer(outcome=AskOutcome.UNREACHED, line=f"not a request: {error}"))

    def _parse(self, line: bytes) -> SignedRequest:
        try:
            content: object = json.loads(line)
        except (ValueError, RecursionError):
            raise MalformedMessageError("not JSON") from None
        request = decode(SignedRequest, content)
        if not hmac.compare_digest(
            request.signature.encode(), sign(self._token, self._nonce, request.kind, request.limit_s).encode()
        ):
            raise MalformedMessageError("it is not signed with the job's token")
        return request

    def send_answer(self, answer: Answer) -> None:
        """Send the answer, and close the connection once it has been sent."""
        self._has_answer = True
        self._timer.cancel()
        self._timer = self._loop.call_later(ANSWER_LIMIT_S, self._close)
        self._send(encode(answer, _ANSWER_LIMIT_BYTES))

    def end(self, answer: Answer) -> None:
        """Send `answer` if there was a request and no answer yet. It may not be sent when this returns."""
        if self._has_request and not self._has_answer:
            self.send_answer(answer)

    def close(self, limit_s: float) -> None:
        """Close the connection. Unsent data may take `limit_s`."""
        with contextlib.suppress(OSError):
            self._link.settimeout(limit_s)
            self._link.sendall(self._unsent)
        self._close()

    def _send(self, text: str) -> None:
        self._unsent += text.encode() + b"\n"
        self._write()

    def _write(self) -> None:
        try:
            sent = self._link.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close()
            return
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._loop.watch_writable(self._link.fileno(), self._write)
            return
        self._loop.unwatch_writable(self._link.fileno())
        if self._has_answer:
            self._close()

    def _close(self) -> None:
        if self._link.fileno() < 0:
            return
        self._timer.cancel()
        self._loop.unwatch(self._link.fileno())
        self._link.close()
        self._on_closed()
