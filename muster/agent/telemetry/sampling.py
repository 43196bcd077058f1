"""Looks at the workers of this node: their status page, use of the machine and last lines. It acts on nothing.

A page may contain anything. `StatusPage` omits numbers out of range, and text is cleaned here.
"""

import base64
import json
import math
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

from muster._shared import processes
from muster._shared.codec import encode, salvage, shorten
from muster._shared.contract import show_controls
from muster._shared.fields import MOST, SPARSE, Count, Limit, Seconds
from muster._shared.job_view import (
    LISTED_RANKS,
    MOST_SLOW_RANKS,
    NodeState,
    NodeStatus,
    RankState,
    RankStatus,
    ShownValues,
    SlowRank,
)
from muster._shared.records import NO_ITEMS, record, replace
from muster.agent.round import Round
from muster.agent.telemetry.slow_ranks import LEAST_STEPS, WINDOW_S, Arrivals, build_slow_rank
from muster.agent.workers.status_page import SlotStatus, StatusPage

if TYPE_CHECKING:
    from muster.agent.telemetry.devices import DeviceUse


LIMIT_BYTES = 1 << 17
"""Limit before it is packed."""
BYTES_PER_S = 1000
"""What one node may send on average."""
PACKED_LIMIT_BYTES = 32768


@record
class NodeSummary:
    """The status of a node and its ranks."""

    node: NodeStatus
    ranks: Annotated[tuple[RankStatus, ...], Limit(most=LISTED_RANKS)] = ()
    """The ranks; empty in a job of more than `LISTED_RANKS`."""
    slow_ranks: Annotated[tuple[SlowRank, ...], Limit(most=MOST_SLOW_RANKS), SPARSE] = ()
    peak_bytes: Annotated[Count, SPARSE] = 0
    """The most memory that one of its ranks had; 0 if unknown."""
    peak_rank: Annotated[Count, SPARSE] = 0
    """The global rank of that one."""
    first_done: Annotated[Count, SPARSE] = 0
    """How many steps each of its ranks has done at its first one, as the script counts; 0 if one has done none."""
    first_ago_s: Annotated[Seconds, SPARSE] = 0.0
    """How long ago all had done it."""


def pack(summary: NodeSummary) -> str:
    """Pack it to less than half: at most 1 kB per second leaves a node. Return "" if there is no room for it."""
    packed = base64.b85encode(zlib.compress(encode(summary, LIMIT_BYTES).encode(), 6)).decode()
    return packed if len(packed) <= PACKED_LIMIT_BYTES else ""


def unpack(text: str) -> NodeSummary | None:
    """Read the result of `pack` from another node; None if it is no summary. Invalid parts are omitted."""
    try:
        plain = zlib.decompressobj().decompress(base64.b85decode(text), LIMIT_BYTES)
        return salvage(NodeSummary, json.loads(plain))
    except (ValueError, RecursionError, zlib.error):
        return None


_MOST_PROCESSES = 64
"""The most processes that are read for one worker."""


@record
class Usage:
    """What one worker uses at one moment."""

    at_s: float
    """The time, by the clock that the reader was given."""
    cpu_s: float
    """CPU time so far, including children that it has waited for."""
    memory_bytes: int
    """Resident memory. Shared pages count with each process."""


def read_usage(pids: Mapping[int, int], at_s: float) -> dict[int, Usage]:
    """Read the CPU and memory use of all workers and their children, by local rank. It may block: use a thread.

    A worker that has ended is omitted. Children are found by `/proc/PID/task/PID/children`. A kernel without
    CONFIG_PROC_CHILDREN lacks it, and then only the worker's own process counts. Children of threads other than the
    first are not seen.

    Args:
        pids: process ids by local rank.
        at_s: the time now.
    """
    tick_s, page_bytes = 1.0 / os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    found: dict[int, Usage] = {}
    for local_rank, pid in pids.items():
        ticks = pages = 0
        for stat in _read_stats(pid):
            ticks += sum(map(int, stat[11:15]))  # utime, stime, cutime, cstime
            pages += int(stat[21])  # rss
        if pages:
            found[local_rank] = Usage(at_s=at_s, cpu_s=ticks * tick_s, memory_bytes=pages * page_bytes)
    return found


def compute_cpu(before: Usage | None, now: Usage) -> float | None:
    """Return the cores used in between; None if unknown."""
    if before is None or now.at_s <= before.at_s:
        return None
    return max(0.0, round((now.cpu_s - before.cpu_s) / (now.at_s - before.at_s), 3))


