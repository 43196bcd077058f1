"""Makes spans of the agent's records. Pure.

Every agent sees a round begin and end, so every agent makes the spans. The agent of group rank 0 sends them. Spans that
end with a round are sent once the next round has formed, or the job ends. If group rank 0 was lost with the round, its
successor sends them. The ids follow from the trace and the round's number, so that all agents, and the workers, mean
the same span.

The job's span ends with the job. A job of weeks shows each attempt and each recovery as soon as it is over; their
parent arrives last.

Source: https://opentelemetry.io/docs/specs/semconv/cicd (a run is the job, a task's run is an attempt).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from muster._shared.records import NO_ITEMS, record, replace
from muster.agent.workers.run_names import TraceParent, derive_span_id

if TYPE_CHECKING:
    from muster.agent.runtime.event_log import EventRecord

Value = str | int | float | bool

INTERNAL, SERVER = 1, 2
"""Kinds of spans, by OTLP's numbers."""
UNSET, OK, ERROR = 0, 1, 2
"""Codes of a span's status."""
_MOST_EVENTS: Final = 64
"""The most events of one span."""
_BEGIN_HANG: Final = ("hang_named", "stood_still")
_END_HANG: Final = ("hang_ended", "moved_again")
_END_ROUND: Final = ("workers_stopped", "job_ended", "agent_ended")
_NOT_TOLD: Final = ("worker_released", "notice", "steps_done", "clock_compared")
"""Records that are no events of a span, because there may be thousands."""


@record
class SpanEvent:
    """A moment of a span."""

    name: str
    at_s: float
    """The time by the wall clock."""
    attributes: Mapping[str, Value] = NO_ITEMS


@record
class Span:
    """One span. All times are by its agent's wall clock."""

    span_id: str
    parent_id: str
    """The id of its parent; "" if it has none."""
    name: str
    began_s: float
    kind: int = INTERNAL
    ended_s: float = 0.0
    attributes: Mapping[str, Value] = NO_ITEMS
    events: tuple[SpanEvent, ...] = ()
    status: int = UNSET
    message: str = ""


