"""What is said of a job: in the line at the bottom of a terminal, and above its last line when it has ended. Pure."""

from muster._shared.contract import show_controls
from muster._shared.job_view import Goodput, JobState, JobStatus, Recovery, describe_steps
from muster._shared.records import replace
from muster._shared.reports import format_duration

_LEAST_LAG = 2
"""Steps: one less is in the nature of a look at several ranks."""
_MOST_RECOVERIES = 5
_LEAST_LOST_S = 0.1
_LEAST_S = 60.0
"""Of a shorter job nobody asks which part of its time went into steps."""
CAUSES = {
    "start": "until the first step",
    "detect": "in steps that were not finished",
    "stop": "stopping workers",
    "round": "between rounds",
    "restart": "restarting workers",
    "repeated": "in steps that were done again",
    "hang": "in hangs",
    "waiting": "waiting for nodes",
    "checkpoint": "saving",
    "end": "after the last step",
}
"""The causes of lost time. See `Goodput.lost_s`. The last lines of a job and its timeline say the same."""

_FAILURES = {"worker": "worker", "hang": "hang", "node": "lost node", "fenced": "silent leader"}
"""The words for `JobStatus.failures`."""


def format_summary(status: JobStatus) -> list[str]:
    """Return the lines, without the agent's prefix.

    Args:
        status: the last one of the job.
    """
    lines = [_describe_steps(status), _describe_values(status), *_list_recoveries(status)]
    lines += [slow.describe() for slow in status.slow_ranks[:1] if slow.is_chronic]
    return [show_controls(line) for line in lines if line]


def _describe_steps(status: JobStatus) -> str:
    parts = []
    if status.step is not None or status.most_steps_done is not None:
        parts.append(describe_steps(status.steps_done, status.most_steps_done or 0, status.total))
    elif status.optimizer_steps:
        parts.append(f"{status.optimizer_steps} step{'s'[: status.optimizer_steps != 1]} of the optimizer")
    if status.goodput is not None and is_long(status):
        parts.append(_describe_goodput(status.goodput))
        status = replace(status, time_to_start_s=None)  # it names that time as lost
    if parts or is_long(status):  # else the report says all
        parts += [exact] if (exact := describe_exact(status)) else []
    return "; ".join(parts)


def is_long(status: JobStatus) -> bool:
    """Return whether the job has run for so long that its goodput means something."""
    if status.goodput is not None:
        return status.goodput.productive_s + sum(lost_s for _, lost_s in status.goodput.lost_s) >= _LEAST_S
    return status.started_s is not None and status.time_s - status.started_s >= _LEAST_S


def _describe_values(status: JobStatus) -> str:
    """Name the values that were no finite numbers at the end; "" if all were."""
    bad = [f"{name} {value}" for name, value in status.values if value in ("nan", "inf", "-inf")]
    return f"not finite at the last step: {', '.join(bad)}" if bad else ""


def _describe_goodput(goodput: Goodput) -> str:
    lost = sorted((each for each in goodput.lost_s if each[1] >= _LEAST_LOST_S), key=lambda each: -each[1])
    text = f"goodput {goodput.fraction * 100:.0f} %"
    if not lost:
        return text
    return f"{text}; lost: " + ", ".join(f"{format_duration(lost_s)} {CAUSES.get(name, name)}" for name, lost_s in lost)


def describe_exact(status: JobStatus) -> str:
    """Return what is known without the script's help: "the first step after 12 s; interrupted by 1 worker, 2 hangs"."""
    parts = []
    if status.goodput is not None and status.time_to_start_s is not None:
        parts.append(f"the first step after {format_duration(status.time_to_start_s)}")
    elif status.failures and status.time_to_start_s is not None:
        parts.append(f"workers ran after {format_duration(status.time_to_start_s)}")
    if status.failures:
        counts = (_count_failures(name, count) for name, count in status.failures)
        parts.append("interrupted by " + ", ".join(counts))
    if status.goodput is None and status.failures and is_long(status):
        parts.append("goodput needs muster.worker.step(i) in the script")
    return "; ".join(parts)


def _count_failures(name: str, count: int) -> str:
    text = _FAILURES.get(name, name)
    return f"{count} {text}{'' if count == 1 else 's'}"


def _list_recoveries(status: JobStatus) -> list[str]:
    shown = status.recoveries[-_MOST_RECOVERIES:]
    left_out = max(status.recovery_count, len(status.recoveries)) - len(shown)
    resizes = max(0, status.resize_count - sum(each.is_resize for each in shown))
    lines = [count_recoveries(left_out, resizes, "earlier ")] if left_out else []
    return lines + [_describe_recovery(each) for each in shown]


def count_recoveries(count: int, resizes: int, which: str = "") -> str:
    """Say how many of `count` there were of each kind: "2 recoveries, 1 change of size"."""
    count = max(0, count - resizes)
    recoveries = f"{count} {which}recover{'y' if count == 1 else 'ies'}" if count else ""
    changes = f"{resizes} {which}change{'s'[: resizes != 1]} of size" if resizes else ""
    return ", ".join(filter(None, (recoveries, changes)))


def _describe_recovery(recovery: Recovery) -> str:
    cost = "not completed" if recovery.cost_s is None else f"cost {format_duration(recovery.cost_s)}"
    if recovery.snapshot_step is not None:
        cost += f", continued at step {recovery.snapshot_step:,} from memory"
        again = recovery.repeated_steps
        cost += "" if again is None else f", {again:,} step{'' if again == 1 else 's'} repeated"
    what = "change of size" if recovery.is_resize else "recovery"
    return f"{what}, {cost}: {recovery.cause}" if recovery.cause else f"{what}, {cost}"


# -- while it runs ----------------------------------------------------------------------------------------------------


def format_status_line(status: JobStatus) -> str:
    """Say it in one line. "": the job reports no steps, or has ended.

    >>> format_status_line(JobStatus(step=11, total=100, rate=7.9, eta_s=24.0))
    'step 11 of 100 (11 %), 7.9 a second; ETA 24 s'
    """
    if (status.step is None and status.optimizer_steps is None) or status.state is JobState.ENDED:
        return ""
    parts = [_describe_place(status)]
    if status.eta_s is not None:
        parts.append(f"ETA {format_duration(status.eta_s)}")
    if status.state not in (JobState.RUNNING, JobState.PAUSED):
        parts.insert(0, f"{status.state.value}: {status.reason}" if status.reason else status.state.value)
    elif status.slow_ranks and status.slow_ranks[0].is_chronic:
        parts.append(status.slow_ranks[0].describe())
    else:
        last = max(status.ranks, key=lambda rank: rank.lag_steps, default=None)
        if last is not None and last.lag_steps >= _LEAST_LAG:
            parts.append(f"rank {last.global_rank} is {last.lag_steps} steps behind")
    return show_controls("; ".join(parts))


def _describe_place(status: JobStatus) -> str:
    text = status.describe()
    if status.step is None or not status.total or status.step >= status.total:
        return text
    percent = status.step * 100 // status.total
    place = f"step {status.step} of {status.total}"
    return text.replace(place, f"{place} ({percent} %)", 1)
