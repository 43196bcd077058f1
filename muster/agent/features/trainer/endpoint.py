"""Receives the progress of a Hugging Face Trainer by Kubeflow's protocol: an HTTP request after a step, now and then.

If an environment variable names an address (`port`), the Trainer's own callback sends the request. The training loop
waits for the answer, so it is sent at once. Other users of this machine reach the port too, so a request needs the
token. A client that has not proved the token may send only little, and not for long.

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
from muster._shared.contract import show_controls
from muster._shared.fields import Limit
from muster._shared.foreign_files import parse_json
from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.records import record
from muster.agent.features.http_peer import HEAD_LIMIT_BYTES, HttpPeers, parse_head
from muster.agent.runtime.loop import Loop
from muster.agent.workers.status_page import ReportedStatus

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

    def __init__(self, loop: Loop, token: str, on_status: Callable[[str, ReportedStatus], None]) -> None:
        """Serve nothing yet.

        Args:
            loop: the agent's.
            token: the token that a request must bring.
            on_status: gets the path of a request, and its content.
        """
        self._token = token
        self._on_status = on_status
        self._peers = HttpPeers(loop, self._build_answer)

    def accept(self, listener: socket.socket) -> None:
        """See `HttpPeers`."""
        self._peers.accept(listener)

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
        path, fields = parse_head(text)
        if not hmac.compare_digest(fields.get("authorization", "").encode(), f"Bearer {self._token}".encode()):
            return "403 Forbidden"
        length = fields.get("content-length", "")
        if not text.startswith("POST ") or not (length.isascii() and length.isdecimal()):
            return "400 Bad Request"
        if len(length) > 9 or int(length) > BODY_LIMIT_BYTES:
            return "413 Content Too Large"
        if len(body) < int(length):
            return ""
        try:
            report = parse_status(body[: int(length)])
        except ValueError:
            return "422 Unprocessable Entity"
        self._on_status(path, report)
        return "200 OK"

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._peers.close()


def parse_status(body: bytes) -> ReportedStatus:
    """Return what a request says. All values are text. Those that are no numbers are omitted.

    Raises:
        ValueError: it does not have Kubeflow's form.
    """
    numbers: dict[str, float] = {}
    for metric in salvage(_Request, parse_json(body)).trainerStatus.metrics:
        with contextlib.suppress(ValueError):
            numbers[show_controls(" ".join(metric.name.split()))] = float(metric.value)
    return ReportedStatus(
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
