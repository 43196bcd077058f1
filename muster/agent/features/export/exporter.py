"""Sends spans and metrics to a collector over HTTP. Nothing of the job ever waits for it.

A separate thread sends. Spans wait in a buffer with a limit. What has no room, and what the collector refuses for good,
is counted (`muster_agent_otlp_lost`). A collector that is absent, slow or busy is tried again, ever less often. Metrics
are not kept, because the next ones are newer. The agent's end waits at most `_CLOSE_S`, and only for a collector that
answers.

OpenTelemetry's variables say where both go. Source: https://opentelemetry.io/docs/specs/otel/protocol/exporter and
.../configuration/sdk-environment-variables.

The client is hand-written, because `http.client` imports `ssl` and `email`, together 6 MB, which an http address does
not need.
"""

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from muster._shared.contract import OtelEnv, show_controls
from muster._shared.records import NO_ITEMS, record
from muster.agent.features.export.encoding import write_metrics, write_spans
from muster.agent.features.export.spans import Span, SpanMaker
from muster.agent.runtime.loop import SideThread
from muster.agent.runtime.ports import encode_host

if TYPE_CHECKING:
    from muster.agent.features.export.source import MetricsSource
    from muster.agent.runtime.event_log import EventRecord


SIGNALS: Final = ("traces", "metrics")
_PROTOCOLS: Final = ("", "http/json", "http/protobuf")
"""A receiver of OTLP over HTTP takes JSON at the same address as protobuf."""


@record
class Address:
    """The destination of one signal."""

    scheme: str
    """http or https."""
    host: str
    port: int
    path: str


