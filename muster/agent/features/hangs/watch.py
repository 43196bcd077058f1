"""Detects that this node's workers hang, from the CPU time and the bytes written in the workers' sessions.

A step or phase that the worker reports through `muster.worker` counts as activity, and so does an optimizer's step if
the script reports none. All that a process of a worker's session writes also counts: to a log file, an inherited
console, a pipe, a checkpoint. What it reads does not count. A thread that polls a pipe or /proc once a second continues
to read while everything else hangs, and a worker that reads something useful also computes or writes.
"""

from collections.abc import Callable, Mapping

from muster._shared.records import record, replace
from muster.agent.features.hangs.sessions import (
    ProcessKey,
    Reading,
    complete,
    count_cpu_s,
    find_background_s,
    has_loaded,
    has_written,
)
from muster.agent.runtime.limits import (
    COLLECTIVE_WAIT_S,
    HANG_LEAST_S,
    HANG_LOOK_S,
    HANG_NAMED_BUSY_S,
    HANG_UNKNOWN_S,
    STILL_S,
)
from muster.agent.runtime.loop import Loop, Timer

FACTOR = 5.0
"""A limit is this many times the longest pause. NVRx has the same margin."""
WARM_UP = 5
"""Looks at an active job after which its steps are known, because the first ones compile."""


@record
class Limits:
    """Limits in seconds."""

    quiet_s: float
    busy_s: float


class LearnedLimits:
    """Learns from a job's own pauses how long it may pause, for `--hang-timeout auto`. New for each attempt.

    A pause is a time in which no rank of the node enters or completes a collective or does a step. A pause is quiet
    while no worker uses CPU time or writes anything either. Then the margin is smaller, because a long evaluation or a
    compilation is not quiet. Pauses are learned by the phase that workers name with `muster.worker.phase`, because an
    evaluation or a checkpoint may take longer than a step. Until a phase is known, its limits are wide, but below
    NCCL's own timeout of 600 s, after which torch ends the process.

    A rank that waits in a collective counts as hung before torch ends it, whatever was learned, and also with a limit
    in seconds.
    """

    def __init__(self) -> None:
        self._looks: dict[str, int] = {}
        """Looks at an active job, by phase."""
        self._quiet_s: dict[str, float] = {}
        self._busy_s: dict[str, float] = {}
        """The longest pauses, by phase."""

    def record_active(self, phase: str, *, pause_s: float, quiet_s: float) -> None:
        """Record that the workers are active after a pause.

        Args:
            phase: the phase of the pause; "" if none was named.
            pause_s: how long it was.
            quiet_s: its longest quiet part.
        """
        self._looks[phase] = self._looks.get(phase, 0) + 1
        self._busy_s[phase] = max(self._busy_s.get(phase, 0.0), pause_s)
        self._quiet_s[phase] = max(self._quiet_s.get(phase, 0.0), quiet_s)

    def find(self, phase: str) -> Limits:
        """Return the limits for a pause in this phase."""
        least_busy_s = HANG_NAMED_BUSY_S if phase else HANG_UNKNOWN_S
        is_known = self._looks.get(phase, 0) >= (1 if phase else WARM_UP)
        if not is_known:
            return Limits(quiet_s=HANG_UNKNOWN_S, busy_s=least_busy_s)
        return Limits(
            quiet_s=max(HANG_LEAST_S, FACTOR * self._quiet_s[phase]),
            busy_s=max(least_busy_s, FACTOR * self._busy_s[phase]),
        )

    def describe(self, phase: str) -> str:
        """Return what was learned: "the longest pause before was 2 s"."""
        if phase not in self._busy_s:
            return "no step is known yet" if not phase else f"phase {phase!r} is not known yet"
        of = f" of phase {phase!r}" if phase else ""
        return f"the longest pause{of} before was {self._busy_s[phase]:.0f} s"


STILL_FACTOR = 5.0
"""The report comes only after this many times the longest standstill before."""
_WAITING_SHARE = 0.1
"""CPU share that a worker's other threads may use while it waits in a collective."""


@record
class Activity:
    """What one worker has done so far."""

    captured_bytes: int
    """Output that the agent captured."""
    processes: Mapping[ProcessKey, Reading]
    """All processes of the worker's session; empty on systems without /proc."""
    progress_ns: int | None = None
    """When the worker last reported a step or phase through `muster.worker`; None if never.

    If its script reports no steps, the last step of an optimizer counts.
    """
    phase: str = ""
    """The innermost phase that the worker has named with `muster.worker.phase`."""
    collectives: tuple[int, ...] | None = None
    """Changes whenever the worker enters or completes a collective; None if it is not known to have entered any."""
    has_answered: bool = True
    """Whether that is known at all: False if it has a process group, and its server has not answered yet."""

    launches: tuple[int, ...] | None = None
    """Changes whenever ranks of an NCCL communicator, having launched different numbers of operations, launch one.

    None means that there is no such communicator, as far as is known.
    """

    timeout_s: float = 0.0
    """The timeout of a collective for which torch will soon end the waiting worker; 0 if none ends soon, as far as is
    known."""
    is_waiting: bool = False
    """Whether it is in a collective, or in `init_process_group`."""

    @property
    def is_judged_by_output(self) -> bool:
        """Whether it has shown neither collectives nor steps, so that output and CPU time count."""
        return self.progress_ns is None and self.collectives is None and self.launches is None


