"""What the records of a job's agents say of its ranks: where the output of one is, and which one has failed. Pure."""

from collections.abc import Iterable
from typing import Final

from muster.cli.afterwards.sources import Event, RankPlace, list_places

_FAILURES: Final = ("worker_failed", "hang_explained")
_WAITS: Final = ("hang_named", "stood_still")
_GOES_ON: Final = ("hang_ended", "moved_again", "round_formed")


def find_rank(events: Iterable[Event], rank: int, attempt: int | None = None) -> RankPlace | None:
    """Return the last process of a rank, of this attempt if one is given. None: the records have none."""
    found = [place for place in list_places(events) if place.global_rank == rank and attempt in (None, place.attempt)]
    return found[-1] if found else None


def find_first_failure(events: Iterable[Event]) -> tuple[int, int] | None:
    """Return the rank that failed first in the last attempt that a rank has failed in, and the attempt. None: none has.

    In a hang it is the first of the ranks that have kept the others waiting.
    """
    failed = [(each.attempt, -each.time_s, each.ranks[0]) for each in events if each.what in _FAILURES and each.ranks]
    if not failed:
        return None
    attempt, _, rank = max(failed)
    return rank, attempt


def find_waited_for(events: Iterable[Event]) -> tuple[int, int] | None:
    """Return the first of the ranks that keep the others waiting in a job that stands still or hangs, and the attempt.

    None: it went on since, or nothing is known. Such a job may be stopped by a person before any rank has failed.
    """
    found = None
    for event in events:
        if event.what in _GOES_ON:
            found = None
        elif event.what in _WAITS and event.ranks:
            found = event.ranks[0], event.attempt
    return found


def find_world_size(events: Iterable[Event]) -> int:
    """Return the size of the largest round that any node has recorded. 0: the records have none."""
    sizes = (event.detail.get("world_size") for event in events if event.what == "round_formed")
    return max((size for size in sizes if isinstance(size, int)), default=0)
