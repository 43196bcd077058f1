"""Serves metrics over HTTP to any client: `/metrics`, `/healthz`, `/readyz` and `/status`. It takes no input.

A separate thread reads requests and writes answers, so that neither a scrape nor a slow client delays the agent's loop.
A client's data and time are limited; if there are too many clients, the oldest connection is closed. Answers are built
from the last look (`source`): a scrape asks no other node, and starts no look.

It is hand-written, because `http.server` has a thread for each client, and imports more than the whole agent does.
"""

import math
import socket
import time
from collections.abc import Iterable
from typing import Final

from muster._shared.codec import encode
from muster._shared.contract import STATUS_LIMIT_BYTES
from muster._shared.job_view import JobState
from muster.agent.features.export.families import RECOVERY_BOUNDS_S, Exemplar, Family, Kind, Labels
from muster.agent.features.export.source import MetricsSource
from muster.agent.features.http_peer import HEAD_LIMIT_BYTES, PEERS, HttpPeers, parse_head
from muster.agent.runtime.loop import Loop, LoopThread, Timer

_BEAT_S: Final = 2.0
_DEAD_S: Final = 20.0
"""An agent whose loop has not turned for this long is not healthy."""
_CLOSE_S: Final = 0.5
_RESOLVER: Final = "/etc/resolv.conf"
_JSON: Final = "application/json"
_PLAIN: Final = "text/plain; charset=utf-8"


