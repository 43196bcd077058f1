"""Receives the progress of a Hugging Face Trainer by Kubeflow's protocol: an HTTP request after a step, now and then.

If an environment variable names an address (`workers.status_page.TrainerPort`), the Trainer's own callback sends the
request. The training loop waits for the answer, so it is sent at once. Other users of this machine reach the port too,
so a request needs the token. A client that has not proved the token may send only little, and not for long.

It is hand-written, because `http.server` blocks, and imports more than the whole agent does. Source: KubeflowCallback
of transformers 5.24 (integrations/integration_utils.py); pkg/statusserver of kubeflow/trainer.
"""

import contextlib
import hmac
import math
import socket
from collections.abc import Callable, Mapping
from typing import Annotated, Final

from muster._shared.codec import salvage
from muster._shared.contract import StatusPageLayout as Layout
from muster._shared.contract import show_controls
from muster._shared.fields import Limit
from muster._shared.foreign_files import parse_json
from muster._shared.records import record
from muster.agent.runtime.loop import Loop, Timer
from muster.agent.workers.status_page import Told

PEERS: Final = 8
"""How many connections may be open."""
LIMIT_S: Final = 5.0
"""How long a connection may take, from its beginning to the end of the answer."""
HEAD_LIMIT_BYTES: Final = 8 << 10
BODY_LIMIT_BYTES: Final = 64 << 10
"""The limit of Kubeflow's server."""

_FIELDS: Final = "Content-Type: application/json\r\nContent-Length: 2\r\nConnection: close"
_STEP, _TOTAL = "current_step", "total_steps"
_FIRST: Final = ("loss", "eval_loss", "learning_rate", "grad_norm", "epoch")
"""Values that are shown before others."""
_NOT_SHOWN: Final = frozenset({_STEP, _TOTAL, "current_epoch"})


@record
class _Metric:
    name: Annotated[str, Limit(most=64)]
    value: Annotated[str, Limit(most=64)]


@record
class _Status:
    metrics: Annotated[tuple[_Metric, ...], Limit(most=256)] = ()


@record
class _Request:
    trainerStatus: _Status  # noqa: N815  # as it is written


class TrainerEndpoint:
    """The connections to one port. Close it."""

    def __init__(self, loop: Loop, token: str, on_told: Callable[[str, Told], None]) -> None:
        """Serve nothing yet.

        Args:
            loop: the agent's.
            token: the token that a request must bring.
            on_told: gets the path of a request, and its content.
        """
        self._loop = loop
        self._token = token
        self._on_told = on_told
        self._peers: set[HttpPeer] = set()

    def accept(self, listener: socket.socket) -> None:
        """Accept one connection.

        Raises:
            OSError: no descriptor is left.
        """
        try:
            link, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # already gone
            return
        if len(self._peers) >= PEERS:
            link.close()
            return
        self._peers.add(HttpPeer(self._loop, link, self._build_answer, self._peers.discard))

    def _build_answer(self, received: bytes) -> bytes | None:
        """Build the answer; None if the request is not complete yet."""
        status = self._find_status(received)
        return f"HTTP/1.1 {status}\r\n{_FIELDS}\r\n\r\n{{}}".encode() if status else None

    def _find_status(self, received: bytes) -> str:
        head, end, body = received.partition(b"\r\n\r\n")
        if len(head) > HEAD_LIMIT_BYTES:
            return "431 Request Header Fields Too Large"
        if not end:
            return ""
        text = head.decode("latin-1")
        length = parse_head(text)[1].get("content-length", "")
        if not text.startswith("POST ") or not (length.isascii() and length.isdecimal()):
            return "400 Bad Request"
        if len(length) > 9 or int(length) > BODY_LIMIT_BYTES:
            return "413 Content Too Large"
        return self._answer(text, body[: int(length)]) if len(body) >= int(length) else ""

    def _answer(self, head: str, body: bytes) -> str:
        """Return the status of the answer to a whole request."""
        path, fields = parse_head(head)
        given = fields.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            return "403 Forbidden"
        try:
            told = parse_status(body)
        except ValueError:
            return "422 Unprocessable Entity"
        self._on_told(path, told)
        return "200 OK"

    def close(self) -> None:
        """Close all connections. Idempotent."""
        for peer in list(self._peers):
            peer.close()


