"""Where the time of a job went: goodput, by definition. It is pure.

The records of one agent and the steps that it sees are its input. All time since the agent's start belongs to exactly
one bucket, so that the buckets sum up to the wall clock:

    productive   steps that were not done again after a restart. Of the first step of each attempt so much as the
                 median step takes; the rest of it is `start` or `restart`.
    start        from the agent's start until the first step: the round, imports, what the first step takes longer.
    waiting      for nodes: the first round, or the next one, has not been formed for `WAITING_S`; the time after that.
    detect       from the last step until the round ended: what was unfinished, and until the failure was seen.
    stop         from the end of a round until no worker of it was left.
    round        from then until the next round was formed.
    restart      from there until the first step of the new attempt.
    repeated     steps that had been done before the restart.
    checkpoint   saves that all ranks agreed on (`muster checkpoint`, a preemption, a stop), and phases of the script
                 with one of the names in `CHECKPOINT_PHASES`.
    hang         from the last step before a hang was reported until it was over, or until the round ended.
    end          from the last step until the job's end.
    pause        counts neither as productive nor as lost.

    goodput = productive / (productive + everything else but pause)

A step settles the time since the one before it. If several steps were done between two looks and some of them were
repeated, their time is divided by their number. A script whose steps only its optimizer counts starts from 0 with each
attempt: none of its steps counts as repeated. Memory and work do not grow with the job's age.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from muster._shared.contract import is_resize
from muster._shared.job_view import Goodput

WAITING_S: Final = 3.0
"""A job without a round for this long waits for nodes."""
STOP_S: Final = 2.0
"""Between the signals to the nodes of a job that is stopped."""
CHECKPOINT_PHASES: Final = frozenset({"checkpoint", "checkpointing", "save", "saving"})
"""Names of `muster.worker.phase` whose time is that of a checkpoint."""
CAUSES: Final = (*("start", "detect", "hang", "stop", "round", "waiting", "restart", "repeated", "checkpoint", "end"),)
"""The causes of lost time."""
HANGS: Final = ("hang_named", "stood_still")
HANG_ENDS: Final = ("hang_ended", "moved_again")

_STEPS = "steps"
"""Not a bucket: the next step, or what ends them, says to which one the time belongs."""
_PAUSE = "pause"
_AFTER = ""
"""The time after the end belongs to nothing."""
_SAMPLE = 128
"""Looks of which the median is known."""


def find_median(values: Iterable[float]) -> float:
    """Return the median of at least one value. `statistics` takes 5 ms and 1 MB of an agent."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


