"""Looks at the workers of a node once or twice: what moves between two looks does not hang.

The looks may block, and run in a thread. What the workers have reported is read from the status page, on the loop.
"""

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from muster._shared.job_view import format_rate
from muster._shared.records import record, replace
from muster._shared.reports import Group, Launches, RankProgress, RankView, print_values
from muster.agent.features.hangs import servers, sessions
from muster.agent.features.hangs.sessions import ProcessKey, Reading
from muster.agent.round import Round
from muster.agent.workers.status_page import SlotStatus

if TYPE_CHECKING:
    from muster.agent.features.hangs.monitor import Monitor

APART_S = 1.0
"""Time between two looks."""
MONITOR_S = 0.3
"""How long NCCL's monitor may take for each of two looks."""


@record
class Reported:
    """What a worker has reported at one moment."""

    at_s: float
    slot: SlotStatus
    values: Mapping[str, float]


@record
class WorkerSample:
    """What was seen of a worker at one moment."""

    at_s: float
    view: RankView
    processes: Mapping[ProcessKey, Reading]


def look(
    pids: Mapping[int, int], formed: Round, host: str, monitor: "Monitor | None", *, is_first: bool | None = None
) -> dict[int, WorkerSample]:
    """Look at the workers of the round, by local rank.

    Args:
        pids: their process ids, by local rank.
        formed: the round.
        host: the node's name.
        monitor: NCCL's; None if the workers have none.
        is_first: whether another look follows; False if this is the second. Answering the first look must not count as
            the workers' work. None means that there is only this look.
    """
    found = sessions.read_sessions(dict.fromkeys(pids.values()))
    if monitor is None:
        launches = {}
    else:  # a stop cannot wait for a slow monitor
        launches = monitor.look_twice(found) if is_first is None else monitor.look(found, MONITOR_S)
    places = servers.find_places(found)
    # Reading NCCL's recorder may end a CUDA graph's capture: not if its monitor shows progress.
    is_harmless = is_first is None or not launches or _stands_still(launches.values())
    answers = servers.read_workers(places) if is_harmless else servers.read_workers(places, servers.GLOO_HANDLERS)
    if is_first:
        found = sessions.read_sessions(dict.fromkeys(pids.values()))
    at_s = time.monotonic()
    return {
        local_rank: WorkerSample(
            at_s=at_s,
            view=replace(
                servers.build_view(
                    places[pid],
                    answers[pid],
                    global_rank=formed.rank_offset + local_rank,
                    node=formed.group_rank,
                    host=host,
                ),
                launches=launches.get(pid, ()),
            ),
            processes=found[pid],
        )
        for local_rank, pid in pids.items()
    }


def look_twice(
    pids: Mapping[int, int], formed: Round, host: str, monitor: "Monitor | None"
) -> dict[int, tuple[WorkerSample, WorkerSample]]:
    """Look two times, `APART_S` apart. The arguments are those of `look`."""
    first = look(pids, formed, host, monitor, is_first=True)
    time.sleep(APART_S)
    second = look(pids, formed, host, monitor, is_first=False)
    return {local_rank: (first[local_rank], second[local_rank]) for local_rank in pids}


def compare(looks: tuple[WorkerSample, WorkerSample], reported: tuple[Reported, Reported] | None) -> RankProgress:
    """Return what a worker has done between two looks.

    Args:
        looks: the two looks.
        reported: what it had reported at about these moments; None if there is no status page.
    """
    first, second = looks
    rank, took_s = second.view.global_rank, second.at_s - first.at_s
    ages = [entry.age_s for group in second.view.groups for entry in group.entries]
    moved = _describe_moved(first.view, second.view, took_s)
    if moved is None and _has_launched(first.view, second.view):
        moved = ""
    is_busy = sessions.has_worked(first.processes, second.processes, took_s)
    if reported is None:
        still_s = min(ages, default=None)
        return RankProgress(global_rank=rank, moved=moved, is_busy=is_busy, still_s=still_s)
    before, now = (each.slot for each in reported)
    if before.changed_ns != now.changed_ns:
        moved = moved or ""
    if now.changed_ns is not None:
        ages.append(max(0.0, (time.monotonic_ns() - now.changed_ns) / 1e9))
    optimizer_steps = now.optimizer_steps if now.step is None else None
    done = _count(now) - _count(before)
    return RankProgress(
        global_rank=rank,
        step=now.step,
        total=now.total,
        optimizer_steps=optimizer_steps,
        rate=round(max(0, done) / max(0.001, reported[1].at_s - reported[0].at_s), 3),
        values=print_values(reported[1].values),
        moved=moved,
        is_busy=is_busy,
        still_s=min(ages, default=None),
    )


def _count(slot: SlotStatus) -> int:
    """Return the steps done so far."""
    return (slot.optimizer_steps or 0) if slot.step is None else slot.step + 1


def _describe_moved(before: RankView, now: RankView, took_s: float) -> str | None:
    """Return the last entered collective of the group that moved most, and the rate per second; None if none moved."""
    if not (before.is_answering and now.is_answering) or before.progress == now.progress:
        return None
    known = {group.name: group for group in before.groups}
    moved = [(_count_moves(known.get(group.name), group), group) for group in now.groups]
    most, group = max(moved, key=lambda each: each[0])
    if most <= 0 or not group.entries:
        return ""
    last = group.entries[-1]
    name = group.description or f"group {group.name}"
    return f"{last.operation} #{last.number} of {name}, {format_rate(most / max(0.001, took_s))} a second"


def _stands_still(launches: Iterable[tuple[Launches, ...]]) -> bool:
    """Return whether ranks of a communicator have launched different numbers of operations, and none since."""
    from muster.agent.features.hangs.monitor import count_launches

    return any(each.still_s > 0.0 and count_launches((each,)) is not None for one in launches for each in one)


def _has_launched(before: RankView, now: RankView) -> bool:
    """Return whether NCCL's own monitor has seen a launch."""
    known = {each.communicator: each.counts for each in before.launches}
    return any(each.counts != known.get(each.communicator, each.counts) for each in now.launches)


def _count_moves(before: Group | None, now: Group) -> int:
    return now.entered - (0 if before is None else before.entered)
