"""What the view shows, as it was read at one moment: of all jobs, of one job, and texts of logs and answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from muster._shared.job_view import JobState, JobStatus, NodeState, NodeStatus, RankState, RankStatus
from muster.schedulers.wording.reasons import Reasons

KEPT_LINES: Final = 10_000
"""How many lines of a log are kept. The files have all."""
_UNKNOWN_RATE: Final = 3.0
"""Steps a second, of a rank that has done one step, or has ended."""
STALE_S: Final = 5.0
"""A node of which nothing was heard for longer is marked."""


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """One job in the list of all."""

    handle: str
    state: str
    """TorchX's name, and in brackets what a job that runs does."""
    line: str
    """Why, how far, since when."""


@dataclass(frozen=True, kw_only=True)
class JobList:
    """All jobs of the schedulers that answer."""

    rows: Sequence[JobRow]
    """The newest first."""
    unreachable: Sequence[str] = ()
    """A line for each scheduler that does not answer, with the reason."""


@dataclass(frozen=True, kw_only=True)
class JobPicture:
    """One job. `statuses` is empty while its agents have reported nothing."""

    handle: str
    state: str
    line: str
    reasons: Reasons = ()
    """What the line says of the job."""
    statuses: Sequence[tuple[str, JobStatus]] = ()
    """By role, of the roles that run agents."""
    has_ended: bool = False
    exit_code: int = 0
    """That of `muster status`: it says the state."""
    error: str = ""
    """Why it could not be read this time. The rest is then of the last time."""


def sort_ranks(status: JobStatus, most: int) -> list[RankStatus]:
    """Return the ranks as they are shown: by number where all have room, else those that differ first.

    Args:
        status: of the job.
        most: how many have room.
    """
    ranks = list(status.ranks)
    if len(ranks) <= most:
        return ranks
    slow = {each.global_rank for each in status.slow_ranks}
    waiting = sum(1 for each in ranks if (each.collective_s or 0.0) >= 1.0)  # shorter ones come and go
    phases = [each.phase for each in ranks]
    usual = max(set(phases), key=phases.count) if phases else ""
    has_ended = status.state is JobState.ENDED

    def differs(rank: RankStatus) -> tuple[int, int]:
        weight = {RankState.FAILED: 8, RankState.ENDED: 4, RankState.STARTING: 2}.get(rank.state, 0)
        weight += 4 * (rank.global_rank in slow) + 2 * (rank.phase != usual)
        weight += 4 * (not rank.collective and waiting * 2 > len(ranks))
        return -weight, 0 if has_ended else -find_lag(rank)

    return sorted(ranks, key=lambda rank: (*differs(rank), rank.global_rank))


def find_lag(rank: RankStatus) -> int:
    """Return how many steps a rank is behind, if they are more than a second's.

    Less comes of when each was looked at.
    """
    return _leave_out_noise(rank.lag_steps, _UNKNOWN_RATE if rank.rate is None else rank.rate)


def _leave_out_noise(lag_steps: int, rate: float) -> int:
    return lag_steps if lag_steps >= rate else 0


def sort_nodes(status: JobStatus, most: int) -> list[NodeStatus]:
    """Return the nodes as they are shown. See `sort_ranks`."""
    nodes = list(status.nodes)
    if len(nodes) <= most:
        return nodes
    slow = {each.node for each in status.slow_ranks}
    front = max((node.most_step or 0 for node in nodes), default=0)

    def differs(node: NodeStatus) -> tuple[int, int]:
        weight = {NodeState.LOST: 8, NodeState.SPARE: 1}.get(node.state, 0)
        weight += 4 * (node.node in slow) + 4 * is_stale(node)
        behind = front - (front if node.step is None else node.step)
        return -weight, -_leave_out_noise(behind, status.rate)

    return sorted(nodes, key=lambda node: (*differs(node), node.node_index))


def is_stale(node: NodeStatus) -> bool:
    """Return whether no answer came for some time."""
    return node.age_s is not None and node.age_s > STALE_S
