"""Writes spans and metrics as OTLP's JSON. Pure.

Enumerations are written as numbers, ids in hexadecimal, and 64-bit integers as text. Source: opentelemetry-proto
(examples/trace.json, examples/metrics.json); https://opentelemetry.io/docs/specs/otlp.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from muster import __version__
from muster._shared.codec import to_json
from muster.agent.features.export.families import RECOVERY_BOUNDS_S, Exemplar, Family, Kind, Labels
from muster.agent.features.export.spans import Span, Value

_SCOPE: Final[dict[str, object]] = {"name": "muster", "version": __version__}
_CUMULATIVE: Final = 2
_MESSAGE_CHARS: Final = 1000

Json = dict[str, object]


def write_spans(spans: Iterable[Span], trace_id: str, resource: Mapping[str, str]) -> bytes:
    """Return the body of a request to /v1/traces.

    Args:
        spans: those that have ended.
        trace_id: the trace id of all of them, 32 hexadecimal digits.
        resource: this agent's attributes.
    """
    scope: Json = {"scope": _SCOPE, "spans": [_build_span(span, trace_id) for span in spans]}
    content = {"resourceSpans": [{"resource": _build_resource(resource), "scopeSpans": [scope]}]}
    return to_json(content).encode()


def _build_span(span: Span, trace_id: str) -> Json:
    built: Json = {
        "traceId": trace_id,
        "spanId": span.span_id,
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": _write_time(span.began_s),
        "endTimeUnixNano": _write_time(max(span.began_s, span.ended_s)),
        "attributes": _build_attributes(span.attributes),
        "events": [
            {
                "timeUnixNano": _write_time(event.at_s),
                "name": event.name,
                "attributes": _build_attributes(event.attributes),
            }
            for event in span.events
        ],
        "status": {"code": span.status, **({"message": span.message[:_MESSAGE_CHARS]} if span.message else {})},
    }
    return {**built, "parentSpanId": span.parent_id} if span.parent_id else built


def write_metrics(
    families: Iterable[Family], common: Labels, resource: Mapping[str, str], *, began_s: float, now_s: float
) -> bytes:
    """Return the body of a request to /v1/metrics.

    Args:
        families: the metrics to send.
        common: attributes of every point.
        resource: attributes of this agent.
        began_s: when counting began. All times are by the wall clock.
        now_s: the time of the values.
    """
    began, now = _write_time(began_s), _write_time(now_s)
    # One by one: all together take ten times their text's memory.
    metrics = ",".join(to_json(_build_metric(family, common, began, now)) for family in families)
    scope = f'{{"scope":{to_json(_SCOPE)},"metrics":[{metrics}]}}'
    head = to_json(_build_resource(resource))
    return f'{{"resourceMetrics":[{{"resource":{head},"scopeMetrics":[{scope}]}}]}}'.encode()


def _build_metric(family: Family, common: Labels, began: str, now: str) -> Json:
    is_counter = family.kind is Kind.COUNTER
    points: list[Json] = []
    for point in family.points:
        built: Json = {
            "attributes": _build_attributes(dict((*common, *point.labels))),
            "timeUnixNano": now,
            "asDouble": _write_number(point.value),
        }
        if is_counter:
            built |= {"startTimeUnixNano": began, "exemplars": _build_exemplars([point.exemplar])}
        points.append(built)
    head: Json = {"name": family.name, "description": family.text}
    if family.histogram is not None:
        return {**head, "histogram": _build_histogram(family, common, began, now)}
    if is_counter:
        return {
            **head,
            "sum": {"aggregationTemporality": _CUMULATIVE, "isMonotonic": True, "dataPoints": points},
        }
    return {**head, "gauge": {"dataPoints": points}}


def _build_histogram(family: Family, common: Labels, began: str, now: str) -> Json:
    histogram = family.histogram
    assert histogram is not None  # noqa: S101  # for mypy: the caller has looked
    counts = histogram.counts
    own = [count - before for before, count in zip((0, *counts[:-1]), counts, strict=True)]
    point: Json = {
        "attributes": _build_attributes(dict(common)),
        "startTimeUnixNano": began,
        "timeUnixNano": now,
        "count": str(counts[-1]),
        "sum": histogram.total,
        "bucketCounts": [str(count) for count in own],
        "explicitBounds": list(RECOVERY_BOUNDS_S),
        "exemplars": _build_exemplars(histogram.exemplars.values()),
    }
    return {"aggregationTemporality": _CUMULATIVE, "dataPoints": [point]}


def _build_exemplars(exemplars: Iterable[Exemplar | None]) -> Sequence[Json]:
    built: list[Json] = []
    for exemplar in exemplars:
        if exemplar is None:
            continue
        labels = dict(exemplar.labels)
        ids = {"traceId": labels.pop("trace_id", ""), "spanId": labels.pop("span_id", "")}
        built.append(
            {
                "timeUnixNano": _write_time(exemplar.time_s),
                "asDouble": exemplar.value,
                "filteredAttributes": _build_attributes(labels),
                **{name: value for name, value in ids.items() if value},
            }
        )
    return built


def _build_resource(attributes: Mapping[str, str]) -> Json:
    return {"attributes": _build_attributes(attributes)}


def _build_attributes(attributes: Mapping[str, Value]) -> list[Json]:
    return [{"key": name, "value": _build_value(value)} for name, value in attributes.items()]


def _build_value(value: Value) -> Json:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": _write_number(value)}
    return {"stringValue": value.encode(errors="replace").decode()}


def _write_number(value: float) -> float | str:
    """Write a number; NaN and infinity are text, as in protobuf's JSON, because JSON has neither."""
    number = float(value)
    if math.isnan(number):
        return "NaN"
    return number if math.isfinite(number) else "Infinity" if number > 0 else "-Infinity"


def _write_time(at_s: float) -> str:
    return str(max(0, round(at_s * 1e9)))