class StandStill:
    """Finds since when all workers of a node stand still. Pure.

    This is long before they count as hung, and does not need anything learned.

    A worker stands still if it does no step, enters and completes no collective, uses no CPU time, and writes and loads
    nothing. While it waits in a collective, its other threads may write and use a little CPU time. So a worker that
    computes, compiles, loads its data or saves a checkpoint does not stand still, and the watch reports nothing.
    """

    def __init__(self) -> None:
        self.for_s = 0.0
        """How long all of them have stood still; 0 if one does not, or if none runs."""
        self._since_s: dict[int, float] = {}
        """By local rank, for those that run."""
        self._longest_s = 0.0
        self._said_s = 0.0

    def record(
        self,
        before: Mapping[int, Activity],
        activities: Mapping[int, Activity],
        took_s: float,
        now_s: float,
        *,
        is_whole: bool,
    ) -> None:
        """Record the results of two looks by local rank, and the time between them.

        What a look that is not whole has missed may have ended a standstill, but begins or prolongs none.
        """
        self._since_s = {
            rank: self._since_s[rank] if rank in before and _stands_still(before[rank], activity, took_s) else now_s
            for rank, activity in activities.items()
        }
        last_s, self.for_s = self.for_s, now_s - max(self._since_s.values(), default=now_s)
        if not is_whole:
            self.for_s = min(last_s, self.for_s)
        if self.for_s < last_s:
            self._longest_s = max(self._longest_s, last_s)

    def omit(self, late_s: float) -> None:
        """Do not count time in which the workers could not be looked at, and perhaps could not work."""
        self._since_s = {rank: since_s + late_s for rank, since_s in self._since_s.items()}

    def find_due_s(self, limit_s: float) -> float | None:
        """Return how long they have stood still, if that must be reported now.

        Return 0 if they continue, and None without a report.

        Args:
            limit_s: the time after which quiet workers count as hung; a report just before is of no use.
        """
        if self.for_s < self._said_s:
            self._said_s = 0.0
            return 0.0
        least_s = max(STILL_S, STILL_FACTOR * self._longest_s)
        if self.for_s < max(least_s, 2 * self._said_s) or 2 * least_s > limit_s:
            return None
        self._said_s = self.for_s
        return self.for_s


class _Baseline:
    def __init__(self, at_s: float, activity: Activity) -> None:
        self.at_s = at_s
        self.activity = activity


