"""Keeps what metrics are built from.

The loop's thread writes and others read, so each attribute is replaced as a whole.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from muster import __version__
from muster._shared.job_view import JobState, JobStatus, NodeStatus, RankStatus
from muster._shared.records import replace
from muster.agent.features.export.families import (
    Counts,
    Exemplar,
    Family,
    Labels,
    View,
    build_families,
    count_value,
    follow,
)
from muster.agent.workers.run_names import derive_span_id, parse_trace_parent

if TYPE_CHECKING:
    from muster.agent.runtime.event_log import EventRecord

_MOST_NAMES: Final = 64
"""The most names of records and causes that are counted."""
_STATES: Final = {
    "round_formed": JobState.STARTING,
    "workers_started": JobState.RUNNING,
    "round_broken": JobState.RESTARTING,
    "fenced": JobState.RESTARTING,
    "nodes_awaited": JobState.WAITING,
    "job_ended": JobState.ENDED,
    "agent_ended": JobState.ENDED,
}
"""This node's state after a record."""


class MetricsSource:
    """The source of one agent; an `EventSink`."""

    def __init__(self, run_id: str, role: str, max_restarts: int, trace_parent: str) -> None:
        """Count from now on.

        Args:
            run_id: the job's, which is a label of all metrics.
            role: the workers'.
            max_restarts: the job's budget.
            trace_parent: the job's span, see `run_names.TraceParent`; "" if there are no traces.
        """
        self.common: Labels = (("run_id", run_id),)
        self._trace = parse_trace_parent(trace_parent)
        self._view = View(role=role, max_restarts=max_restarts, version=__version__)
        self._counted_recoveries = 0
        """The number of recoveries that have been counted."""
        self._last_failure: Exemplar | None = None
        """The last round that has ended."""

    @property
    def view(self) -> View:
        """What is known now."""
        return self._view

    def build_families(self) -> list[Family]:
        """Return all metrics that have a value. Any thread may call this."""
        return build_families(self._view)

    def write(self, record: "EventRecord") -> None:
        """See `EventSink`."""
        view, what = self._view, record.what
        state = _STATES.get(what)
        if what in ("round_broken", "fenced"):
            labels = self._name_event("attempt", record.round)
            self._last_failure = Exemplar(labels=labels, value=1.0, time_s=record.time_s)
        counts = replace(view.counts, events=_add(view.counts.events, what))
        cause = record.detail.get("cause")
        if what == "round_broken" and isinstance(cause, str) and cause:
            counts = replace(counts, causes=_add(counts.causes, cause))
        self._view = replace(
            view,
            counts=counts,
            state=view.state if state is None else state.value,
            started_s=record.time_s if what == "agent_started" else view.started_s,
            round=record.round,
            attempt=record.attempt,
            torch=follow(view.torch, record),
        )

    def close(self) -> None:
        """See `EventSink`. There is nothing to close."""

    def look(self, node: NodeStatus, ranks: tuple[RankStatus, ...], job: JobStatus | None) -> None:
        """Keep what the agent has just seen of its own node, and of the job if it leads."""
        view = replace(self._view, node=node, ranks=ranks, job=job)
        if job is not None and job.recovery_count > self._counted_recoveries:
            view = replace(view, counts=self._count_recoveries(view.counts, job))
        if job is not None and job.failures != view.failures and self._last_failure is not None:
            before = dict(view.failures)
            new = {cause: self._last_failure for cause, count in job.failures if count > before.get(cause, 0)}
            view = replace(view, failures=job.failures, failure_exemplars={**view.failure_exemplars, **new})
        self._view = view

    def _count_recoveries(self, counts: Counts, job: JobStatus) -> Counts:
        """Return the listed recoveries that are over and have not been counted.

        Only the last one can still be in progress.
        """
        first = job.recovery_count - len(job.recoveries)
        for at, recovery in enumerate(job.recoveries, first):
            if at < self._counted_recoveries:
                continue
            if recovery.cost_s is None:
                break
            time_s = recovery.time_s + recovery.cost_s
            exemplar = Exemplar(
                labels=self._name_event("recovery", recovery.round), value=recovery.cost_s, time_s=time_s
            )
            counts = replace(counts, recoveries=count_value(counts.recoveries, recovery.cost_s, exemplar))
            self._counted_recoveries = at + 1
        return counts

    def count_exported(self, signal: str, *, taken: int = 0, lost: int = 0) -> None:
        """Count what a collector has taken of a signal ("spans", "metrics"), and what was lost; called on the loop."""
        counts = self._view.counts
        exported, given_up = counts.exported, counts.lost
        self._view = replace(
            self._view,
            counts=replace(counts, exported=_add(exported, signal, taken), lost=_add(given_up, signal, lost)),
        )

    def _name_event(self, what: str, number: int) -> Labels:
        if self._trace is None:
            return (("round", str(number)),)
        span_id = derive_span_id(self._trace.trace_id, what, number)
        return (("trace_id", self._trace.trace_id), ("span_id", span_id))

    def build_status(self) -> JobStatus:
        """Return what is known of the job as `status.json` has it; if another node leads, only of this node."""
        view = self._view
        if view.job is not None:
            return replace(view.job, time_s=round(time.time(), 3))
        node = view.node
        return JobStatus(
            round=view.round,
            attempt=view.attempt,
            state=JobState(view.state),
            time_s=round(time.time(), 3),
            run_id=dict(self.common)["run_id"],
            nodes_running=int(node is not None),
            nodes=() if node is None else (node,),
            ranks=view.ranks,
        )


def _add(counts: Mapping[str, int], name: str, number: int = 1) -> Mapping[str, int]:
    """Return the counts with this many more of a name, up to the limit of names."""
    if name not in counts and len(counts) >= _MOST_NAMES:
        return counts
    return {**counts, name: counts.get(name, 0) + number}
