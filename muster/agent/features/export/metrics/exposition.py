"""Writes metrics as Prometheus' text, version 0.0.4, and as OpenMetrics 1.0, which supports exemplars. Pure.

Source: https://prometheus.io/docs/instrumenting/exposition_formats;
https://prometheus.io/docs/specs/om/open_metrics_spec.
"""

import math
from collections.abc import Iterable
from typing import Final

from muster.agent.features.export.metrics.families import RECOVERY_BOUNDS_S, Exemplar, Family, Kind, Labels

TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPEN_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_EXEMPLAR_CHARS: Final = 128
"""How long the labels of an exemplar may be together."""


def write_text(families: Iterable[Family], common: Labels, *, is_open: bool) -> str:
    """Return all metrics, one line for each value.

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