@record
class Settings:
    """What the variables say."""

    addresses: Mapping[str, Address] = NO_ITEMS
    """Addresses by signal; a missing signal is not sent."""
    headers: Mapping[str, str] = NO_ITEMS
    timeout_s: float = 10.0
    """The limit for one request."""
    metrics_every_s: float = 60.0
    ca_file: str | None = None
    resource: Mapping[str, str] = NO_ITEMS
    """Attributes of the resource, as the user has given them."""
    problems: tuple[str, ...] = ()
    """Why signals are not sent, with a line for each variable."""


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Read the settings; `problems` names variables with invalid values."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return Settings()
    addresses: dict[str, Address] = {}
    problems: list[str] = []
    for signal in SIGNALS:
        upper = signal.upper()
        if environ.get(f"OTEL_{upper}_EXPORTER", "otlp").strip().lower() == "none":
            continue
        own, base = f"OTEL_EXPORTER_OTLP_{upper}_ENDPOINT", OtelEnv.ENDPOINT
        name = own if environ.get(own) else base
        url = environ.get(name, "").strip()
        if not url:
            continue
        problem = _check_protocol(environ, upper)
        address = None if problem else _parse_url(url if name == own else f"{url.rstrip('/')}/v1/{signal}")
        if address is not None:
            addresses[signal] = address
        else:
            shown = f"...@{url.rpartition('@')[2]}" if "@" in url else url  # hides passwords
            problems.append(problem or f"{name} is {shown!r}, which is not the address of an HTTP server")
    return Settings(
        addresses=addresses,
        headers=_parse_pairs(environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")),
        timeout_s=_read_ms(environ, "OTEL_EXPORTER_OTLP_TIMEOUT", 10.0),
        metrics_every_s=_read_ms(environ, "OTEL_METRIC_EXPORT_INTERVAL", 60.0),
        ca_file=environ.get("OTEL_EXPORTER_OTLP_CERTIFICATE") or None,
        resource=_parse_resource(environ),
        problems=tuple(dict.fromkeys(problems)),
    )


def _check_protocol(environ: Mapping[str, str], signal: str) -> str:
    """Return what is wrong with the requested protocol; "" if nothing is."""
    own = f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL"
    name = own if environ.get(own) else "OTEL_EXPORTER_OTLP_PROTOCOL"
    protocol = environ.get(name, "").strip()
    if protocol in _PROTOCOLS:
        return ""
    return (
        f"{name} is {protocol!r}: muster sends its own spans and metrics over HTTP only, so none are sent; set it to "
        "http/json, and the endpoint to the collector's port for HTTP, which is usually 4318"
    )


def _parse_url(url: str) -> Address | None:
    scheme, found, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    host, colon, port = authority.rpartition(":")
    if not colon or authority.endswith("]"):
        host, port = authority, "443" if scheme == "https" else "80"
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65536
    if scheme not in ("http", "https") or not found or not host or not is_port or "@" in host:
        return None
    return Address(scheme=scheme, host=host, port=int(port), path=f"{slash}{path}" or "/")


def _parse_pairs(text: str) -> dict[str, str]:
    """Parse `k=v,k=v` with values that may be percent-encoded."""
    from urllib.parse import unquote

    pairs = (pair.partition("=") for pair in text.split(","))
    return {
        name.strip(): "".join(unquote(value.strip()).splitlines())
        for name, sign, value in pairs
        if sign and name.strip()
    }


def _parse_resource(environ: Mapping[str, str]) -> dict[str, str]:
    attributes = _parse_pairs(environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    service = environ.get("OTEL_SERVICE_NAME", "").strip()
    return {**attributes, "service.name": service} if service else attributes


def _read_ms(environ: Mapping[str, str], name: str, default_s: float) -> float:
    text = environ.get(name, "").strip()
    return max(0.1, int(text) / 1000) if text.isascii() and text.isdecimal() and len(text) < 12 else default_s


KEPT_SPANS: Final = 512
"""The most spans that wait for the collector."""
BATCH_SPANS: Final = 128
"""The most spans in one request."""
_GATHER_S: Final = 0.2
"""Time in which spans that end together are collected."""
_AGAIN_S: Final = 5.0
"""Time until a failed request is repeated, doubled each time."""
_MOST_AGAIN_S: Final = 300.0
_CLOSE_S: Final = 1.0
_SLOW_S: Final = 0.5
"""At the end, a collector that has not answered for this long is not awaited."""
_ANSWER_BYTES: Final = 64 << 10
_PASSING: Final = (408, 429, 502, 503, 504)
"""After these codes the same request may succeed later; after any other code outside 2xx it will not.

Source: https://opentelemetry.io/docs/specs/otlp/#failures-1.
"""


class Exporter:
    """The exporter of one agent; an `EventSink`, which closes it."""

    def __init__(
        self,
        settings: "Settings",
        source: "MetricsSource",
        maker: SpanMaker | None,
        *,
        trace_id: str,
        resource: Mapping[str, str],
        on_loop: Callable[[Callable[[], None]], None],
        print_line: Callable[[str], None],
    ) -> None:
        """Send nothing yet; the thread starts with the first record.

        Args:
            settings: where to send.
            source: the metrics'.
            maker: makes the spans; None if none are recorded.
            trace_id: the spans'.
            resource: this agent's attributes.
            on_loop: runs a call on the agent's loop soon. Any thread may call it.
            print_line: prints a line. It is called in any thread.
        """
        self._settings = settings
        self._source = source
        self._maker = maker if "traces" in settings.addresses else None
        self._trace_id = trace_id
        self._resource = resource
        self._on_loop = on_loop
        self._print_line = print_line
        self._began_s = time.time()
        self._thread = SideThread(self._run, "muster-otlp")
        self._spans: deque[Span] = deque()
        self._is_silent = False
        """Whether the last request had no answer."""
        self._asked_s: float | None = None
        """When the request was made that has no answer yet."""
        self._has_complained = False

    # -- on the loop --------------------------------------------------------------------------------------------------

    def write(self, record: "EventRecord") -> None:
        """See `EventSink`."""
        spans = [] if self._maker is None else self._maker.read(record)
        if spans:
            lost = 0
            with self._thread.changed:
                self._spans.extend(spans)
                while len(self._spans) > KEPT_SPANS:
                    self._spans.popleft()
                    lost += 1
                self._thread.wake()
            if lost:
                self._source.count_exported("spans", lost=lost)
        if not self._thread.is_started:
            self._thread.wake()

    def close(self) -> None:
        """See `EventSink`. Waiting spans are sent within a limit to a collector that answers."""
        asked_s = self._asked_s
        is_slow = asked_s is not None and time.monotonic() - asked_s > _SLOW_S
        self._thread.close(0.0 if self._is_silent or is_slow else _CLOSE_S)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        metrics_due_s = time.monotonic() + self._settings.metrics_every_s
        spans_due_s, again_s = 0.0, _AGAIN_S
        while True:
            with self._thread.changed:
                if not self._thread.is_closing:
                    now_s = time.monotonic()
                    due_s = min(metrics_due_s, spans_due_s if self._spans else metrics_due_s)
                    self._thread.changed.wait(max(0.0, due_s - now_s))
                is_closing = self._thread.is_closing
            if not is_closing and self._spans:
                time.sleep(_GATHER_S)
            is_well = True
            if self._spans and (is_closing or time.monotonic() >= spans_due_s):
                wait_s = self._send_spans()
                is_well = wait_s is None
                spans_due_s = 0.0 if wait_s is None else time.monotonic() + max(wait_s, again_s)
            if is_well and (is_closing or time.monotonic() >= metrics_due_s):
                wait_s = self._send_metrics()
                is_well = wait_s is None
                metrics_due_s = time.monotonic() + max(self._settings.metrics_every_s, wait_s or 0.0)
            again_s = _AGAIN_S if is_well else min(_MOST_AGAIN_S, 2 * again_s)
            if is_closing:
                self._count("spans", lost=len(self._spans))
                return

    def _send_spans(self) -> float | None:
        """Send all waiting spans; return None, or how long the collector wants to be left alone."""
        while self._spans:
            with self._thread.changed:
                batch = [self._spans.popleft() for _ in range(min(BATCH_SPANS, len(self._spans)))]
            body = write_spans(batch, self._trace_id, self._resource)
            wait_s = self._post("traces", body, len(batch), "spans")
            if wait_s is not None:
                with self._thread.changed:
                    room = max(0, KEPT_SPANS - len(self._spans))
                    self._spans.extendleft(reversed(batch[len(batch) - room :] if room < len(batch) else batch))
                self._count("spans", lost=max(0, len(batch) - room))
                return wait_s
        return None

    def _send_metrics(self) -> float | None:
        if "metrics" not in self._settings.addresses:
            return None
        families = self._source.build_families()
        body = write_metrics(families, self._source.common, self._resource, began_s=self._began_s, now_s=time.time())
        wait_s = self._post("metrics", body, len(families), "metrics")
        if wait_s is not None:
            self._count("metrics", lost=len(families))
        return wait_s

    def _post(self, signal: str, body: bytes, number: int, name: str) -> float | None:
        """Send one request; return None when it is done, or how long to wait before it is sent again."""
        self._asked_s = time.monotonic()
        try:
            status, wait_s = post(self._settings.addresses[signal], body, self._settings)
        except (OSError, ValueError) as error:
            self._is_silent = True
            self._complain(str(error) or type(error).__name__)
            return 0.0
        finally:
            self._asked_s = None
        self._is_silent = False
        if 200 <= status < 300:
            self._count(name, taken=number)
            return None
        self._complain(f"it answers with status {status}")
        if status in _PASSING:
            return wait_s
        self._count(name, lost=number)
        return None

    def _count(self, name: str, *, taken: int = 0, lost: int = 0) -> None:
        if taken or lost:
            self._on_loop(lambda: self._source.count_exported(name, taken=taken, lost=lost))

    def _complain(self, problem: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            line = (
                f"OpenTelemetry: the collector does not accept what is sent; the job goes on: {show_controls(problem)}"
            )
            self._print_line(line)


def post(address: "Address", body: bytes, settings: "Settings") -> tuple[int, float]:
    """Send one request; return the status and Retry-After of the answer, in seconds (0 if it has none).

    Raises:
        OSError: nothing answers there, or not within the limit.
        ValueError: the answer is not HTTP.
    """
    until_s = time.monotonic() + settings.timeout_s
    host = f"[{address.host}]" if ":" in address.host else address.host
    fields = {
        "Host": f"{host}:{address.port}",
        "User-Agent": "muster",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **settings.headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    request = f"POST {address.path} HTTP/1.1\r\n{lines}\r\n".encode("utf-8", "replace") + body
    with contextlib.ExitStack() as stack:
        where: Any = encode_host(address.host), address.port  # typeshed knows only text
        link = stack.enter_context(socket.create_connection(where, settings.timeout_s))
        if address.scheme == "https":
            import ssl

            context = ssl.create_default_context(cafile=settings.ca_file)
            link = stack.enter_context(context.wrap_socket(link, server_hostname=address.host))
        link.settimeout(max(0.1, until_s - time.monotonic()))
        link.sendall(request)
        answer = b""
        while b"\r\n\r\n" not in answer and len(answer) < _ANSWER_BYTES:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("it does not answer in time")
            link.settimeout(left_s)
            data = link.recv(4096)
            if not data:
                break
            answer += data
    return parse_answer(answer)


def parse_answer(answer: bytes) -> tuple[int, float]:
    r"""Return the status, and how many seconds to wait before the next request.

    >>> parse_answer(b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 7\r\n\r\n")
    (429, 7.0)

    Raises:
        ValueError: it is not an HTTP answer.
    """
    first, *lines = answer.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if not first.startswith("HTTP/") or len(parts) < 2 or not (parts[1].isascii() and parts[1].isdecimal()):
        raise ValueError("its answer is none of HTTP")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    wait = fields.get("retry-after", "")
    return int(parts[1]), min(_MOST_AGAIN_S, float(wait)) if wait.isascii() and wait.isdecimal() else 0.0
