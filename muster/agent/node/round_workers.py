"""Acts on the workers of the current round: starts, signals and kills them, and posts what becomes of them."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from muster._shared.contract import Env
from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.records import assert_never, record
from muster.agent.config import AgentConfig
from muster.agent.errors import SpawnError
from muster.agent.features import RowContext
from muster.agent.logs import LogRouter, WorkerStreams
from muster.agent.node import actions, events
from muster.agent.node.round_parts import PartContext, RoundParts
from muster.agent.rendezvous.interface import PartReport, Saved
from muster.agent.round import Round
from muster.agent.runtime.loop import Loop, Timer
from muster.agent.runtime.signals import ChildWatch
from muster.agent.workers.environment import build_worker_env, substitute_macros
from muster.agent.workers.memory import MemoryWatch
from muster.agent.workers.pool import LiveWorker, WorkerEnd, WorkerPool
from muster.agent.workers.spec import ProgramKind, WorkerSpec, WorkerStarter

if TYPE_CHECKING:  # imports delay the first worker
    from muster._shared.guard import GuardLease
    from muster._shared.reports import FailedCheck
    from muster.agent.features.sink import Witness
    from muster.agent.placement.affinity import WorkerPlacement
    from muster.agent.rendezvous.drain_ceiling import RankSlot
    from muster.agent.rendezvous.interface import Rendezvous, RendezvousEvent, Stream
    from muster.agent.runtime.event_log import EventLog
    from muster.agent.telemetry import Observed, Pause
    from muster.agent.workers.status_page import StatusPage


_SAVED_LOOK_S = 0.25
"""How often the page is read for checkpoints that all workers have saved: a node that is killed loses what was saved
since. Four looks a second take 0.07 % of a core more than one."""

_KEPT_REST_S = 0.05
"""How long a round that is followed waits for the last output of workers that stay for the next one."""

_DRAIN_LOOK_S = 0.1
"""The same once a drain has begun in the round, because a person may wait for it."""


@record
class AgentParts:
    """The parts of an agent."""

    loop: Loop
    """The clock, and the thread where callbacks run."""
    lease: "GuardLease"
    """The guard's fencing lease."""
    logs: LogRouter
    """Receives the workers' output; closed by `Supervisor.run`."""
    event_log: "EventLog"
    """Receives the records; closed by `Supervisor.run`."""
    children: ChildWatch
    """Reports the ends of the workers; closed by `Supervisor.run`."""
    starter: WorkerStarter
    """Starts workers; closed by `Supervisor.run`."""
    placements: "tuple[WorkerPlacement, ...]"
    """Placements by local rank (length nproc). If empty, workers run where the agent may run."""
    early: Mapping[str, object]
    """What features have begun before there was a round, by their names."""
    witnesses: "tuple[Witness, ...]"
    """Read the events of the node."""
    connect: "Callable[[Callable[[RendezvousEvent], None]], Rendezvous]"
    """Builds the rendezvous, which posts its events through the argument; closed by `Supervisor.run`."""


