"""Where a run's folder has the output of a rank, from what its agents have recorded there. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from muster._shared.contract import LogNames
from muster._shared.foreign_files import parse_json

STDOUT, STDERR = "stdout", "stderr"
_GOES_ON: Final = ("hang_ended", "moved_again", "round_formed")
_FILES: Final = {STDOUT: LogNames.STDOUT, STDERR: LogNames.STDERR}


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """The process of a rank in one attempt."""

    global_rank: int
    node_index: int
    local_rank: int
    attempt: int

    def list_paths(self, stream: str) -> list[str]:
        """Return where its output may be, below the run's folder: with several nodes each has a folder of its own."""
        path = f"{LogNames.ATTEMPT_DIR.format(attempt=self.attempt)}/{self.local_rank}/{_FILES[stream]}"
        return [f"node_{self.node_index}/{path}", path]


def list_places(records: bytes) -> list[RankPlace]:
    """Return all ranks that were started, in the order of their starts.

    Args:
        records: lines of JSON of one or more agents of a job. Damaged ones are left out.
    """
    return [
        RankPlace(global_rank=rank, node_index=node, local_rank=local, attempt=attempt)
        for node, attempt, ranks in _list_starts(records)
        for local, rank in enumerate(ranks)
    ]


def find_rank(records: bytes, rank: int, attempt: int | None = None) -> RankPlace | None:
    """Return the last process of a rank, of this attempt if one is given. None: the records have none."""
    found = [place for place in list_places(records) if place.global_rank == rank and attempt in (None, place.attempt)]
    return found[-1] if found else None


def find_first_failure(records: bytes) -> tuple[int, int] | None:
    """Return the rank that failed first in the last attempt that a rank has failed in, and the attempt. None: none has.

    In a hang it is the first of the ranks that have kept the others waiting.
    """
    failed = [
        (event["attempt"], -event["time_s"], event["ranks"][0])
        for event in _parse_events(records)
        if event.get("what") in ("worker_failed", "hang_explained") and _is_whole(event) and event["ranks"]
    ]
    if not failed:
        return None
    attempt, _, rank = max(failed)
    return rank, attempt


def find_waited_for(records: bytes) -> tuple[int, int] | None:
    """Return the first of the ranks that keep the others waiting in a job that stands still or hangs, and the attempt.

    None: it went on since, or nothing is known. Such a job may be stopped by a person before any rank has failed.
    """
    found = None
    for event in _parse_events(records):
        if event.get("what") in _GOES_ON:
            found = None
        elif event.get("what") in ("hang_named", "stood_still") and _is_whole(event) and event["ranks"]:
            found = event["ranks"][0], event["attempt"]
    return found


def find_world_size(records: bytes) -> int:
    """Return the size of the largest round that any node has recorded. 0: the records have none."""
    details = (event.get("detail") for event in _parse_events(records) if event.get("what") == "round_formed")
    sizes = (detail.get("world_size") for detail in details if isinstance(detail, dict))
    return max((size for size in sizes if isinstance(size, int)), default=0)


def _list_starts(records: bytes) -> Iterator[tuple[int, int, Sequence[int]]]:
    for event in _parse_events(records):
        if event.get("what") == "workers_started" and _is_whole(event):
            yield event["node_index"], event["attempt"], event["ranks"]


def _is_whole(event: dict[str, Any]) -> bool:
    numbers = (event.get("node_index"), event.get("attempt"))
    ranks = event.get("ranks")
    are_numbers = all(isinstance(each, int) for each in numbers) and isinstance(event.get("time_s"), (int, float))
    return are_numbers and isinstance(ranks, list) and all(isinstance(each, int) for each in ranks)


def _parse_events(records: bytes) -> Iterator[dict[str, Any]]:
    for line in records.split(b"\n"):
        try:
            event = parse_json(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event
