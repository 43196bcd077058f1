"""Reads OpenTelemetry's variables: where spans and metrics go. Pure.

Source: https://opentelemetry.io/docs/specs/otel/protocol/exporter and .../configuration/sdk-environment-variables.
"""

from collections.abc import Mapping
from typing import Final

from muster._shared.contract import OtelEnv
from muster._shared.records import NO_ITEMS, record

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
    place, slash, path = rest.partition("/")
    host, colon, port = place.rpartition(":")
    if not colon or place.endswith("]"):
        host, port = place, "443" if scheme == "https" else "80"
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65536
    if scheme not in ("http", "https") or not found or not host or not is_port or "@" in host:
        return None
    return Address(scheme=scheme, host=host, port=int(port), path=f"{slash}{path}" or "/")


def _parse_pairs(text: str) -> dict[str, str]:
    """Parse `k=v,k=v` with values that may be percent-encoded."""
    pairs = (pair.partition("=") for pair in text.split(","))
    return {name.strip(): _unquote(value.strip()) for name, sign, value in pairs if sign and name.strip()}


def _unquote(text: str) -> str:
    if "%" not in text:
        return text
    from urllib.parse import unquote

    return "".join(unquote(text).splitlines())


def _parse_resource(environ: Mapping[str, str]) -> dict[str, str]:
    given = _parse_pairs(environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    service = environ.get("OTEL_SERVICE_NAME", "").strip()
    return {**given, "service.name": service} if service else given


def _read_ms(environ: Mapping[str, str], name: str, default_s: float) -> float:
    text = environ.get(name, "").strip()
    return max(0.1, int(text) / 1000) if text.isascii() and text.isdecimal() and len(text) < 12 else default_s
