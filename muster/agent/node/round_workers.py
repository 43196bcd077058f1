"""Acts on the workers of the current round: starts, signals and kills them, and posts what becomes of them.

Over 400 lines: one class carries out every action on workers, as `supervisor` does all others.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from muster._shared.contract import Env
from muster._shared.contract import StatusPageLayout as Layout
from muster._shared.records import assert_never, record
from muster.agent.config import HANG_TIMEOUT_AUTO, AgentConfig
from muster.agent.errors import SpawnError
from muster.agent.logs import LogRouter, WorkerStreams
from muster.agent.node import actions, events
from muster.agent.rendezvous.interface import Saved, StoodStill
from muster.agent.round import Round
from muster.agent.runtime.loop import Loop, Timer
from muster.agent.runtime.signals import ChildWatch
from muster.agent.workers.environment import build_worker_env, substitute_macros
from muster.agent.workers.memory import MemoryWatch
from muster.agent.workers.pool import LiveWorker, WorkerEnd, WorkerPool
from muster.agent.workers.spec import ProgramKind, WorkerSpec, WorkerStarter

if TYPE_CHECKING:  # loaded when first needed: every import delays the first worker
    from muster._shared.guard import GuardLease
    from muster._shared.reports import JobStatus, RankProgress, RankView
    from muster.agent.diagnosis.hang import Activity, HangWatch
    from muster.agent.diagnosis.hangs.looks import Reported
    from muster.agent.diagnosis.hangs.servers import Progress, WorkerReader
    from muster.agent.diagnosis.hangs.sessions import FileSizes, Sessions
    from muster.agent.logs.terminal_loan import TerminalLoan
    from muster.agent.placement.affinity import WorkerPlacement
    from muster.agent.rendezvous.drain_ceiling import RankSlot
    from muster.agent.telemetry import Pause, StatusFile
    from muster.agent.workers.status_page import StatusPage


_AUTO_BEGINS_S = 2.0
"""How long after the start of the workers `--hang-timeout auto` begins to look."""
_SAVED_LOOK_S = 1.0
"""How often the page is read for checkpoints that all workers have saved."""

_DRAIN_LOOK_S = 0.1
"""The same once a drain has begun in the round: a person may wait for it."""


@record
class WorkerParts:
    """What workers need besides the configuration."""

    loop: Loop
    lease: "GuardLease"
    logs: LogRouter
    children: ChildWatch
    starter: WorkerStarter
    placements: "tuple[WorkerPlacement, ...]"
    """Length nproc, indexed by local rank; empty: workers run where the agent may."""
    on_status: "Callable[[JobStatus], None] | None"
    """Gets what the status file says."""


class RoundWorkers:
    """Carries out `WorkerAction`s. Close it: that ends the starter's own processes."""

    def __init__(self, config: AgentConfig, parts: WorkerParts, post: Callable[[events.Event], None]) -> None:
        self._config = config
        self._loop = parts.loop
        self._lease = parts.lease
        self._logs = parts.logs
        self._starter = parts.starter
        self._placements = parts.placements
        self._on_status = parts.on_status
        self._post = post
        self._pool = WorkerPool(
            parts.loop,
            parts.children,
            parts.starter,
            on_started=self._on_started,
            on_spawn_failed=self._on_spawn_failed,
            on_ended=self._on_ended,
        )
        self._opening: actions.StartWorkers | None = None
        """A start that waits for its round's log files."""
        self._hang: HangWatch | None = None
        self._watched_round = 0
        self._fencings = 0
        """The guard's count when the workers were started."""
        self._page_failed = False
        self._is_draining = False
        """A command was written for this round."""
        self._pause: Pause | None = None
        """The workers were told to wait."""
        self._status: StatusFile | None = None
        """Once a worker has done a step."""
        self._reported: tuple[int, str] | None = None
        """The checkpoint of this round that was posted last."""
        self._saved_timer: Timer | None = None
        self._terminal: TerminalLoan | None = None
        """Of this round, once a worker has asked for the terminal."""
        self._rank_offset = 0
        self.page: StatusPage | None = None
        """Of this round; None: none could be made, and steps are not shown."""
        self.memory = MemoryWatch()
        """Has been reset when the workers were started."""
        self.streams: dict[int, WorkerStreams] = {}
        """By local rank."""
        self.ends: dict[int, WorkerEnd] = {}
        """By local rank."""

    @property
    def debugged(self) -> int | None:
        """The local rank whose debugger has the terminal; None: none has."""
        return None if self._terminal is None else self._terminal.debugged

    @property
    def live(self) -> list[LiveWorker]:
        """Workers that have not been reaped."""
        return self._pool.live

    def prepare(self) -> None:
        """Start what needs no ranks; posts `AgentStarted` and `WorkersPrepared`, perhaps before this returns."""
        self._starter.prepare(lambda: self._post(events.AgentStarted()), lambda: self._post(events.WorkersPrepared()))

    def can_host_store(self) -> bool:
        """See `spec.WorkerStarter`."""
        return self._starter.can_host_store()

    def begin_round(self, formed: Round) -> None:
        """End the last round's store, and open this one's if this agent hosts it: other nodes' workers may come now."""
        self.end_store()
        if formed.hosts_store:
            number = formed.number
            self._starter.start_store(
                formed.master_addr,
                formed.master_port,
                formed.world_size,
                lambda reason: self._post(events.StoreLost(round_number=number, reason=reason)),
            )

    def end_store(self) -> None:
        """End the store of the round, if this agent hosts it."""
        self._starter.end_store()

    def act(self, action: actions.WorkerAction) -> None:
        """Carry out one action."""
        match action:
            case actions.ParkWorkers():
                self._starter.park(self._config.nproc)
            case actions.StartWorkers():
                self._start(action)
            case actions.CancelStarts():
                self._opening = None
                self._pool.cancel_starts()
                self._close_child_ends()
            case actions.SignalWorkers():
                self._starter.check_store()
                self._pool.send(action.signum)
            case actions.InterruptWorker():
                for worker in self._pool.live:
                    if worker.local_rank == action.local_rank:
                        os.kill(worker.pid, signal.SIGINT)  # not reaped, so the number is its own
            case actions.KillWorkers():
                self._starter.check_store()
                self._kill(action.round_number)
            case actions.ReadSlots():
                number, drain = action.round_number, action.drain
                self._post(events.SlotsRead(round_number=number, drain=drain, slots=self._read_slots(action.kind)))
            case actions.WriteCommand() | actions.WithdrawCommand() | actions.WriteDeadline():
                self._write_page(action)
            case _:
                assert_never(action)

    # -- start ------------------------------------------------------------------------------------------------------

    def _start(self, action: actions.StartWorkers) -> None:
        formed = action.round
        self.ends.clear()
        self._fencings = self._lease.count_fencings()
        self.memory.reset()
        self._watch_for_hangs(formed.number)
        self._renew_page(formed)
        self._opening = action
        self._logs.run_when_open(lambda: self._start_opened(action))

    def _start_opened(self, action: actions.StartWorkers) -> None:
        formed = action.round
        if self._opening is not action:  # cancelled meanwhile
            return
        self._opening = None
        local_rank = 0
        specs: list[WorkerSpec] = []
        try:
            for local_rank in range(self._config.nproc):
                specs.append(self._build_spec(formed, local_rank))
        except SpawnError as error:  # no descriptors left for its output
            self._close_child_ends()
            self._on_spawn_failed(formed.number, local_rank, error)
            return
        self._pool.start(formed.number, specs)

    def _build_spec(self, formed: Round, local_rank: int) -> WorkerSpec:
        streams = self.streams[local_rank] = self._logs.open_worker(formed, local_rank)
        placement = self._placements[local_rank] if self._placements else None
        env = build_worker_env(self._config, formed, local_rank, error_file=streams.error_file)
        if self._config.program.kind is ProgramKind.COMMAND and streams.stack_file and env[Env.WATCHED] == "1":
            env[Env.STACK_FILE] = streams.stack_file
        return WorkerSpec(
            local_rank=local_rank,
            program=substitute_macros(self._config.program, local_rank),
            env={**env, **self.page.build_env(local_rank)} if self.page else env,
            stdout_fd=1 if streams.stdout_fd is None else streams.stdout_fd,
            stderr_fd=2 if streams.stderr_fd is None else streams.stderr_fd,
            cpus=placement.cpus if placement else None,
            command_prefix=placement.command_prefix if placement else (),
            error_file=streams.error_file or "",
            stack_file=streams.stack_file or "",
            crash_file=(streams.stderr_fd is None and streams.stack_file) or "",
        )

    def _renew_page(self, formed: Round) -> None:
        """A new page for each round: workers of the last one cannot be mistaken for these."""
        from muster.agent.workers.status_page import StatusPage  # loaded while the workers' template imports

        self._close_page()
        self._is_draining, self._rank_offset, self._reported = False, formed.rank_offset, None
        self._pause = None
        try:
            self.page = StatusPage(nproc=self._config.nproc, round_number=formed.number, attempt=formed.attempt)
        except OSError as error:
            if not self._page_failed:
                self._logs.print_line(f"no status page ({error}): steps of muster.worker are not shown or agreed on")
            self._page_failed = True
        else:
            self._saved_timer = self._loop.call_later(_SAVED_LOOK_S, lambda: self._watch_saved(formed))

    def _watch_saved(self, formed: Round) -> None:
        self._look_for_checkpoint(formed.number)
        self._look_for_debugger()
        self._update_status(formed)
        delay_s = _DRAIN_LOOK_S if self._is_draining else _SAVED_LOOK_S
        self._saved_timer = self._loop.call_later(delay_s, lambda: self._watch_saved(formed))

    def _update_status(self, formed: Round) -> None:
        """Let `torchx status` know how far the job is: node 0 tells."""
        page, run_dir = self.page, self._logs.run_dir
        if page is None or run_dir is None or formed.group_rank > 0:
            return
        if self._status is None:
            if all(page.read_slot(rank).changed_ns is None for rank in range(self._config.nproc)):
                return
            from muster.agent.telemetry import StatusFile  # a script may do no step

            self._status = StatusFile(run_dir, self._loop.clock, self._logs.files.thread.submit, self._on_status)
        self._status.update(formed, page, self._config.nproc, self._pause)

    def _look_for_checkpoint(self, round_number: int) -> None:
        """Post a checkpoint that all workers of the round have saved since the last look."""
        found = None if self.page is None else self.page.read_checkpoint()
        if found is not None and found != self._reported:
            self._reported = found
            self._post(Saved(round_number=round_number, step=found[0], path=found[1]))

    def _look_for_debugger(self) -> None:
        page = self.page
        if page is None or self._terminal is not None or not any(map(page.read_debugger, range(self._config.nproc))):
            return
        from muster.agent.logs.terminal_loan import TerminalLoan

        def on_quit() -> None:
            self._post(events.SignalReceived(signum=signal.SIGINT, at_s=self._loop.clock.now_s(), is_quit=True))

        self._terminal = TerminalLoan(
            self._loop, self._lease, self._logs, page, nproc=self._config.nproc, on_quit=on_quit
        )

    def is_asked(self) -> bool:
        """Whether a worker of this round has asked `should_stop`."""
        local_ranks = range(self._config.nproc) if self.page is not None else ()
        return any(self._read_asked(local_rank) is not None for local_rank in local_ranks)

    def _read_asked(self, local_rank: int) -> int | None:
        """The step that a worker has last asked about."""
        return None if self.page is None else self.page.read_slot(local_rank).asked[Layout.STOP]

    def _read_slots(self, kind: int) -> "tuple[RankSlot, ...] | None":
        from muster.agent.rendezvous.drain_ceiling import RankSlot  # only a drain needs it

        page = self.page
        if page is None:
            return None
        now_ns = time.monotonic_ns()
        return tuple(
            RankSlot(
                global_rank=self._rank_offset + local_rank,
                step=slot.step,
                asked=slot.asked[kind],
                stride=max(0, slot.stride[kind]),
                is_asking=slot.is_asking[kind],
                saved=slot.saved_step,
                silent_s=None if slot.changed_ns is None else max(0.0, (now_ns - slot.changed_ns) / 1e9),
            )
            for local_rank, slot in enumerate(map(page.read_slot, range(self._config.nproc)))
        )

    def _write_page(self, action: actions.WriteCommand | actions.WithdrawCommand | actions.WriteDeadline) -> None:
        if self.page is None:
            return
        match action:
            case actions.WriteCommand():
                command = Layout.pack_command(
                    drain=action.drain, kind=action.kind, step=action.step, is_committed=action.is_committed
                )
                self.page.write_command(command)
                self._is_draining = True
                is_pause = action.is_committed and action.kind == Layout.PAUSE
                self._pause = self._build_pause(action.step) if is_pause else None
            case actions.WithdrawCommand():
                self.page.write_command(0)
                if self._pause is not None and self._pool.live:
                    self._pause = None
                    self._watch_for_hangs(self._pool.live[0].round_number)  # the time of the pause does not count
            case actions.WriteDeadline():
                due_ns = 0 if action.delay_s is None else time.monotonic_ns() + int(action.delay_s * 1e9)
                self.page.write_deadline(due_ns)
            case _:
                assert_never(action)

    def _build_pause(self, step: int) -> "Pause":
        from muster.agent.telemetry import Pause  # most jobs are never paused

        return Pause(step=step, since_s=self._loop.clock.wall_s())

    def _close_page(self) -> None:
        if self._saved_timer is not None:
            self._saved_timer.cancel()
            self._saved_timer = None
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None
        if self.page is not None:
            self.page.close()
            self.page = None

    def _close_child_ends(self) -> None:
        for local_rank in self.streams:
            self._logs.close_child_ends(local_rank)

    # -- what becomes of them ---------------------------------------------------------------------------------------

    def _on_started(self, worker: LiveWorker) -> None:
        self._logs.close_child_ends(worker.local_rank)
        self._post(events.WorkerStarted(round_number=worker.round_number, local_rank=worker.local_rank))

    def _on_spawn_failed(self, number: int, local_rank: int, error: SpawnError) -> None:
        # When descriptors run out, the imports for the failure's description need one of these.
        self._logs.close_child_ends(local_rank)
        self._post(events.SpawnFailed(round_number=number, local_rank=local_rank, reason=str(error), errno=error.errno))

    def _on_ended(self, end: WorkerEnd) -> None:
        worker = end.worker
        self.ends[worker.local_rank] = end
        self._look_for_checkpoint(worker.round_number)
        if self._terminal is not None:
            self._terminal.end(worker.local_rank)
        fencings = self._lease.count_fencings() - self._fencings
        self._post(
            events.WorkerExited(
                round_number=worker.round_number,
                local_rank=worker.local_rank,
                code=end.code,
                fencings=fencings,
                asked=self._read_asked(worker.local_rank) if self._is_draining else None,
            )
        )

    def _kill(self, number: int) -> None:
        def post_gone() -> None:
            self._post(events.WorkersGone(round_number=number))

        def post_not_ended(pids: tuple[int, ...]) -> None:
            self._lease.record_not_ended()
            self._post(events.WorkersNotEnded(round_number=number, pids=pids))

        self._pool.sweep(lambda: self._logs.finish_round(post_gone), post_not_ended, limit_s=self._config.kill_limit_s)

    # -- hangs ------------------------------------------------------------------------------------------------------

    def _watch_for_hangs(self, number: int) -> None:
        """Watch this round's workers from now on, and not the last one's."""
        if self._hang is not None:
            self._hang.close()
            self._hang = None
        self._watched_round = number
        if self._config.hang_timeout_s == HANG_TIMEOUT_AUTO:
            # Nothing of it is needed before the workers' first line, which its imports would delay.
            self._loop.call_later(_AUTO_BEGINS_S, lambda: self._begin_auto_watch(number))
        elif self._config.hang_timeout_s is not None:
            self._begin_hang_watch(number, self._config.hang_timeout_s)

    def _begin_auto_watch(self, number: int) -> None:
        with suppress(OSError, ImportError):  # no descriptors left, or no disk: the job goes on without the watch
            self._begin_hang_watch(number, HANG_TIMEOUT_AUTO)

    def _begin_hang_watch(self, number: int, limit_s: float) -> None:
        if number != self._watched_round:
            return
        from muster.agent.diagnosis.hang import HangWatch
        from muster.agent.diagnosis.hangs.limits import LEAST_S, LearnedLimits
        from muster.agent.diagnosis.hangs.servers import WorkerReader
        from muster.agent.diagnosis.hangs.sessions import FileSizes

        def on_idle(reason: str | None, is_urgent: bool) -> None:
            if reason is None:
                self._post(events.WorkersActive(round_number=number))
            else:
                self._post(events.WorkersIdle(round_number=number, reason=reason, is_urgent=is_urgent))

        is_auto = limit_s == HANG_TIMEOUT_AUTO
        limit_s = LEAST_S if is_auto else limit_s
        reader, sizes = WorkerReader(limit_s), FileSizes()
        self._hang = HangWatch(
            self._loop,
            limit_s=limit_s,
            limits=LearnedLimits() if is_auto else None,
            read=lambda idle_s, then: self._read_activity(reader, sizes, idle_s, then),
            on_idle=on_idle,
            on_still=lambda for_s: self._post(StoodStill(round_number=number, for_s=for_s)),
        )

    @property
    def early_exits(self) -> tuple[int, ...]:
        """Local ranks that have ended with code 0, and not because of a signal of ours."""
        return tuple(rank for rank, end in sorted(self.ends.items()) if end.code == 0 and end.signalled_s is None)

    @property
    def is_idle(self) -> bool:
        """Whether no worker has been active for the hang timeout."""
        return self._hang is not None and self._hang.is_idle

    @property
    def still_s(self) -> float:
        """For how long all workers have stood still; 0: one does not, or that is not known."""
        return 0.0 if self._hang is None else self._hang.still_s

    def read_views(self, formed: Round, host: str, then: "Callable[[dict[int, RankView]], None]") -> None:
        """Read the flight recorders of the live workers; calls back with what they say, by local rank."""
        from muster.agent.diagnosis.hangs import looks

        pids = {worker.local_rank: worker.pid for worker in self._pool.live}

        def read() -> "dict[int, RankView]":
            try:
                return {rank: look.view for rank, look in looks.look(pids, formed, host).items()}
            except (OSError, RuntimeError):  # no descriptors or threads left
                return {}

        self._loop.call_in_thread(read, then)

    def read_progress(
        self, formed: Round, host: str, then: "Callable[[dict[int, tuple[RankView, RankProgress]]], None]"
    ) -> None:
        """Look at the live workers twice; calls back with what was seen last and what has moved, by local rank."""
        from muster.agent.diagnosis.hangs import looks

        pids = {worker.local_rank: worker.pid for worker in self._pool.live}
        before = self._read_reported(formed)

        def read() -> "dict[int, tuple[looks.Look, looks.Look]]":
            try:
                return looks.look_twice(pids, formed, host)
            except (OSError, RuntimeError):
                return {}

        def compare(found: "dict[int, tuple[looks.Look, looks.Look]]") -> None:
            now = self._read_reported(formed)
            reported = {rank: (before[rank], now[rank]) for rank in before if rank in now}
            then({rank: (pair[1].view, looks.compare(pair, reported.get(rank))) for rank, pair in found.items()})

        self._loop.call_in_thread(read, compare)

    def _read_reported(self, formed: Round) -> "dict[int, Reported]":
        """What all workers of the round have reported, by local rank; empty where there is no page of it."""
        from muster.agent.diagnosis.hangs.looks import Reported

        page = self.page
        if page is None or page.round_number != formed.number:
            return {}
        at_s = time.monotonic()
        return {
            rank: Reported(at_s=at_s, slot=page.read_slot(rank), values=page.read_values(rank))
            for rank in range(self._config.nproc)
        }

    def _read_activity(
        self,
        reader: "WorkerReader",
        sizes: "FileSizes",
        idle_s: float,
        then: "Callable[[Mapping[int, Activity]], None]",
    ) -> None:
        from muster.agent.diagnosis.hang import Activity
        from muster.agent.diagnosis.hangs.sessions import read_sessions

        live = self._pool.live
        stack_files = {worker.pid: self.streams[worker.local_rank].stack_file for worker in live}

        def read() -> "tuple[Sessions, Mapping[int, Progress]] | None":
            try:
                sessions = read_sessions(stack_files, sizes)
                return sessions, reader.read_progress(sessions, idle_s)
            except (OSError, RuntimeError):  # no descriptors or threads left: no reason to end workers that run
                return None

        def add_output(found: "tuple[Sessions, Mapping[int, Progress]] | None") -> None:
            if found is None:
                then({})
                return
            processes, progress = found
            then(
                {
                    worker.local_rank: Activity(
                        captured_bytes=self._logs.count_captured_bytes(worker.local_rank),
                        processes=processes[worker.pid],
                        progress_ns=self._read_progress_ns(worker.local_rank),
                        phase=self.page.read_slot(worker.local_rank).phase if self.page else "",
                        collectives=progress[worker.pid].collectives,
                        timeout_s=progress[worker.pid].timeout_s,
                        is_waiting=progress[worker.pid].is_waiting,
                    )
                    for worker in live
                }
            )

        # A machine may run many thousand processes.
        self._loop.call_in_thread(read, add_output)

    def _read_progress_ns(self, local_rank: int) -> int | None:
        """While a debugger has the terminal, no worker hangs: the others wait for that rank. Nor in a pause."""
        if self.debugged is not None or self._pause is not None:
            return time.monotonic_ns()
        return self.page.read_slot(local_rank).changed_ns if self.page else None

    def close(self) -> None:
        """End the starter's own processes."""
        self._watched_round = 0
        if self._hang is not None:
            self._hang.close()
        self._pool.close()
        self._close_page()