def _read_stats(pid: int) -> Iterator[list[str]]:
    """Read the stats of the process and its descendants."""
    waiting, read = [pid], 0
    while waiting and read < _MOST_PROCESSES:
        each = waiting.pop()
        stat = processes.read_stat(each)
        read += 1
        if stat is not None and len(stat) > 21:
            yield stat
            waiting += _list_children(each)


def _list_children(pid: int) -> list[int]:
    try:
        fd = os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY)
    except OSError:
        return []
    try:
        return list(map(int, os.read(fd, 4096).rpartition(b" ")[0].split()))
    except (OSError, ValueError):
        return []
    finally:
        os.close(fd)


_LINE_BYTES = 160
_MOST_RATE = 1e9
_STILL_S, _STILL_STEPS = 10.0, 3
"""A rank stands still if its last step is older than this time plus the time of this many of its steps."""


@record
class Pause:
    """The job is paused."""

    step: int
    since_s: float
    """Since when, by the wall clock."""


@record
class OpenCollective:
    """The collective that a worker is in."""

    text: str
    """Its name, such as "all_reduce #6 of default_pg"."""
    age_s: float


@record
class Observed:
    """What the agent's parts know of the round's workers at one moment."""

    formed: Round
    page: StatusPage
    """The round's page."""
    states: Mapping[int, RankState]
    """States by local rank; a missing worker has not been started."""
    pids: Mapping[int, int]
    """Process ids of live workers, by local rank."""
    read_last_line: Callable[[int], bytes]
    """Returns the last line of a local rank, as the worker wrote it."""
    collectives: Mapping[int, OpenCollective] = NO_ITEMS
    """Open collectives, by local rank."""
    arrivals: Mapping[int, float] = NO_ITEMS
    """How much later than the first rank each has entered the last collectives, by local rank; empty if unknown."""
    arrived_s: float = 0.0
    """When that and the collectives were looked at."""
    are_grouped: bool = False
    """Whether all live workers of the node had begun a process group at the same look, so that they wait for one
    another."""
    pause: Pause | None = None
    kept: tuple[int, float] | None = None
    """The newest step to which all ranks can return from memory, and the wall-clock time since which they can."""
    values: Mapping[int, Mapping[str, float]] = NO_ITEMS
    """Values that features add to those that workers report, by local rank."""