class HttpPeer:
    """One connection, with one request and one answer."""

    def __init__(
        self,
        loop: Loop,
        link: socket.socket,
        answer: Callable[[bytes], bytes | None],
        on_closed: "Callable[[HttpPeer], None]",
    ) -> None:
        """Read, for at most `LIMIT_S` until the answer is written.

        Args:
            loop: the loop that reads and writes.
            link: a link that was just accepted.
            answer: gets all data so far, and returns the answer; None if the request is not complete yet.
            on_closed: called once.
        """
        self._loop = loop
        self._link = link
        self._answer = answer
        self._on_closed = on_closed
        self._received = b""
        self._left = b""
        """The unsent part of the answer."""
        link.setblocking(False)
        loop.watch_readable(link.fileno(), self._read)
        self._timer: Timer = loop.call_later(LIMIT_S, self.close)

    def _read(self) -> None:
        try:
            data = self._link.recv(HEAD_LIMIT_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        answer = self._answer(self._received) if data else b""
        if answer is None:
            return
        if not answer:
            self.close()
            return
        self._loop.unwatch_readable(self._link.fileno())
        self._left = answer
        self._write()

    def _write(self) -> None:
        try:
            self._left = self._left[self._link.send(self._left) :]
        except BlockingIOError:
            pass
        except OSError:
            self._left = b""
        if self._left:
            self._loop.watch_writable(self._link.fileno(), self._write)
            return
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)
        self.close()

    def close(self) -> None:
        """Close the connection. May be called again."""
        if self._link.fileno() >= 0:
            self._timer.cancel()
            self._loop.unwatch(self._link.fileno())
            self._link.close()
            self._on_closed(self)


def parse_head(head: str) -> tuple[str, dict[str, str]]:
    r"""Return the path and the fields of a request, their names in lower case.

    >>> parse_head("POST /3 HTTP/1.1\r\nContent-Length: 2")
    ('/3', {'content-length': '2'})
    """
    first, *lines = head.split("\r\n")
    words = first.split(" ")
    fields = (line.partition(":") for line in lines)
    return words[1] if len(words) > 1 else "", {name.lower().strip(): value.strip() for name, _, value in fields}


def parse_status(body: bytes) -> Told:
    """Return what a request says. All values are text. Those that are no numbers are omitted.

    Raises:
        ValueError: it does not have Kubeflow's form.
    """
    numbers: dict[str, float] = {}
    for metric in salvage(_Request, parse_json(body)).trainerStatus.metrics:
        with contextlib.suppress(ValueError):
            numbers[show_controls(" ".join(metric.name.split()))] = float(metric.value)
    return Told(
        step=_parse_step(numbers.get(_STEP)),
        total=_parse_step(numbers.get(_TOTAL)) or None,
        values=_choose_values(numbers),
    )


def _parse_step(number: float | None) -> int | None:
    """Parse a number of steps; None if it is none. A Trainer that does not know its total reports -1."""
    if number is None or not math.isfinite(number) or not 0 <= number <= Layout.MAX_STEP:
        return None
    return int(number)


def _choose_values(numbers: Mapping[str, float]) -> dict[str, float]:
    """Choose as many values as `muster.worker.step` shows."""
    names = [*(name for name in _FIRST if name in numbers), *(name for name in numbers if name not in _FIRST)]
    shown = [name for name in names if name and name not in _NOT_SHOWN]
    return {name: numbers[name] for name in shown[: Layout.TABLE_ENTRIES]}