class SpanMaker:
    """Makes spans from one agent's records."""

    def __init__(
        self,
        parent: TraceParent | None,
        job: TraceParent,
        run_id: str,
        node_index: int | None,
        *,
        is_elastic: bool = False,
    ) -> None:
        """Begin with the agent.

        Args:
            parent: the span that the job belongs to; None if the job is its own trace.
            job: the span of the job.
            run_id: the job's.
            node_index: this node's. Before the first round, node 0 sends.
            is_elastic: whether the job continues without this node.
        """
        self._trace_id = job.trace_id
        self._job = Span(
            span_id=job.span_id,
            parent_id="" if parent is None else parent.span_id,
            name="muster.job",
            kind=SERVER,
            began_s=0.0,
            attributes={"cicd.pipeline.run.id": run_id},
        )
        self._node_index = node_index
        self._is_elastic = is_elastic
        self._nodes = 1
        """Number of nodes in the round."""
        self._is_stopped = False
        """Whether a signal ends this agent, after which nothing is recovered here."""
        self._has_successor = False
        """Whether the job has nodes that continue without this one, and send what it has not sent."""
        self._offset_s: float | None = None
        """The offset from the monotonic clock to the wall clock at the agent's start. Spans follow the monotonic clock.
        """
        self._open: dict[str, Span] = {}
        """Open spans by their subject: "attempt", "recovery", "drain" or "hang"."""
        self._ended: list[Span] = []
        """Spans that wait for the next round, or the end."""
        self._count = 0

    def read(self, record: "EventRecord") -> list[Span]:
        """Return the spans that this agent must send now."""
        if self._offset_s is None:
            self._offset_s = record.time_s - record.monotonic_s
            self._job = replace(self._job, began_s=record.time_s)
        at_s, what = record.monotonic_s + self._offset_s, record.what
        is_sender = record.node == 0 or (record.node is None and self._node_index in (0, None))
        self._find_successor(record)
        self._begin(record, at_s)
        if what not in _NOT_TOLD:
            self._add_event(record, at_s)
        self._end(record, at_s)
        if what in _END_HANG or what == "drain_withdrawn":
            return self._take(is_sender=is_sender)
        if what in ("workers_started", "job_ended"):
            return self._take(is_sender=is_sender)
        if what == "agent_ended":
            is_sender = is_sender and not self._has_successor
            ended = self._end_job(record, at_s)
            return [*self._take(is_sender=is_sender), *([ended] if is_sender else [])]
        return []

    def _find_successor(self, record: "EventRecord") -> None:
        if record.what == "round_formed":
            nodes = record.detail.get("nodes")
            self._nodes = nodes if isinstance(nodes, int) else 1
            self._has_successor = self._is_elastic and self._nodes > 1
            self._is_stopped = False
        elif record.what == "drain_withdrawn":
            self._is_stopped = False
        elif record.what == "signal":
            self._is_stopped = True
            if record.detail.get("guard_died") is True:  # lost
                self._has_successor = self._nodes > 1
        elif record.what in ("job_ended", "rendezvous_lost"):
            self._has_successor = False

    def _take(self, *, is_sender: bool) -> list[Span]:
        taken, self._ended = self._ended, []
        return taken if is_sender else []

    # -- begin --------------------------------------------------------------------------------------------------------

    def _begin(self, record: "EventRecord", at_s: float) -> None:
        what, detail = record.what, record.detail
        if what == "round_formed":
            attributes: dict[str, Value] = {
                "muster.round": record.round,
                "muster.attempt": record.attempt,
                "cicd.pipeline.task.run.id": f"{self._job.attributes['cicd.pipeline.run.id']}-{record.attempt}",
                **_pick(detail, "world_size", "nodes", "restarts_left"),
            }
            if "recovery" in self._open:  # named by the next round
                own_id = derive_span_id(self._trace_id, "recovery", record.round)
                self._open["recovery"] = replace(self._open["recovery"], span_id=own_id)
            self._open_span("attempt", record.round, at_s, attributes)
        elif what in ("worker_failed", "round_broken", "fenced") and "recovery" not in self._open:
            if detail.get("kind") != "final" and not self._is_stopped:
                self._open_span("recovery", record.round + 1, at_s, {"muster.round": record.round})
        elif what == "drain_begun":
            self._count += 1
            self._open_span("drain", record.round * 1000 + self._count, at_s, _pick(detail, "kind"))
        elif what in _BEGIN_HANG and "hang" not in self._open:
            self._count += 1
            self._open_span("hang", record.round * 1000 + self._count, at_s, {})
            self._open["hang"] = replace(self._open["hang"], message=str(detail.get("text", "")))

    def _open_span(self, what: str, number: int, at_s: float, attributes: Mapping[str, Value]) -> None:
        parent_id = self._job.span_id
        if what in ("drain", "hang") and "attempt" in self._open:
            parent_id = self._open["attempt"].span_id
        self._open[what] = Span(
            span_id=derive_span_id(self._trace_id, what, number),
            parent_id=parent_id,
            name=f"muster.{what}",
            began_s=at_s,
            attributes=attributes,
        )

    def _add_event(self, record: "EventRecord", at_s: float) -> None:
        what = next((each for each in ("recovery", "drain", "hang", "attempt") if each in self._open), None)
        if what is None or len(self._open[what].events) >= _MOST_EVENTS:
            return
        attributes = dict(_pick(record.detail, "reason", "kind", "step", "text", "name"))
        if record.ranks and len(record.ranks) < _MOST_EVENTS:
            attributes["muster.ranks"] = ",".join(map(str, record.ranks))
        event = SpanEvent(name=record.what, at_s=at_s, attributes=attributes)
        self._open[what] = replace(self._open[what], events=(*self._open[what].events, event))

    # -- end ----------------------------------------------------------------------------------------------------------

    def _end(self, record: "EventRecord", at_s: float) -> None:
        what, detail = record.what, record.detail
        if what == "workers_started":
            self._close_span("recovery", at_s, OK)
        elif what in _END_HANG:
            self._close_span("hang", at_s, ERROR)
        elif what == "drain_committed" and "drain" in self._open:
            drain = self._open["drain"]
            self._open["drain"] = replace(drain, attributes={**drain.attributes, **_pick(detail, "step")})
        elif what == "drain_withdrawn":
            self._close_span("drain", at_s, OK)
        elif what in ("round_broken", "fenced") and "attempt" in self._open:
            self._mark_attempt(record)
        elif what in _END_ROUND:
            self._close_span("hang", at_s, ERROR)
            self._close_span("drain", at_s, OK)
            self._end_attempt(record, at_s)
            if what == "job_ended":  # nothing to recover
                self._open.pop("recovery", None)
            elif what == "agent_ended":
                self._close_span("recovery", at_s, ERROR)

    def _mark_attempt(self, record: "EventRecord") -> None:
        """Mark why an attempt ends. Spans show a class, of which there are few, and the reason as text."""
        kind = "hang" if record.detail.get("hang") is True else str(record.detail.get("kind", "fenced"))
        attempt = self._open["attempt"]
        if kind == "final":  # no recovery
            begun = self._open.pop("recovery", None)
            attempt = replace(attempt, events=attempt.events + (() if begun is None else begun.events))
        is_failure = kind in ("failure", "final", "hang", "fenced")
        result = "failure" if is_failure else "cancellation"
        cause = str(record.detail.get("cause") or kind)
        attributes = {**attempt.attributes, "error.type": cause, "cicd.pipeline.task.run.result": result}
        self._open["attempt"] = replace(
            attempt,
            attributes=attributes,
            status=ERROR if is_failure else UNSET,
            message=str(record.detail.get("reason", "")) if is_failure else "",
        )

    def _end_attempt(self, record: "EventRecord", at_s: float) -> None:
        attempt = self._open.get("attempt")
        if attempt is None:
            return
        result = "cicd.pipeline.task.run.result"
        if record.what == "job_ended" and result not in attempt.attributes:
            has_succeeded = record.detail.get("succeeded") is True
            attributes = {**attempt.attributes, result: "success" if has_succeeded else "failure"}
            self._open["attempt"] = replace(attempt, attributes=attributes)
        elif record.what == "workers_stopped" and result not in attempt.attributes:
            return  # the job's end follows
        self._close_span("attempt", at_s, self._open["attempt"].status)

    def _close_span(self, what: str, at_s: float, status: int) -> None:
        span = self._open.pop(what, None)
        if span is not None:
            self._ended.append(replace(span, ended_s=at_s, status=status))

    def _end_job(self, record: "EventRecord", at_s: float) -> Span:
        code = record.detail.get("exit_code")
        result = {0: "success", 143: "cancellation"}.get(code if isinstance(code, int) else 1, "failure")
        attributes = {**self._job.attributes, "cicd.pipeline.result": result, **_pick(record.detail, "exit_code")}
        status = {"success": OK, "failure": ERROR}.get(result, UNSET)
        return replace(self._job, ended_s=at_s, status=status, attributes=attributes)


def _pick(detail: Mapping[str, object], *names: str) -> dict[str, Value]:
    """Return those details of a record that spans show, by their names there."""
    values = {f"muster.{name}": detail.get(name) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, str | int | float | bool)}