class _Pace:
    """The pace of one rank, from the moments of its steps within `WINDOW_S`, and of at least two steps."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        """Moments and steps done by then, oldest first."""

    def record(self, done: int, at_s: float) -> None:
        """Record how many steps were done by the moment of the last step."""
        if self._seen and done < self._seen[-1][1]:
            self._seen.clear()
        if not self._seen or done > self._seen[-1][1]:
            self._seen.append((at_s, done))
            while len(self._seen) > 2 and at_s - self._seen[1][0] >= WINDOW_S:
                self._seen.popleft()

    def find_rate(self, now_s: float) -> float | None:
        """Return the steps per second; None if unknown.

        The rate falls while a step takes longer than those before it.
        """
        if len(self._seen) < 2:
            return None
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        took_s = max(1e-9, last_s - first_s)
        mean_s, idle_s = took_s / (last - first), max(0.0, now_s - last_s)
        late_s = idle_s if idle_s > 2 * mean_s + 1.0 else 0.0
        return min(_MOST_RATE, float(f"{(last - first) / (took_s + late_s):.3g}"))

    def is_still(self, still_s: float) -> bool:
        """Return whether the last step is long ago. After the first step it never is, because the first one is slow."""
        if len(self._seen) < 2:
            return False
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return still_s > _STILL_S + _STILL_STEPS * (last_s - first_s) / (last - first)


class NodeSampler:
    """The sampler of one node, in all of its rounds."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.facts: Mapping[str, str] = NO_ITEMS
        """What else is known of the node, by the names of fields of `NodeStatus`."""
        self.ranks: tuple[RankStatus, ...] = ()
        """The ranks of this node at the last look, even if the job has too many ranks to list them."""
        self._round = 0
        self._paces: dict[int, _Pace] = {}
        self._changed_s: dict[int, float] = {}
        """When each rank did its last step, by local rank."""
        self._at_steps, self._at_collectives = Arrivals(LEAST_STEPS), Arrivals()
        self._last_step, self._last_arrived_s = -1, 0.0
        self._last_arrivals: Mapping[int, float] = NO_ITEMS
        """The arrivals at the last look."""
        self._usage: Mapping[int, Usage] = NO_ITEMS
        self._cpu: dict[int, float | None] = {}
        self._devices: Mapping[int, DeviceUse] = NO_ITEMS
        self.peak: tuple[int, int] = (0, 0)
        """The most memory that a rank has used, and its global rank."""

    def record_usage(self, usage: Mapping[int, Usage], devices: "Mapping[int, DeviceUse]", rank_offset: int) -> None:
        """Record what the workers and their GPUs use, by local rank."""
        before, self._usage, self._devices = self._usage, usage, devices
        self._cpu = {rank: compute_cpu(before.get(rank), now) for rank, now in usage.items()}
        for rank, now in usage.items():
            self.peak = max(self.peak, (min(now.memory_bytes, MOST), rank_offset + rank))

    def sample(self, observed: Observed, nproc: int, now_s: float) -> NodeSummary:
        """Look at all `nproc` ranks; `now_s` is by CLOCK_MONOTONIC, like the page's times."""
        formed = observed.formed
        if formed.number != self._round:
            self._round, self._paces, self._changed_s = formed.number, {}, {}
            self._at_steps, self._at_collectives = Arrivals(LEAST_STEPS), Arrivals()
            self._last_step = -1
            self._usage, self._cpu, self._devices = NO_ITEMS, {}, NO_ITEMS
        ranks = [self._sample_rank(observed, local_rank, now_s) for local_rank in range(nproc)]
        self.ranks = tuple(ranks)
        first_done, first_s = _find_first(observed.page, nproc) or (0, now_s)
        is_listed = formed.world_size <= LISTED_RANKS
        return NodeSummary(
            node=self._build_node(formed, ranks),
            ranks=self.ranks if is_listed else (),
            slow_ranks=self._find_slow_ranks(observed, ranks),
            peak_bytes=self.peak[0],
            peak_rank=self.peak[1],
            first_done=first_done,
            first_ago_s=round(max(0.0, now_s - first_s), 3),
        )

    def _find_slow_ranks(self, observed: Observed, ranks: list[RankStatus]) -> tuple[SlowRank, ...]:
        """Compare arrivals at the same step, and in the same collectives. All times are of this machine."""
        steps = {rank.step for rank in ranks}
        step = steps.pop() if len(steps) == 1 and observed.are_grouped else None
        if step is not None and step != self._last_step and len(self._changed_s) == len(ranks):
            self._last_step = step
            self._at_steps.record(self._changed_s)
        if observed.arrived_s != self._last_arrived_s:
            self._last_arrived_s = observed.arrived_s
            arrivals = {rank: round(late_s, 6) for rank, late_s in observed.arrivals.items()}
            if arrivals != self._last_arrivals:  # unchanged in a hang
                self._last_arrivals = arrivals
                self._at_collectives.record(arrivals)
        rates = [rank.rate for rank in ranks if rank.rate]
        step_s = 1 / max(rates) if rates else None
        found: dict[int, SlowRank] = {}
        for late in (*self._at_steps.find(step_s), *self._at_collectives.find(step_s)):
            if late.rank not in found or found[late.rank].late_s < late.late_s:
                found[late.rank] = build_slow_rank(late, ranks[late.rank], self._host)
        return tuple(found.values())[:MOST_SLOW_RANKS]

    def _sample_rank(self, observed: Observed, local_rank: int, now_s: float) -> RankStatus:
        formed, slot = observed.formed, observed.page.read_shown(local_rank)
        done, still_s = count_steps(slot), None
        if slot.changed_ns is not None:
            still_s = max(0.0, now_s - slot.changed_ns / 1e9)
        pace = self._paces.setdefault(local_rank, _Pace())
        if done and still_s is not None:
            self._changed_s[local_rank] = now_s - still_s
            pace.record(done, now_s - still_s)
        collective, usage = observed.collectives.get(local_rank), self._usage.get(local_rank)
        if slot.changed_ns is not None and slot.changed_ns / 1e9 > observed.arrived_s:
            collective = None  # moved on since
        device = self._devices.get(local_rank)
        is_live = local_rank in observed.pids
        is_done = slot.step is not None and slot.total is not None and slot.step + 1 >= slot.total
        return RankStatus(
            global_rank=formed.rank_offset + local_rank,
            node=formed.group_rank,
            local_rank=local_rank,
            state=observed.states.get(local_rank, RankState.STARTING),
            step=slot.step,
            total=slot.total,
            optimizer_steps=slot.optimizer_steps if slot.step is None else None,
            rate=pace.find_rate(now_s) if is_live else None,
            phase=clean_text(slot.phase),
            values=show_values({**observed.page.read_values(local_rank), **observed.values.get(local_rank, {})}),
            still_s=None if still_s is None else min(1e9, round(still_s, 2)),
            is_still=is_live and not is_done and still_s is not None and pace.is_still(still_s),
            cpu=self._cpu.get(local_rank) if is_live else None,
            memory_bytes=min(MOST, usage.memory_bytes) if usage is not None and is_live else None,
            gpu=None if device is None else device.use,
            gpu_memory_bytes=None if device is None else device.memory_bytes,
            device=None if device is None else device.status,
            collective=clean_text(collective.text) if collective is not None and is_live else "",
            collective_s=round(collective.age_s, 1) if collective is not None and is_live else None,
            last_line=clean_line(observed.read_last_line(local_rank)),
        )

    def _build_node(self, formed: Round, ranks: list[RankStatus]) -> NodeStatus:
        cpus = [rank.cpu for rank in ranks if rank.cpu is not None]
        memory = [rank.memory_bytes for rank in ranks if rank.memory_bytes is not None]
        gpus = [rank.gpu for rank in ranks if rank.gpu is not None]
        gpu_memory = [rank.gpu_memory_bytes for rank in ranks if rank.gpu_memory_bytes is not None]
        steps = [rank.step for rank in ranks if rank.step is not None]
        status = NodeStatus(
            node_index=formed.node_index,
            node=formed.group_rank,
            host=self._host,
            state=NodeState.RUNNING,
            ranks=len(ranks),
            first_rank=formed.rank_offset,
            step=min(steps) if len(steps) == len(ranks) else None,
            most_step=max(steps, default=None),
            cpu=round(sum(cpus), 2) if cpus else None,
            memory_bytes=min(MOST, sum(memory)) if memory else None,
            gpu=round(sum(gpus) / len(gpus), 3) if gpus else None,
            gpu_memory_bytes=sum(gpu_memory) if gpu_memory else None,
            slowest=find_slowest(ranks) if formed.world_size > LISTED_RANKS else None,
        )
        return replace(status, **self.facts)