class MetricsEndpoint:
    """One listening port; an `EventSink`, which closes it."""

    def __init__(self, address: tuple[str, int], source: MetricsSource, agent_loop: Loop) -> None:
        """Listen from now on.

        Args:
            address: an IP address, and a port, or 0 for a free one.
            source: the source of the metrics.
            agent_loop: the agent's; while it turns, the agent is healthy.

        Raises:
            OSError: the port is taken, the address is not this machine's, or no descriptor is left.
            RuntimeError: no thread is left.
        """
        self._source = source
        self._agent_loop = agent_loop
        self._listener = open_listener(address)
        host, port = self._listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """The address where it listens."""
        self._beat_s = agent_loop.clock.now_s()
        self._timer: Timer | None = None
        self._is_closed = False
        try:
            self._thread = LoopThread(None, "muster-metrics", on_failure=lambda: None)
        except BaseException:
            self._listener.close()
            raise
        self._peers = HttpPeers(self._thread.loop, self._build_answer)
        self._thread.submit(lambda: self._thread.loop.watch_readable(self._listener.fileno(), self._accept))
        self._beat()

    def _beat(self) -> None:
        self._beat_s = self._agent_loop.clock.now_s()
        self._timer = self._agent_loop.call_later(_BEAT_S, self._beat)

    def write(self, record: object) -> None:
        """See `EventSink`. The source reads the records, so this does nothing."""

    def close(self) -> None:
        """See `EventSink`."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._thread.submit(self._close_all)
        self._thread.close(_CLOSE_S)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _close_all(self) -> None:
        self._thread.loop.unwatch(self._listener.fileno())
        self._listener.close()
        self._peers.close()

    def _accept(self) -> None:
        try:
            self._peers.accept(self._listener)
        except OSError:  # no descriptors left: retried next turn
            time.sleep(0.01)

    def _build_answer(self, received: bytes) -> bytes | None:
        """Build the answer; None if the request is not complete yet."""
        is_too_long = len(received) > HEAD_LIMIT_BYTES
        if b"\r\n\r\n" not in received and not is_too_long:
            return None
        head = received.partition(b"\r\n\r\n")[0].decode("latin-1")
        method = head.partition(" ")[0]
        if is_too_long:
            status, kind, text = "431 Request Header Fields Too Large", _PLAIN, "the request is too long\n"
        elif method not in ("GET", "HEAD"):
            status, kind, text = "405 Method Not Allowed", _PLAIN, "only GET is answered\n"
        else:
            try:
                status, kind, text = self._answer(head)
            except Exception as error:  # noqa: BLE001  # a fault of what is only for people must not end the thread
                status, kind = "500 Internal Server Error", _PLAIN
                text = f"{type(error).__name__}: {error}\n"
        body = text.encode(errors="replace")
        fields = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close"
        return f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + (b"" if method == "HEAD" else body)

    def _answer(self, head: str) -> tuple[str, str, str]:
        """Return the status, type and text of the answer to a request."""
        path, fields = parse_head(head)
        if not is_own_name(fields.get("host", "")):
            return "421 Misdirected Request", _PLAIN, "ask by the address or the name of this machine\n"
        path = path.partition("?")[0]
        if path == "/metrics":
            is_open = "application/openmetrics-text" in fields.get("accept", "")
            text = write_text(self._source.build_families(), self._source.common, is_open=is_open)
            return "200 OK", OPEN_TYPE if is_open else TEXT_TYPE, text
        if path == "/status":
            return "200 OK", _JSON, f"{encode(self._source.build_status(), STATUS_LIMIT_BYTES)}\n"
        if path == "/healthz":
            still_s = self._agent_loop.clock.now_s() - self._beat_s
            if still_s < _DEAD_S:
                return "200 OK", _PLAIN, "ok\n"
            return "503 Service Unavailable", _PLAIN, f"the agent has stood still for {still_s:.0f} s\n"
        if path == "/readyz":
            state = self._source.view.state
            is_ready = state == JobState.RUNNING.value
            return "200 OK" if is_ready else "503 Service Unavailable", _PLAIN, f"{state}\n"
        return "404 Not Found", _PLAIN, "there are /metrics, /healthz, /readyz and /status\n"


def is_own_name(field: str) -> bool:
    """Return whether a Host field is no name that other people can bind to this address (DNS rebinding).

    A page of theirs would read the answers in the browser of a user of this machine. They cannot bind an IP address,
    a name without a dot, this machine's name as its resolver knows it, and one in a domain that it searches. This may
    ask the resolver, and is called in the port's own thread.
    """
    name = field.lower().rpartition(":")[0] if ":" in field and not field.endswith("]") else field.lower()
    name = name.rstrip(".")
    last = name.rpartition(".")[2]
    if "." not in name or name[0] == "[" or last.isdecimal() or last == "localhost":
        return True
    if name in (socket.gethostname().lower(), socket.getfqdn().lower()):
        return True
    try:
        with open(_RESOLVER, encoding="utf-8", errors="replace") as file:
            lines = [line.split() for line in file]
    except OSError:
        return False
    return any(
        f".{name}".endswith(f".{domain.lower().strip('.')}")
        for line in lines
        if line[:1] in (["search"], ["domain"])
        for domain in line[1:]
    )


def open_listener(address: tuple[str, int]) -> socket.socket:
    """Return a non-blocking listening socket. "::" means both versions of IP if the system has them, otherwise IPv4.

    Raises:
        OSError: see `MetricsEndpoint`.
    """
    host, port = address
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # noqa: S104  # what was asked for
    is_six = ":" in host
    listener = socket.create_server(
        (host, port),
        family=socket.AF_INET6 if is_six else socket.AF_INET,
        backlog=PEERS,
        dualstack_ipv6=host == "::",
    )
    listener.setblocking(False)
    return listener


TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPEN_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_EXEMPLAR_CHARS: Final = 128
"""How long the labels of an exemplar may be together."""


def write_text(families: Iterable[Family], common: Labels, *, is_open: bool) -> str:
    """Return all metrics as Prometheus' text 0.0.4, or as OpenMetrics 1.0, which supports exemplars: a line a value.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats;
    https://prometheus.io/docs/specs/om/open_metrics_spec.

    Args:
        families: the metrics to write.
        common: labels that every value has.
        is_open: whether to write OpenMetrics instead of Prometheus' text.
    """
    lines: list[str] = []
    start = ",".join(f'{name}="{_escape(value)}"' for name, value in common)
    for family in families:
        is_counter = family.kind is Kind.COUNTER
        name = f"{family.name}_total" if is_counter and not is_open else family.name
        text = family.text.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {family.kind.value}"]
        suffix = "_total" if is_counter else ""
        for point in family.points:
            labels = _join(start, point.labels)
            exemplar = _write_exemplar(point.exemplar) if is_open and is_counter else ""
            lines.append(f"{family.name}{suffix}{labels} {_write_number(point.value)}{exemplar}")
        if family.histogram is not None:
            lines += _write_histogram(family, start, is_open=is_open)
    if is_open:
        lines.append("# EOF")
    return "\n".join([*lines, ""])


def _write_histogram(family: Family, start: str, *, is_open: bool) -> Iterable[str]:
    histogram = family.histogram
    if histogram is None:
        return
    for at, bound in enumerate((*RECOVERY_BOUNDS_S, math.inf)):
        exemplar = _write_exemplar(histogram.exemplars.get(at)) if is_open else ""
        labels = _join(start, (("le", _write_number(bound)),))
        yield f"{family.name}_bucket{labels} {histogram.counts[at]}{exemplar}"
    yield f"{family.name}_count{_join(start, ())} {histogram.counts[-1]}"
    yield f"{family.name}_sum{_join(start, ())} {_write_number(histogram.total)}"


def _write_exemplar(exemplar: Exemplar | None) -> str:
    if exemplar is None:
        return ""
    labels, left = [], _EXEMPLAR_CHARS
    for name, value in exemplar.labels:
        left -= len(name) + len(value)
        if left >= 0:
            labels.append(f'{name}="{_escape(value)}"')
    return f" # {{{','.join(labels)}}} {_write_number(exemplar.value)} {exemplar.time_s:.3f}"


def _join(start: str, labels: Labels) -> str:
    own = ",".join(f'{name}="{_escape(value)}"' for name, value in labels)
    together = f"{start},{own}" if start and own else start or own
    return f"{{{together}}}" if together else ""


def _write_number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
