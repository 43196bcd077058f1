"""The part: reads what the workers of a round do, to find out whether they hang, in what, and since when.

It is loaded when a watch begins, or when stacks are wanted: its imports would delay the workers' first line.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from muster._shared.records import replace
from muster.agent.config import HANG_TIMEOUT_AUTO
from muster.agent.features.hangs.servers import Progress, WorkerReader, find_arrivals, find_open
from muster.agent.features.hangs.sessions import FileSizes, Sessions, read_sessions
from muster.agent.features.hangs.variables import MONITOR_ADDRESS
from muster.agent.features.hangs.watch import Activity, HangWatch, LearnedLimits
from muster.agent.node import events
from muster.agent.node.round_parts import PartContext, ReadProgress, ReadViews, RoundPart, Start
from muster.agent.rendezvous.interface import StoodStill
from muster.agent.round import Round
from muster.agent.runtime.limits import HANG_LEAST_S

if TYPE_CHECKING:
    from muster._shared.reports import RankView
    from muster.agent.features.hangs.monitor import Monitor
    from muster.agent.features.hangs.samples import Reported
    from muster.agent.telemetry import Observed, OpenCollective


class HangsPart(RoundPart):
    """The watch for hangs of one agent, and what is read about them."""

    def __init__(self, context: PartContext) -> None:
        """Read nothing yet."""
        self._config = context.config
        self._loop = context.loop
        self._logs = context.logs
        self._workers = context.workers
        self._post = context.post
        self._hang: HangWatch | None = None
        self._reader: WorkerReader | None = None
        """The reader of the watch."""
        self._monitor: Monitor | None = None
        """NCCL's monitor of the round, once it was asked."""

    @property
    def is_idle(self) -> bool:  # type: ignore[override]
        """See `RoundPart`."""
        return self._hang is not None and self._hang.is_idle

    @property
    def still_s(self) -> float:  # type: ignore[override]
        """See `RoundPart`."""
        return 0.0 if self._hang is None else self._hang.still_s

    def begin_round(self, formed: Round, start: Start | None) -> None:
        """See `RoundPart`. A limit that is learned needs no watch in the first moments."""
        limit_s = self._config.hang_timeout_s
        if start is not None:
            self._end_watch()
        if limit_s is None or self._hang is not None or (start is not None and limit_s == HANG_TIMEOUT_AUTO):
            return
        with suppress(OSError, ImportError):  # no descriptors or disk space: no watch
            self._begin_watch(formed.number, limit_s)

    def end_pause(self) -> None:
        """See `RoundPart`. A new watch does not count the pause."""
        number = self._workers.formed.number if self._workers.formed is not None else 0
        if self._hang is not None and self._config.hang_timeout_s is not None:
            self._end_watch()
            self._begin_watch(number, self._config.hang_timeout_s)

    def _end_watch(self) -> None:
        if self._hang is not None:
            self._hang.close()
            self._hang = self._reader = None

    def end_round(self) -> None:
        """See `RoundPart`. Leave NCCL's monitor of the round, too."""
        self._end_watch()
        self._close_monitor()

    def add_to(self, observed: "Observed") -> "Observed":
        """Add what the watch's last look has found out about the workers. They are not asked for this alone."""
        reader = self._reader
        if reader is None:
            return observed
        late = find_arrivals(reader.answers)
        return replace(
            observed,
            collectives=self._find_collectives(reader, observed.pids),
            arrivals={local_rank: late[pid] for local_rank, pid in observed.pids.items() if pid in late},
            arrived_s=reader.answered_s,
            are_grouped=reader.have_begun(observed.pids.values()),
        )

    def _find_collectives(self, reader: WorkerReader, pids: Mapping[int, int]) -> "dict[int, OpenCollective]":
        """Return the collectives that the workers are in."""
        from muster.agent.telemetry import OpenCollective

        found: dict[int, OpenCollective] = {}
        for local_rank, pid in pids.items():
            answer = reader.answers.get(pid)
            seen = None if answer is None else find_open(answer)
            if seen is not None:
                since_s = time.monotonic() - reader.answered_s
                found[local_rank] = OpenCollective(text=seen[0], age_s=max(0.0, seen[1] + since_s))
        return found

    def _begin_watch(self, number: int, limit_s: float) -> None:
        """Watch a round's workers.

        Args:
            number: the round's.
            limit_s: `--hang-timeout`.
        """

        def on_idle(reason: str | None, is_urgent: bool) -> None:
            if reason is None:
                self._post(events.WorkersActive(round_number=number))
            else:
                self._post(events.WorkersIdle(round_number=number, reason=reason, is_urgent=is_urgent))

        is_auto = limit_s == HANG_TIMEOUT_AUTO
        limit_s = HANG_LEAST_S if is_auto else limit_s

        def print_death(process: str) -> None:
            line = f"NCCL's monitor: {process} has not answered the other ranks for a minute, and is dead to them"
            self._logs.print_line(line)

        reader, sizes = WorkerReader(limit_s, self._get_monitor(), print_death), FileSizes()
        self._reader = reader
        self._hang = HangWatch(
            self._loop,
            limit_s=limit_s,
            limits=LearnedLimits() if is_auto else None,
            read=lambda idle_s, silent_s, then: self._read_activity(reader, sizes, (idle_s, silent_s), then),
            on_idle=on_idle,
            on_still=lambda for_s: self._post(StoodStill(round_number=number, for_s=for_s)),
        )

    def _get_monitor(self) -> "Monitor | None":
        """Return NCCL's monitor of this round's workers. None: without devices they have no address of it."""
        address = self._config.base_env.get(MONITOR_ADDRESS)
        if self._monitor is None and address is not None and self._workers.formed is not None:
            from muster.agent.features.hangs.monitor import Monitor

            self._monitor = Monitor(address, self._workers.formed.world_size)
        return self._monitor

    def _close_monitor(self) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.stop_listening()

    def read_views(self, formed: Round, host: str, then: ReadViews) -> None:
        """See `RoundPart`. The flight recorders say it."""
        from muster.agent.features.hangs import samples

        pids = {worker.local_rank: worker.pid for worker in self._workers.live}
        monitor = self._get_monitor()

        def read() -> "dict[int, RankView]":
            try:
                return {rank: look.view for rank, look in samples.look(pids, formed, host, monitor).items()}
            except (OSError, RuntimeError):  # no descriptors or threads left
                return {}

        self._loop.call_in_thread(read, then)

    def read_progress(self, formed: Round, host: str, then: ReadProgress) -> None:
        """See `RoundPart`."""
        from muster.agent.features.hangs import samples

        pids = {worker.local_rank: worker.pid for worker in self._workers.live}
        before, monitor = self._read_reported(formed), self._get_monitor()

        def read() -> "dict[int, tuple[samples.WorkerSample, samples.WorkerSample]]":
            try:
                return samples.look_twice(pids, formed, host, monitor)
            except (OSError, RuntimeError):
                return {}

        def compare(found: "dict[int, tuple[samples.WorkerSample, samples.WorkerSample]]") -> None:
            now = self._read_reported(formed)
            reported = {rank: (before[rank], now[rank]) for rank in before if rank in now}
            then({rank: (pair[1].view, samples.compare(pair, reported.get(rank))) for rank, pair in found.items()})

        self._loop.call_in_thread(read, compare)

    def _read_reported(self, formed: Round) -> "dict[int, Reported]":
        """Return what all workers of the round have reported, by local rank; empty if there is no page of it."""
        from muster.agent.features.hangs.samples import Reported

        page = self._workers.page
        if page is None or page.round_number != formed.number:
            return {}
        at_s = time.monotonic()
        # A Trainer's steps, unknown elsewhere, could not be compared.
        read = page.read_shown if formed.group_world_size == 1 else page.read_slot
        return {
            rank: Reported(at_s=at_s, slot=read(rank), values=page.read_values(rank))
            for rank in range(self._config.nproc)
        }

    def _read_activity(
        self,
        reader: "WorkerReader",
        sizes: "FileSizes",
        for_s: tuple[float, float],
        then: "Callable[[Mapping[int, Activity] | None], None]",
    ) -> None:
        live = self._workers.live
        stack_files = {worker.pid: self._workers.streams[worker.local_rank].stack_file for worker in live}

        def read() -> "tuple[Sessions, Mapping[int, Progress]] | None":
            try:
                sessions = read_sessions(stack_files, sizes)
                return sessions, reader.read_progress(sessions, *for_s)
            except (OSError, RuntimeError):  # no descriptors or threads left: keep the workers
                return None

        def add_output(found: "tuple[Sessions, Mapping[int, Progress]] | None") -> None:
            if found is None:
                then(None)
                return
            processes, progress = found
            then(
                {
                    worker.local_rank: Activity(
                        captured_bytes=self._logs.count_captured_bytes(worker.local_rank),
                        processes=processes[worker.pid],
                        progress_ns=self._read_progress_ns(worker.local_rank),
                        phase=self._workers.page.read_slot(worker.local_rank).phase if self._workers.page else "",
                        collectives=progress[worker.pid].collectives,
                        has_answered=progress[worker.pid].has_answered,
                        launches=progress[worker.pid].launches,
                        timeout_s=progress[worker.pid].timeout_s,
                        is_waiting=progress[worker.pid].is_waiting,
                    )
                    for worker in live
                }
            )

        # A machine may run thousands of processes.
        self._loop.call_in_thread(read, add_output)

    def _read_progress_ns(self, local_rank: int) -> int | None:
        """Return the time of the last progress.

        While a rank is in the foreground, no worker hangs, because the others wait for that rank. Nor does one hang in
        a pause.
        """
        if self._workers.foreground is not None or self._workers.pause is not None:
            return time.monotonic_ns()
        return self._workers.page.read_slot(local_rank).changed_ns if self._workers.page else None


def create_part(context: PartContext) -> HangsPart:
    """Create the part of one agent."""
    return HangsPart(context)