def _find_first(page: StatusPage, nproc: int) -> tuple[int, float] | None:
    found = [each for local_rank in range(nproc) if (each := page.read_first(local_rank)) is not None]
    if len(found) < nproc:
        return None
    return min(done for done, _ in found), max(at_ns for _, at_ns in found) / 1e9


def count_steps(rank: SlotStatus | RankStatus) -> int:
    """Return the steps done so far, as the script counts them, or else by its optimizer."""
    return (rank.optimizer_steps or 0) if rank.step is None else rank.step + 1


def find_slowest(ranks: list[RankStatus]) -> RankStatus | None:
    """Return the rank with the fewest steps: of those that report steps, or else of those with an optimizer."""

    def find_place(rank: RankStatus) -> tuple[bool, int, bool, int]:
        return rank.step is None, rank.step or 0, rank.optimizer_steps is None, rank.optimizer_steps or 0

    return min(ranks, key=find_place, default=None)


def show_values(values: Mapping[str, float]) -> ShownValues:
    """Return what a rank shows beside its step, as it is written, because JSON has no NaN."""
    return tuple(
        (clean_text(name), float(f"{each:.6g}") if math.isfinite(each) else str(each)) for name, each in values.items()
    )


def clean_text(text: str) -> str:
    """Return one line without control characters, of no more than a name's length."""
    return text if text.isalnum() else shorten(show_controls(" ".join(text.split())), 255)


def clean_line(end: bytes) -> str:
    """Return the end of a line in a form that is safe to show.

    Escape sequences are omitted, and bytes that are not UTF-8 are replaced.
    """
    if not end:
        return ""
    text = end.decode("utf-8", "replace")
    if "\x1b" in text:
        import re

        # Control and title sequences; the last may be cut off.
        text = re.sub(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\|$)|\x1b\[[0-?]*[ -/]*(?:[@-~]|$)|\x1b[@-Z\\^_]?", "", text)
    return shorten(show_controls(" ".join(text.split())), _LINE_BYTES, keeps_end=False)
