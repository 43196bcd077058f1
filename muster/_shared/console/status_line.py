"""The line at the bottom of a terminal that says how a job is doing. Pure."""

from muster._shared.contract import show_controls
from muster._shared.job_view import JobState, JobStatus
from muster._shared.reports import format_duration

_LEAST_LAG = 2
"""Steps: one less is in the nature of a look at several ranks."""


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