class GoodputLedger:
    """The ledger of one agent's view of the job."""

    def __init__(self) -> None:
        self.time_to_start_s: float | None = None
        """From the agent's start to the first step. While no step was done, it lasts until the workers ran."""
        self.failures: dict[str, int] = {}
        """How often a round ended because of a "worker", a "hang", a lost "node", or a silent leader ("fenced")."""
        self.has_steps = False
        self.is_stopped = False
        """The agent was asked to stop, after the last round was formed: nodes that leave then are no failures."""
        self._lost_node_s: float | None = None
        """When the last round ended because a node was lost. None: another one was formed, or it did not."""
        self._buckets: dict[str, float] = {}
        self._cause = "start"
        self._began_s: float | None = None
        self._accounted_s = 0.0
        """Up to when all time belongs to a bucket."""
        self._last_s = 0.0
        """When the last record came."""
        self._has_begun = False
        """A round was formed."""
        self._done: int | None = None
        """Steps of the round's workers so far."""
        self._redo_until = 0
        """How many steps had been done before the restart."""
        self._step_s: deque[float] = deque(maxlen=_SAMPLE)
        self._first: tuple[str, str, float] | None = None
        """The first step of the attempt, until the median is known: where its time is, where a median of it belongs,
        and how long it was."""
        self._drain_kind = ""
        self._held_step: int | None = None
        """After this step all ranks save, or pause."""
        self._at_step: Mapping[str, float] | None = None
        """What had been lost at the last step of the round, by cause. None: it has done none."""

    @property
    def is_held(self) -> bool:
        """A step has begun a pause or a save of all ranks: when it was done is worth a record."""
        return self._cause in (_PAUSE, "checkpoint")

    @property
    def redo_until(self) -> int:
        """How many steps have to be done until the job is as far as before the restart."""
        return self._redo_until

    # -- records ----------------------------------------------------------------------------------------------------

    def follow(self, what: str, detail: Mapping[str, object], now_s: float) -> None:  # noqa: C901  # a case a record
        """Receive one of the agent's records, in their order. `now_s` is by one monotonic clock."""
        last_s, self._last_s = self._last_s, now_s
        if what == "agent_started":
            self._start(last_s, now_s)
        elif self._began_s is None:
            return
        elif what == "round_formed":
            self._begin_round(detail, now_s)
        elif what == "workers_started" and not self.has_steps and self.time_to_start_s is None:
            self.time_to_start_s = now_s - self._began_s
        elif what == "signal":
            self._stop(now_s)
        elif what in ("round_broken", "fenced"):
            self._end_round(what, detail, now_s)
        elif what == "workers_stopped" and self._cause == "stop":
            self._change("round", now_s)
        elif what == "nodes_awaited" and self._cause in ("round", "start", "restart"):
            self._change("waiting", now_s)
        elif what in HANGS and self._cause in (_STEPS, "start", "restart"):
            self._change("hang", now_s)  # since the last step
        elif what in HANG_ENDS and self._cause == "hang":
            self._change(_STEPS, now_s)
        elif what == "drain_begun":
            self._drain_kind = str(detail.get("kind", ""))
        elif what == "drain_committed":
            self._commit(detail, now_s)
        elif what == "drain_withdrawn" or (what == "checkpoint_completed" and self._is_saved(detail)):
            self._release(now_s)
        elif what in ("job_ended", "rendezvous_lost"):
            self._change(_AFTER, now_s, settles="end")

    def _start(self, last_s: float, now_s: float) -> None:
        if self._began_s is None:
            self._began_s = self._accounted_s = now_s
            return
        # It has waited since the last record.
        self.is_stopped = False
        self._settle_first()
        if self._cause in CAUSES and last_s > self._accounted_s:
            self._add(self._cause, last_s - self._accounted_s)
            self._accounted_s = last_s
        self._redo_until = max(self._redo_until, self._done or 0)
        self._held_step, self._done = None, None
        self._add("waiting", max(0.0, now_s - self._accounted_s))
        self._cause, self._accounted_s = "restart", max(now_s, self._accounted_s)

    def _stop(self, now_s: float) -> None:
        """Count a stop.

        A stop of the job ends its nodes one after the other: that one has left just before was no failure either.
        """
        self.is_stopped = True
        if self._lost_node_s is not None and now_s - self._lost_node_s <= STOP_S:
            self.failures["node"] -= 1
            self.failures = {name: count for name, count in self.failures.items() if count}
            self._lost_node_s = None

    def _begin_round(self, detail: Mapping[str, object], now_s: float) -> None:
        self._at_step, self._lost_node_s, self.is_stopped = None, None, False
        if not self._has_begun:
            waited_s = now_s - self._accounted_s - WAITING_S
            if self._cause == "start" and waited_s > 0 and detail.get("nodes") != 1:
                self._change("waiting", now_s - waited_s)
        self._change("restart" if self._has_begun else "start", now_s)
        self._has_begun = True
        self._done = None

    def _end_round(self, what: str, detail: Mapping[str, object], now_s: float) -> None:
        kind, is_hang = detail.get("kind"), detail.get("hang") is True
        if self._cause in ("stop", "round", "waiting", _AFTER):
            return  # of a round that has ended
        failure = "hang" if is_hang else _FAILURES.get(kind if isinstance(kind, str) else what)
        if failure is not None and not is_resize(detail) and not self.is_stopped:
            self.failures[failure] = self.failures.get(failure, 0) + 1
            self._lost_node_s = now_s if failure == "node" else None
        self._settle_first()
        self._change("stop", now_s, settles="hang" if is_hang else "detect")
        self._redo_until = max(self._redo_until, self._done or 0)
        self._held_step, self._done = None, None

    def _commit(self, detail: Mapping[str, object], now_s: float) -> None:
        step = detail.get("step")
        self._held_step = step if isinstance(step, int) else None
        if self._held_step is not None and (self._done or 0) > self._held_step:
            self._hold(now_s)

    def _hold(self, now_s: float) -> None:
        if self._cause == _STEPS:
            self._change(_PAUSE if self._drain_kind == "pause" else "checkpoint", now_s, settles="productive")

    def _is_saved(self, detail: Mapping[str, object]) -> bool:
        """Return whether the save that all ranks agreed on is complete: an earlier one may be just before."""
        step = detail.get("step")
        is_earlier = isinstance(step, int) and self._held_step is not None and step < self._held_step
        return self._drain_kind != "pause" and not is_earlier

    def _release(self, now_s: float) -> None:
        self._held_step = None
        if self._cause in (_PAUSE, "checkpoint"):
            self._change(_STEPS, now_s)

    # -- steps ------------------------------------------------------------------------------------------------------

    def record_steps(self, done: int, at_s: float, *, is_counted: bool, phase: str = "") -> None:
        """Record how many steps the rank that has done the fewest has done.

        Args:
            done: 1 + its step, or the steps of its optimizer.
            at_s: when it did the last one, or entered or left the phase, by the clock of the records.
            is_counted: the script counts, across attempts.
            phase: in which it is now.
        """
        if done <= 0 or self._began_s is None or self._cause in ("stop", "round", "waiting", _AFTER):
            return
        if self._cause == _PAUSE and done == self._done:
            return
        at_s = max(at_s, self._accounted_s)
        if not self.has_steps:
            self.has_steps, self.time_to_start_s = True, at_s - self._began_s
        before, self._done = self._done, done
        self._redo_until = self._redo_until if is_counted else 0
        if before is None:
            self._record_first(done, at_s)
        elif done < before:  # the script counts each epoch from 0
            self._redo_until = 0
            self._change(_STEPS, at_s, settles="productive")
        elif done > before:
            self._record_more(before, done, at_s)
        if done > self._redo_until:
            self._redo_until = 0
        if phase in CHECKPOINT_PHASES or (self._held_step is not None and done == self._held_step + 1):
            self._hold_for(phase, at_s)
        elif self._cause == "checkpoint" and self._held_step is None:
            self._change(_STEPS, at_s)
        self._at_step = self.read_lost(at_s)

    def _hold_for(self, phase: str, at_s: float) -> None:
        if phase in CHECKPOINT_PHASES and self._cause == _STEPS:
            self._change("checkpoint", at_s, settles="productive")
        else:
            self._hold(at_s)

    def _record_first(self, done: int, at_s: float) -> None:
        """Record the first step of the round, with the start of its workers."""
        took_s, cause = at_s - self._accounted_s, self._cause
        self._settle_first()
        self._change(_STEPS, at_s)
        if cause in ("start", "restart"):
            self._first = cause, "productive" if done > self._redo_until else "repeated", took_s

    def _record_more(self, before: int, done: int, at_s: float) -> None:
        steps, took_s = done - before, at_s - self._accounted_s
        new = max(0, done - max(before, self._redo_until))
        if self._cause in ("hang", "checkpoint", _PAUSE):  # it ended before these steps
            steps_s = min(took_s, steps * find_median(self._step_s)) if self._step_s else 0.0
            self._change(_STEPS, at_s - steps_s)
            self._held_step = None
            took_s = steps_s
        else:
            self._step_s.append(took_s / steps)
        self._add("productive", took_s * new / steps)
        self._add("repeated", took_s * (steps - new) / steps)
        self._accounted_s = at_s
        if len(self._step_s) >= 8:
            self._settle_first()

    def _settle_first(self) -> None:
        """Move a median step out of the first step of the attempt, now that the median is known."""
        self._move_first(self._add)
        self._first = None

    def _move_first(self, add: Callable[[str, float], None]) -> None:
        if self._first is not None and self._step_s:
            cause, into, took_s = self._first
            moved_s = min(took_s, find_median(self._step_s))
            add(cause, -moved_s)
            add(into, moved_s)

    # -- sums -------------------------------------------------------------------------------------------------------

    def read_lost(self, now_s: float) -> dict[str, float]:
        """Return what was lost up to now, by cause."""
        return {name: each for name, each in self.read_buckets(now_s).items() if name in CAUSES}

    def read_lost_before(self, now_s: float) -> Mapping[str, float]:
        """Return what was lost up to the last step of the round, by cause.

        If it has done none, return what was lost up to now.
        """
        return self.read_lost(now_s) if self._at_step is None else self._at_step

    def read_buckets(self, now_s: float) -> dict[str, float]:
        """Return the seconds by bucket up to now.

        They sum up to the time from the agent's start to now, or to the job's end.
        """
        found = dict(self._buckets)

        def add(name: str, for_s: float) -> None:
            found[name] = found.get(name, 0.0) + for_s

        if self._began_s is not None and self._cause != _AFTER:
            add("unfinished" if self._cause == _STEPS else self._cause, max(0.0, now_s - self._accounted_s))
        self._move_first(add)
        return {name: each for name, each in found.items() if each > 0}

    def build_goodput(self, now_s: float) -> Goodput | None:
        """Return the goodput up to now. None: no step was done, and it cannot be known."""
        if not self.has_steps:
            return None
        found, lost = self.read_buckets(now_s), self.read_lost(now_s)
        productive_s = found.get("productive", 0.0)
        return Goodput(
            fraction=round(productive_s / max(1e-9, productive_s + sum(lost.values())), 4),
            productive_s=round(productive_s, 1),
            lost_s=tuple((cause, round(each, 1)) for cause, each in lost.items() if each >= 0.05),
            pause_s=round(found.get(_PAUSE, 0.0), 1),
        )

    def _add(self, name: str, for_s: float) -> None:
        self._buckets[name] = self._buckets.get(name, 0.0) + for_s

    def _change(self, cause: str, now_s: float, *, settles: str = "") -> None:
        """Count the time so far for the last cause. If that was steps, count it for `settles`, else for the new one."""
        last, took_s = self._cause, max(0.0, now_s - self._accounted_s)
        if last == _STEPS:
            last = settles or ("productive" if cause == _STEPS else cause)
        if last != _AFTER:
            self._add(last, took_s)
        self._cause, self._accounted_s = cause, max(self._accounted_s, now_s)


_FAILURES = {"failure": "worker", "final": "worker", "membership": "node", "fenced": "fenced"}
"""By the kind of the end of a round. "drained" is none."""