class RoundWorkers:
    """Carries out `WorkerAction`s. The owner closes it, which ends the starter's own processes."""

    def __init__(
        self,
        config: AgentConfig,
        parts: AgentParts,
        post: Callable[[events.Event], None],
        get_rendezvous: "Callable[[], Rendezvous]",
    ) -> None:
        self._get_rendezvous = get_rendezvous
        self._config = config
        self._loop = parts.loop
        self._lease = parts.lease
        self._logs = parts.logs
        self._starter = parts.starter
        self._children = parts.children
        self._event_log = parts.event_log
        self._early = parts.early
        self._placements = parts.placements
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
        self._began_s = 0.0
        """When the start of the round's workers began."""
        self.formed: Round | None = None
        """The round of the page."""
        self._fencings = 0
        """The guard's count when the workers were started."""
        self._page_failed = False
        self._is_draining = False
        """Whether a command was written for this round."""
        self.pause: Pause | None = None
        """The pause, if the workers were told to wait."""
        self._reported: tuple[int, str] | None = None
        """The checkpoint of this round that was posted last."""
        self._saved_timer: Timer | None = None
        self._rank_offset = 0
        self._pids: set[int] = set()
        """The processes of this round's workers."""
        self.kept_count = 0
        """How many of them were workers of the round before."""
        self.parts = RoundParts(self._build_part_context, self._logs.print_line)
        self.page: StatusPage | None = None
        """The page of this round. None means that none could be made, and steps are not shown."""
        self.memory = MemoryWatch()
        """Reset when the workers were started."""
        self.streams: dict[int, WorkerStreams] = {}
        """The workers' streams, by local rank."""
        self.ends: dict[int, WorkerEnd] = {}
        """The workers' ends, by local rank."""

    @property
    def foreground(self) -> int | None:
        """The local rank that Ctrl-C is for; None: it is for all."""
        return self.parts.foreground

    def has_stepped(self, round_number: int) -> bool:
        """Return whether a worker of this round has done a step, as far as it is known."""
        page = self.page
        if page is None or page.round_number != round_number:
            return False
        slots = map(page.read_slot, range(self._config.nproc))
        return any(each.step is not None or each.optimizer_steps or each.saved_step is not None for each in slots)

    @property
    def live(self) -> list[LiveWorker]:
        """Workers that have not been reaped."""
        return self._pool.live

    def prepare(self) -> None:
        """Start what needs no ranks; post `AgentStarted` and `WorkersPrepared`, perhaps before this returns."""
        self.parts.load_early(self._early)
        self._starter.prepare(lambda: self._post(events.AgentStarted()), lambda: self._post(events.WorkersPrepared()))

    def can_host_store(self) -> bool:
        """See `spec.WorkerStarter`."""
        return self._starter.can_host_store()

    def begin_round(self, formed: Round) -> None:
        """End the last round's store, and open this one's if this agent hosts it: other nodes' workers may come now."""
        self.end_store()
        self.parts.enter_round(formed)
        if formed.hosts_store:
            number = formed.number
            self._starter.start_store(
                formed.master_addr,
                formed.master_port,
                lambda reason: self._post(events.StoreLost(round_number=number, reason=reason)),
            )

    def end_store(self) -> None:
        """End the store of the round, if this agent hosts it."""
        self._starter.end_store()

    def act(self, action: actions.WorkerAction) -> None:  # noqa: C901  # one case for each
        """Carry out one action."""
        match action:
            case actions.ParkWorkers():
                self._starter.park(action.count)
            case actions.StartWorkers():
                self._start(action)
            case actions.CancelStarts():
                self._opening = None
                self._pool.cancel_starts()
                self._close_child_ends()
            case actions.LeaveRound():
                self._pool.send(0, action.local_ranks)
                self._pool.kill_orphans()
                self.parts.leave_round(action.local_ranks)
            case actions.SignalWorkers():
                self._signal(action.signum, action.local_ranks)
            case actions.InterruptWorker():
                for worker in self._pool.live:
                    if worker.local_rank == action.local_rank:
                        os.kill(worker.pid, signal.SIGINT)  # not reaped, so no reused number
            case actions.KillWorkers():
                self._kill(action)
            case actions.ReadSlots():
                number, drain = action.round_number, action.drain
                self._post(events.SlotsRead(round_number=number, drain=drain, slots=self._read_slots(action.kind)))
            case actions.WriteCommand() | actions.WithdrawCommand() | actions.WriteDeadline():
                self._write_page(action)
            case actions.TellPart():
                self.parts.tell(action.message)
            case _:
                assert_never(action)

    def _signal(self, signum: int, local_ranks: frozenset[int] | None) -> None:
        self._pool.send(signum, local_ranks)
        if self.page is not None:
            self.page.withdraw_wait()

    def _build_row_context(self, formed: Round) -> RowContext:
        running_s = self._loop.clock.now_s() - self._began_s
        return RowContext(config=self._config, formed=formed, page=self.page, running_s=running_s)

    def _build_part_context(self, name: str) -> PartContext:
        def quit_job(reason: str) -> None:
            now_s = self._loop.clock.now_s()
            self._post(events.SignalReceived(signum=signal.SIGINT, at_s=now_s, quit_reason=reason))

        def fail(round_number: int, reason: str, check: "FailedCheck") -> None:
            self._post(events.StoreLost(round_number=round_number, reason=reason, check=check))

        def send(round_number: int, content: str) -> None:
            self._post(PartReport(round_number=round_number, feature=name, content=content))

        def open_stream(
            address: tuple[str, int], on_open: "Callable[[Stream], None]", on_failed: Callable[[str], None]
        ) -> None:
            self._get_rendezvous().open_stream(name, address, on_open, on_failed)

        def start_process(
            spec: WorkerSpec, on_started: Callable[[int], None], on_failed: Callable[[SpawnError], None]
        ) -> None:
            self._starter.start([spec], lambda _, pid: on_started(pid), lambda _, error: on_failed(error))

        return PartContext(
            config=self._config,
            loop=self._loop,
            logs=self._logs,
            lease=self._lease,
            get_page=lambda: self.page,
            workers=self,
            post=self._post,
            quit_job=quit_job,
            fail=fail,
            event_log=self._event_log,
            children=self._children,
            early=self._early.get(name),
            send=send,
            start_process=start_process,
            keep_process=self._pool.keep,
            open_stream=open_stream,
        )

    # -- start ------------------------------------------------------------------------------------------------------

    def _start(self, action: actions.StartWorkers) -> None:
        formed = action.round
        self.ends.clear()
        self._fencings = self._lease.count_fencings()
        self.memory.reset()
        self._renew_page(formed)
        self._began_s = self._loop.clock.now_s()
        self._opening = action
        self.parts.begin_round(
            self._build_row_context(formed),
            on_ready=lambda: self._logs.run_when_open(lambda: self._start_opened(action)),
            on_failed=lambda reason, check: self._fail_start(formed.number, reason, check),
            has_stopped=lambda: self._opening is not action,
        )

    def _fail_start(self, number: int, reason: str, check: "FailedCheck | None") -> None:
        self._opening = None
        self._post(events.SpawnFailed(round_number=number, local_rank=0, reason=reason, errno=None, check=check))

    def _start_opened(self, action: actions.StartWorkers) -> None:
        formed = action.round
        if self._opening is not action:  # cancelled during opening
            return
        self._opening = None
        local_rank = 0
        specs: list[WorkerSpec] = []
        try:
            for local_rank in range(self._config.nproc):
                specs.append(self._build_spec(formed, local_rank))
        except SpawnError as error:  # no descriptors left
            self._close_child_ends()
            self._on_spawn_failed(formed.number, local_rank, error)
            return
        kept = {spec.local_rank: pid for spec in specs if (pid := self.parts.start_kept(formed, spec)) is not None}
        self.kept_count = len(self._pids.intersection(kept.values()))
        self._pids.clear()
        self._pool.start(formed.number, [spec for spec in specs if spec.local_rank not in kept])
        for local_rank, pid in kept.items():
            self._pool.start_kept(formed.number, local_rank, pid)

    def _build_spec(self, formed: Round, local_rank: int) -> WorkerSpec:
        streams = self.streams[local_rank] = self._logs.open_worker(formed, local_rank)
        placement = self._placements[local_rank] if self._placements else None
        env = build_worker_env(self._config, formed, local_rank, error_file=streams.error_file)
        if self._config.program.kind is ProgramKind.COMMAND and streams.stack_file and env[Env.WATCHED] == "1":
            env[Env.STACK_FILE] = streams.stack_file
        return WorkerSpec(
            local_rank=local_rank,
            program=substitute_macros(self._config.program, local_rank),
            env=env
            | ({} if self.page is None else self.page.build_env(local_rank))
            | self.parts.build_env(formed, local_rank),
            stdout_fd=1 if streams.stdout_fd is None else streams.stdout_fd,
            stderr_fd=2 if streams.stderr_fd is None else streams.stderr_fd,
            cpus=placement.cpus if placement else None,
            command_prefix=placement.command_prefix if placement else (),
            error_file=streams.error_file or "",
            stack_file=streams.stack_file or "",
            crash_file=(streams.stderr_fd is None and streams.stack_file) or "",
        )

    def _renew_page(self, formed: Round) -> None:
        """Make a new page for each round, so that workers of the last one cannot be mistaken for this one's."""
        from muster.agent.workers.status_page import StatusPage  # while the template imports

        self._close_page()
        self.formed = formed
        self._is_draining, self._rank_offset, self._reported = False, formed.rank_offset, None
        self.pause = None
        try:
            self.page = StatusPage(nproc=self._config.nproc, round_number=formed.number, attempt=formed.attempt)
        except OSError as error:
            if not self._page_failed:
                self._logs.print_line(
                    f"no status page ({error}): steps of muster.worker are not shown or agreed on, and nothing is"
                    " kept in memory"
                )
            self._page_failed = True
        self._saved_timer = self._loop.call_later(_SAVED_LOOK_S, lambda: self._watch_saved(formed))

    def _watch_saved(self, formed: Round) -> None:
        self._look_for_checkpoint(formed.number)
        self.parts.look(self._build_row_context(formed))
        delay_s = _DRAIN_LOOK_S if self._is_draining else _SAVED_LOOK_S
        self._saved_timer = self._loop.call_later(delay_s, lambda: self._watch_saved(formed))

    def observe(self) -> "Observed | None":
        """See `telemetry.plane.ObservedNode`."""
        formed, page = self.formed, self.page
        if formed is None or page is None or page.round_number != formed.number:
            return None
        from muster._shared.job_view import RankState
        from muster.agent.telemetry import Observed

        pids = {worker.local_rank: worker.pid for worker in self._pool.live}
        states = dict.fromkeys(pids, RankState.RUNNING)
        for local_rank, end in self.ends.items():
            is_failed = end.code != 0 and end.signalled_s is None
            states[local_rank] = RankState.FAILED if is_failed else RankState.ENDED
        observed = Observed(
            formed=formed,
            page=page,
            states=states,
            pids=pids,
            read_last_line=self._logs.read_last_line,
            pause=self.pause,
        )
        return self.parts.add_to(observed)

    def _look_for_checkpoint(self, round_number: int) -> None:
        """Post a checkpoint that all workers of the round have saved since the last look."""
        found = None if self.page is None else self.page.read_checkpoint()
        if found is not None and found != self._reported:
            self._reported = found
            self._post(Saved(round_number=round_number, step=found[0], path=found[1]))

    def is_asked(self) -> bool:
        """Return whether a worker of this round has asked `should_stop`."""
        local_ranks = range(self._config.nproc) if self.page is not None else ()
        return any(self._read_asked(local_rank) is not None for local_rank in local_ranks)

    def _read_asked(self, local_rank: int) -> int | None:
        """Return the step that a worker has last asked about."""
        return None if self.page is None else self.page.read_slot(local_rank).asked[Layout.STOP]

    def _read_slots(self, kind: int) -> "tuple[RankSlot, ...] | None":
        from muster.agent.rendezvous.drain_ceiling import RankSlot

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
                keeps=slot.asked[Layout.JOIN] is not None,
                waiting=page.read_waiting(local_rank) if kind == Layout.JOIN else None,
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
                self.pause = self._build_pause(action.step) if is_pause else None
            case actions.WithdrawCommand():
                self.page.write_command(0)
                if self.pause is not None and self._pool.live:
                    self.pause = None
                    self.parts.end_pause()
            case actions.WriteDeadline():
                due_ns = 0 if action.delay_s is None else time.monotonic_ns() + int(action.delay_s * 1e9)
                self.page.write_deadline(due_ns)
            case _:
                assert_never(action)

    def _build_pause(self, step: int) -> "Pause":
        from muster.agent.telemetry import Pause

        return Pause(step=step, since_s=self._loop.clock.wall_s())

    def _close_page(self) -> None:
        if self._saved_timer is not None:
            self._saved_timer.cancel()
            self._saved_timer = None
        self.parts.end_round()
        if self.page is not None:
            self.page.close()
            self.page = None

    def _close_child_ends(self) -> None:
        for local_rank in self.streams:
            self._logs.close_child_ends(local_rank)

    # -- what becomes of them ---------------------------------------------------------------------------------------

    def _on_started(self, worker: LiveWorker) -> None:
        self._logs.close_child_ends(worker.local_rank)
        self._pids.add(worker.pid)
        self._post(events.WorkerStarted(round_number=worker.round_number, local_rank=worker.local_rank))

    def _on_spawn_failed(self, number: int, local_rank: int, error: SpawnError) -> None:
        # The imports for the failure's description need a descriptor.
        self._logs.close_child_ends(local_rank)
        self._post(events.SpawnFailed(round_number=number, local_rank=local_rank, reason=str(error), errno=error.errno))

    def _on_ended(self, end: WorkerEnd) -> None:
        worker = end.worker
        self.ends[worker.local_rank] = end
        self._look_for_checkpoint(worker.round_number)
        self.parts.end_worker(end)
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

    def _kill(self, action: actions.KillWorkers) -> None:
        number = action.round_number
        if not action.keeps:
            self._pool.end_kept()

        def post_gone() -> None:
            self._post(events.WorkersGone(round_number=number))

        def post_not_ended(pids: tuple[int, ...]) -> None:
            self._lease.record_not_ended()
            self._post(events.WorkersNotEnded(round_number=number, pids=pids))

        # Children of what is kept may hold its pipes of this round.
        rest_s = _KEPT_REST_S if self._pool.has_kept else 1.0
        self._pool.sweep(
            lambda: self._logs.finish_round(post_gone, rest_s), post_not_ended, limit_s=self._config.kill_limit_s
        )

    @property
    def early_exits(self) -> tuple[int, ...]:
        """Local ranks that have ended with code 0, but not because of a signal of ours."""
        return tuple(rank for rank, end in sorted(self.ends.items()) if end.code == 0 and end.signalled_s is None)

    def close(self) -> None:
        """End the starter's own processes."""
        self._opening = None
        self._pool.close()
        self._close_page()
        self.parts.close()