class HangWatch:
    """Reports when no worker was active for `limit_s`, after each further `limit_s`, and when one is active again.

    What a look could not read is neither activity nor its absence.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        limit_s: float,
        limits: "LearnedLimits | None" = None,
        read: Callable[[float, float, Callable[[Mapping[int, Activity] | None], None]], None],
        on_idle: Callable[[str | None, bool], None],
        on_still: Callable[[float], None],
    ) -> None:
        """Start watching.

        Args:
            loop: where callbacks run.
            limit_s: seconds without activity after which the workers hang; unused with `limits`.
            limits: learns the limit, see there.
            read: reads the activity of the live workers, and calls back on the loop with it by local rank; empty when
                none run, and None if it could not look. Until it has called back there is no verdict, and the time does
                not count. Its first argument is how many seconds the longest idle worker has been idle. Its second
                argument is for how many seconds no worker has shown anything but CPU time.
            on_idle: called with what the workers have not done, and for how long (see `describe_idleness`), at the
                limit and after each further `limit_s`; with None when a worker is active again. The second argument
                says whether torch is about to end a worker, whatever the others do.
            on_still: called now and then, before a standstill is a hang, with how long all workers have stood still;
                called with 0 when they continue (see `StandStill`).
        """
        self._loop = loop
        self._limit_s = limit_s
        self._limits = limits
        self._interval_s = HANG_LOOK_S if limits is not None else min(HANG_LOOK_S, max(0.05, limit_s / 10))
        self._phase = ""
        """The phase at the last look."""
        self._known: Mapping[int, Activity] = {}
        """What the last look has read, and of what it could not read, what an earlier one has."""
        self._known_s = loop.clock.now_s()
        """When that look began."""
        self._busy_s = loop.clock.now_s()
        """When a worker was last seen to use CPU time or to write anything."""
        self._longest_quiet_s = 0.0
        """The longest quiet part of the current pause."""
        self._shown_s = loop.clock.now_s()
        """When a worker last showed more than CPU time."""
        self._read = read
        self._on_idle = on_idle
        self._on_still = on_still
        self._still = StandStill()
        self._baselines: dict[int, _Baseline] = {}
        self._active_s = loop.clock.now_s()
        self._idle = False
        self._is_urgent = False
        self._reported_s = 0.0
        self._is_closed = False
        self._schedule()

    @property
    def is_idle(self) -> bool:
        """Whether the limit has passed without activity."""
        return self._idle

    @property
    def still_s(self) -> float:
        """How long all workers have stood still, as the last look saw it, or how long they have hung."""
        return max(self._still.for_s, self._loop.clock.now_s() - self._active_s if self._idle else 0.0)

    def close(self) -> None:
        """Stop watching."""
        self._is_closed = True
        self._timer.cancel()

    def _schedule(self) -> None:
        self._due_s = self._loop.clock.now_s() + self._interval_s
        self._timer: Timer = self._loop.call_later(self._interval_s, self._check)

    def _check(self) -> None:
        asked_s = self._loop.clock.now_s()
        longest_s = max((asked_s - each.at_s for each in self._baselines.values()), default=0.0)
        self._read(longest_s, asked_s - self._shown_s, lambda activities: self._judge(activities, asked_s))

    def _judge(self, found: Mapping[int, Activity] | None, asked_s: float) -> None:
        if self._is_closed:
            return
        now_s = self._loop.clock.now_s()
        late_s = now_s - self._due_s
        if late_s > self._interval_s:
            # The workers may have been delayed as well.
            self._active_s += late_s
            self._busy_s += late_s
            self._still.omit(late_s)
        if found is not None:
            self._judge_look(found, asked_s, now_s)
        self._schedule()

    def _judge_look(self, found: Mapping[int, Activity], asked_s: float, now_s: float) -> None:
        before, took_s = self._known, now_s - self._known_s
        activities = {rank: _complete(each, before.get(rank, each)) for rank, each in found.items()}
        self._known, self._known_s = activities, asked_s
        if not activities or any(_shows(before.get(rank), activity) for rank, activity in activities.items()):
            self._shown_s = now_s
        self._baselines = {rank: each for rank, each in self._baselines.items() if rank in activities}
        active = {rank for rank, activity in activities.items() if self._is_active(rank, activity, now_s)}
        if self._limits is not None:
            self._learn(self._limits, before, took_s, now_s, is_active=bool(active))
        if not activities or active:
            self._active_s = now_s
        idle_s = now_s - self._active_s
        timeout_s = self._find_timeout_s(activities, now_s)
        is_over = self._is_over(idle_s, now_s)
        was_idle, self._idle = self._idle, is_over or timeout_s > 0.0
        was_urgent, self._is_urgent = self._is_urgent, timeout_s > 0.0
        is_new = not was_idle or was_urgent != self._is_urgent
        if self._idle and (is_new or now_s - self._reported_s >= self._limit_s):
            self._reported_s = now_s
            learned = "" if self._limits is None else f" auto: {self._limits.describe(self._phase)}"
            what = describe_idleness(idle_s, activities, learned) if is_over else describe_timeout(timeout_s)
            self._on_idle(what, self._is_urgent)
        elif was_idle and not self._idle:
            self._on_idle(None, False)
        self._still.record(before, activities, took_s, now_s, is_whole=activities == found)
        limit_s = self._limit_s if self._limits is None else self._limits.find(self._phase).quiet_s
        due_s = None if self._idle else self._still.find_due_s(limit_s)
        if due_s is not None:
            self._on_still(due_s)

    def _find_timeout_s(self, activities: Mapping[int, Activity], now_s: float) -> float:
        """Return the timeout after which torch will soon end one of these workers; 0 if it ends none.

        A worker that does something else while it waits does not count, because perhaps another of its threads waits
        for orders.
        """
        waits = (rank for rank in activities if now_s - self._baselines[rank].at_s >= COLLECTIVE_WAIT_S)
        return max((activities[rank].timeout_s for rank in waits), default=0.0)

    def _is_over(self, idle_s: float, now_s: float) -> bool:
        if self._limits is None:
            return idle_s >= self._limit_s
        limits = self._limits.find(self._phase)
        return idle_s >= limits.busy_s or min(idle_s, now_s - self._busy_s) >= limits.quiet_s

    def _learn(
        self, limits: "LearnedLimits", before: Mapping[int, Activity], took_s: float, now_s: float, *, is_active: bool
    ) -> None:
        activities = self._known
        allowed_s = find_background_s(took_s)
        if not activities or any(
            rank not in before
            or _has_written(before[rank], activity)
            or count_cpu_s(before[rank].processes, activity.processes) > allowed_s
            for rank, activity in activities.items()
        ):
            self._longest_quiet_s = max(self._longest_quiet_s, now_s - self._busy_s)
            self._busy_s = now_s
        if is_active and activities:
            quiet_s = max(self._longest_quiet_s, now_s - self._busy_s)
            pause_s = now_s - self._active_s
            limits.record_active(self._phase, pause_s=pause_s, quiet_s=min(quiet_s, pause_s))
            self._longest_quiet_s = 0.0
        self._phase = next((activity.phase for activity in activities.values() if activity.phase), "")

    def _is_active(self, local_rank: int, activity: Activity, now_s: float) -> bool:
        baseline = self._baselines.get(local_rank)
        if baseline is not None:
            allowed_s = find_background_s(now_s - baseline.at_s)
            if not _has_moved(baseline.activity, activity, allowed_s):
                if any(
                    known is None is not reported  # a first report
                    for known, reported in (
                        (baseline.activity.launches, activity.launches),
                        (baseline.activity.collectives, activity.collectives),
                    )
                ):
                    baseline.activity = activity
                kept = _complete(baseline.activity, activity)
                baseline.activity = replace(kept, has_answered=activity.has_answered)
                return False
        self._baselines[local_rank] = _Baseline(self._known_s, activity)
        return True


def _complete(now: Activity, other: Activity) -> Activity:
    return replace(now, processes=complete(now.processes, other.processes))


def _has_moved(before: Activity, now: Activity, allowed_s: float) -> bool:
    """Return whether the worker was active in between, by the strongest signs that it shows.

    A worker that waits in a collective may print from another thread, and one that loops for ever uses the CPU. So
    output and CPU time count only while the worker has shown neither collectives nor steps.
    """
    if before.progress_ns != now.progress_ns or _has_entered(before, now):
        return True
    if before.launches != now.launches and before.launches is not None is not now.launches:
        return True
    return now.is_judged_by_output and (
        _has_written(before, now) or count_cpu_s(before.processes, now.processes) > allowed_s
    )


def _shows(before: Activity | None, now: Activity) -> bool:
    """Return whether the worker has done a step, entered or completed a collective, or written something."""
    if before is None or _has_written(before, now):
        return True
    return before.progress_ns != now.progress_ns or _has_entered(before, now)


def _has_entered(before: Activity, now: Activity) -> bool:
    """Return whether the worker has entered or completed a collective. A first answer that was late tells neither."""
    return before.has_answered and before.collectives != now.collectives


def _stands_still(before: Activity, now: Activity, took_s: float) -> bool:
    is_same = (before.progress_ns, before.phase) == (now.progress_ns, now.phase)
    if not is_same or _has_entered(before, now) or has_loaded(before.processes, now.processes, took_s):
        return False
    cpu_s = count_cpu_s(before.processes, now.processes)
    if before.is_waiting and now.is_waiting:
        return cpu_s <= _WAITING_SHARE * took_s
    has_output = before.captured_bytes != now.captured_bytes or has_written(before.processes, now.processes)
    return not has_output and cpu_s <= find_background_s(took_s)


def _has_written(before: Activity, now: Activity) -> bool:
    return now.captured_bytes != before.captured_bytes or has_written(before.processes, now.processes)


def describe_idleness(idle_s: float, activities: Mapping[int, Activity], learned: str = "") -> str:
    """Describe what idle workers have not done, as far as it was measured, in a clause that follows a worker's name.

    Args:
        idle_s: how long they have been idle, in seconds.
        activities: the last reading, by local rank.
        learned: follows the name of the option: " auto: ...".
    """
    if activities and not any(each.is_judged_by_output for each in activities.values()):
        has_collectives = any((each.collectives, each.launches) != (None, None) for each in activities.values())
        missing = "no collective and no step" if has_collectives else "no step"
        return f"{missing} for {idle_s:.0f} s (--hang-timeout{learned})"
    readings = [reading for activity in activities.values() for reading in activity.processes.values()]
    if not readings:
        return f"no output captured for {idle_s:.0f} s (--hang-timeout{learned})"
    can_see_writes = all(reading.written_bytes is not None for reading in readings)
    output = "nothing written" if can_see_writes else "no output captured"
    return f"no CPU time used and {output} for {idle_s:.0f} s (--hang-timeout{learned})"


def describe_timeout(timeout_s: float) -> str:
    """Return why idle workers count as hung before the limit, in a clause like that of `describe_idleness`."""
    limit = f"its process group's timeout of {timeout_s:.0f} s"
    return f"torch would soon end a rank that waits, at {limit} (--hang-timeout)"
