"""What became of a job so far, from the records of an agent: state, events, recoveries, goodput. Pure.

Every agent knows all of it, so that the next leader goes on where the last one ended. `muster timeline` computes the
same from the records of a job that has ended. It never grows with the job's age: lists keep their ends, and times are
sums. Where the time went is in `goodput`.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from muster._shared.contract import is_resize
from muster._shared.goodput import CAUSES, HANG_ENDS, HANGS, STOP_S, GoodputLedger
from muster._shared.job_view import MOST_EVENTS, MOST_RECOVERIES, Goodput, JobEvent, JobState, Recovery
from muster._shared.records import replace
from muster._shared.reports import describe_replaced


class HistoryRecord(Protocol):
    """What is needed of one record of `events.jsonl`."""

    @property
    def time_s(self) -> float:
        """Wall clock."""

    @property
    def monotonic_s(self) -> float:
        """One clock for all records of a history."""

    @property
    def round(self) -> int:
        """Number of the round."""

    @property
    def attempt(self) -> int:
        """See `EventRecord`."""

    @property
    def what(self) -> str:
        """Name of the transition."""

    @property
    def detail(self) -> Mapping[str, object]:
        """More fields."""


class JobHistory:
    """An `EventSink`. `record_steps` and `record_waiting` add what no record has."""

    def __init__(self, look: Callable[[int], None] = lambda _: None, *, most_recoveries: int = MOST_RECOVERIES) -> None:
        """Begin with nothing.

        Args:
            look: calls `record_steps` with the steps of this moment, of the round of this number: just before it ends.
            most_recoveries: how many of the last ones are kept.
        """
        self._look = look
        self._ledger = GoodputLedger()
        self.state = JobState.STARTING
        self.reason = ""
        self.since_s = 0.0
        """When the job came into its state, by the wall clock."""
        self.started_s: float | None = None
        self.exit_code: int | None = None
        self.restarts_left: int | None = None
        self.has_ended_at_one_step = False
        """All workers have succeeded, or have stopped at a common step."""
        self.cause_class = ""
        """The class of the failure that has ended the last round, until workers run again."""
        self.recovery_count = self.resize_count = 0
        self._round = 0
        """The last one that was formed."""
        self._ranks_alone = 0
        """Its ranks, if it has one node."""
        self._round_done: int | None = None
        """The steps done by the last look at the round. None: its script reports none."""
        self._most_done = self._earlier_done = 0
        """The most steps of all rounds, and of those before the last one."""
        self.total: int | None = None
        """The number of steps, as reported last."""
        self._recoveries: deque[Recovery] = deque(maxlen=most_recoveries)
        self._events: deque[JobEvent] = deque(maxlen=MOST_EVENTS)
        self._drain_kind = ""
        self._broken_s = -math.inf
        """When the last round ended, by the monotonic clock."""
        self._lost_before: Mapping[str, float] | None = None
        """What was lost until the last recovery began, by cause. None: it is over."""

    @property
    def time_to_start_s(self) -> float | None:
        """See `GoodputLedger`."""
        return self._ledger.time_to_start_s

    @property
    def is_held(self) -> bool:
        """See `GoodputLedger`."""
        return self._ledger.is_held

    @property
    def failures(self) -> tuple[tuple[str, int], ...]:
        """How often a round ended because of each kind of failure. See `GoodputLedger`."""
        return tuple(self._ledger.failures.items())

    @property
    def steps_done(self) -> tuple[int, int]:
        """The steps of the last round, and the most before it.

        A job that has succeeded needed no step after its last restart.
        """
        done = self._round_done or 0
        return (done or self._most_done) if self.has_ended_at_one_step else done, self._earlier_done

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """The last ones, oldest first."""
        return tuple(self._recoveries)

    @property
    def events(self) -> tuple[JobEvent, ...]:
        """The last ones, oldest first."""
        return tuple(self._events)

    # -- records ----------------------------------------------------------------------------------------------------

    def write(self, record: HistoryRecord) -> None:  # noqa: C901  # one case for each record
        """See `EventSink`."""
        what, detail, now_s = record.what, record.detail, record.monotonic_s
        if what in ("round_broken", "job_ended"):
            self._look(record.round)
        ends = what in ("round_broken", "fenced", "job_ended")
        lost_before = self._ledger.read_lost_before(now_s) if ends else {}
        self._ledger.follow(what, detail, now_s)
        if what == "agent_started":
            self.started_s = record.time_s
            self._enter(JobState.STARTING, record)
        elif what == "round_formed":
            self._begin_round(record)
        elif what == "workers_started":
            self.cause_class = ""
            self._enter(JobState.RUNNING, record)
            self._note_kept(record)
            if not self._ledger.has_steps:  # no farther than before
                self._end_recovery(self._ledger.read_lost(now_s))
        elif what in ("round_broken", "fenced"):
            self._end_round(record, lost_before)
        elif what == "signal" and now_s - self._broken_s <= STOP_S:
            self.record_stop()
        elif what == "nodes_awaited":
            self._wait(record)
        elif what in ("drain_begun", "drain_committed", "drain_withdrawn"):
            self._follow_drain(record)
        elif what in HANGS:
            self._enter(JobState.HUNG, record, _read_text(detail, "text"))
            self.add_event(record.time_s, self.reason)
        elif what in HANG_ENDS and self.state is JobState.HUNG:
            self._enter(JobState.RUNNING, record)
            self.add_event(record.time_s, _read_text(detail, "text"))
        elif what == "hang_explained":
            self._explain_hang(record)
        elif what == "checkpoint_completed":
            self.add_event(record.time_s, f"all ranks have saved step {detail.get('step')}")
        elif what in ("job_ended", "rendezvous_lost"):
            self._end_job(record, lost_before)
        elif what == "agent_ended":
            code = detail.get("exit_code")
            self.exit_code = code if isinstance(code, int) else self.exit_code

    def close(self) -> None:
        """See `EventSink`."""

    def _enter(self, state: JobState, record: HistoryRecord, reason: str = "") -> None:
        if state is not self.state:
            self.since_s = record.time_s
        self.state, self.reason = state, reason

    def add_event(self, time_s: float, text: str) -> None:
        """Add an event, also of what is no record: `time_s` by the wall clock."""
        if text and not (self._events and self._events[-1].text == text):
            self._events.append(JobEvent(time_s=round(time_s, 3), text=text))

    def _begin_round(self, record: HistoryRecord) -> None:
        detail = record.detail
        self._round = record.round
        is_first = not self._events
        left = detail.get("restarts_left")
        self.restarts_left = left if isinstance(left, int) else None
        if self._recoveries and self._lost_before is not None:
            self._recoveries[-1] = replace(self._recoveries[-1], round=record.round, attempt=record.attempt)
            self._note_snapshot(detail.get("snapshot_step"))
        self._round_done, self._earlier_done = None, self._most_done
        self._enter(JobState.STARTING if is_first else JobState.RESTARTING, record, "" if is_first else self.reason)
        nodes, ranks = detail.get("nodes"), detail.get("world_size")
        self._ranks_alone = ranks if nodes == 1 and isinstance(ranks, int) else 0
        self.add_event(record.time_s, f"round {record.round}: {_count(ranks, 'rank')} on {_count(nodes, 'node')}")

    def _note_kept(self, record: HistoryRecord) -> None:
        """Note how many processes went on from the last round, in a job of one node: this record tells of one."""
        kept = record.detail.get("kept")
        if isinstance(kept, int) and kept > 0 and self._ranks_alone >= kept:
            self.add_event(record.time_s, describe_replaced(self._ranks_alone - kept, self._ranks_alone))

    def _note_snapshot(self, step: object) -> None:
        """Note that the recovery continues a snapshot in memory, if it has a step."""
        if isinstance(step, int):
            done = self._round_done
            again = None if done is None else max(0, done - 1 - step)
            self._recoveries[-1] = replace(self._recoveries[-1], snapshot_step=step, repeated_steps=again)

    def _end_round(self, record: HistoryRecord, lost_before: Mapping[str, float]) -> None:
        """End a round. `lost_before` is what had been lost up to its last step, by cause."""
        self._broken_s = record.monotonic_s
        kind = record.detail.get("kind")
        reason = _read_text(record.detail, "reason") or "the leader was silent for too long"
        self.cause_class = _read_text(record.detail, "cause")
        if kind == "final":
            self._enter(JobState.ENDED, record, reason)
            self.exit_code = 1
        else:
            if self.state is not JobState.RESTARTING and not self._ledger.is_stopped:
                self._begin_recovery(record, reason, lost_before)
            self._enter(JobState.RESTARTING, record, reason)
        self.add_event(record.time_s, reason)

    def _explain_hang(self, record: HistoryRecord) -> None:
        text = _read_text(record.detail, "text")
        self.add_event(record.time_s, text)
        if text and self._recoveries and self._lost_before is not None:
            self._recoveries[-1] = replace(self._recoveries[-1], cause=f"the job hung: {text}")

    def _follow_drain(self, record: HistoryRecord) -> None:
        detail = record.detail
        if record.what == "drain_begun":
            self._drain_kind = _read_text(detail, "kind")
            if self._drain_kind == "stop":
                self._enter(JobState.DRAINING, record, "all ranks are to stop at one step")
        elif record.what == "drain_committed":
            step = detail.get("step")
            if self._drain_kind == "stop":
                self._enter(JobState.DRAINING, record, f"all ranks stop at step {step}")
                self.add_event(record.time_s, self.reason)
            elif self._drain_kind == "pause":
                self._enter(JobState.PAUSED, record)
                self.add_event(record.time_s, f"paused at step {step}")
        elif self.state in (JobState.DRAINING, JobState.PAUSED):
            self._enter(JobState.RUNNING, record)
            self.add_event(record.time_s, _read_text(detail, "reason"))

    def _end_job(self, record: HistoryRecord, lost_before: Mapping[str, float]) -> None:
        """End the job. `lost_before` is as for the end of a round. A job that succeeded is as far as it ever was."""
        detail = record.detail
        is_success = detail.get("succeeded") is True
        reason = "" if is_success and not detail.get("drained") else _read_text(detail, "reason")
        if detail.get("drained") is True:
            reason = reason or "all ranks have stopped at one step, before the work was done"
        if is_success and not detail.get("drained"):
            self._end_recovery(lost_before)
        self._enter(JobState.ENDED, record, reason)
        self.has_ended_at_one_step = is_success or detail.get("drained") is True
        self.exit_code = 0 if is_success and not detail.get("drained") else self.exit_code
        self.add_event(record.time_s, reason or "all workers succeeded")

    # -- what no record tells ---------------------------------------------------------------------------------------

    def _wait(self, record: HistoryRecord) -> None:
        if self.state in (JobState.STARTING, JobState.RESTARTING, JobState.WAITING):
            self._enter(JobState.WAITING, record, _read_text(record.detail, "reason"))

    def record_stop(self) -> None:
        """Record that a signal ends this agent.

        The end of its last round was no recovery, unless workers have started since.
        """
        is_open = self._lost_before is not None and self.state is JobState.RESTARTING
        if is_open and self._recoveries[-1].round > self._round:
            self.resize_count -= self._recoveries.pop().is_resize
            self.recovery_count -= 1
            self._lost_before = None

    def record_steps(
        self, done: int, at_s: float, *, is_counted: bool, phase: str = "", total: int | None = None
    ) -> None:
        """Record how many steps the rank has done that has done the fewest: see `GoodputLedger.record_steps`."""
        if is_counted:  # an optimizer restarts at 0
            self._round_done, self._most_done = done, max(self._most_done, done)
            self.total = total if total is not None else self.total
        self._ledger.record_steps(done, at_s, is_counted=is_counted, phase=phase)
        if done > 0 and self.state is not JobState.RESTARTING and self._ledger.redo_until == 0:
            self._end_recovery(self._ledger.read_lost(at_s))

    def build_goodput(self, now_s: float) -> Goodput | None:
        """Return the goodput up to now. None: no step was done."""
        return self._ledger.build_goodput(now_s)

    def read_buckets(self, now_s: float) -> Mapping[str, float]:
        """See `GoodputLedger.read_buckets`."""
        return self._ledger.read_buckets(now_s)

    def _begin_recovery(self, record: HistoryRecord, cause: str, lost_before: Mapping[str, float]) -> None:
        self._end_recovery(lost_before)
        self._lost_before = lost_before
        self.recovery_count += 1
        self.resize_count += is_resize(record.detail)
        self._recoveries.append(
            Recovery(
                round=record.round + 1,
                attempt=record.attempt,
                cause=cause,
                time_s=round(record.time_s, 3),
                cause_class=self.cause_class,
                is_resize=is_resize(record.detail),
            )
        )

    def _end_recovery(self, lost: Mapping[str, float]) -> None:
        """End a recovery. `lost` is what has been lost by then, by cause."""
        before, self._lost_before = self._lost_before, None
        if before is not None:
            rounded = ((name, round(lost.get(name, 0.0) - before.get(name, 0.0), 2)) for name in CAUSES)
            parts = tuple((name, part_s) for name, part_s in rounded if part_s > 0)
            cost_s = round(sum(part_s for _, part_s in parts), 2)
            self._recoveries[-1] = replace(self._recoveries[-1], cost_s=cost_s, parts_s=parts)


def _read_text(detail: Mapping[str, object], name: str) -> str:
    value = detail.get(name)
    return value if isinstance(value, str) else ""


def _count(number: object, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
