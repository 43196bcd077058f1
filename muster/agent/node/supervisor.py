"""The loop: the only place that acts.

Facts come in as events on the loop's queue: from rendezvous, from the reaper, from timers and signals. `decisions`
says what follows; the methods below carry it out. Every transition leaves one record in the journal.
"""

import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from muster._guard import GuardLease
from muster._processes import LINUX, become_subreaper
from muster.agent.config import AgentConfig
from muster.agent.diagnosis import stacks
from muster.agent.diagnosis.failures import FailureCollector
from muster.agent.diagnosis.report import Failure, Stack
from muster.agent.errors import SpawnError
from muster.agent.logs import LogRouter, WorkerStreams
from muster.agent.node import actions, events, outcome
from muster.agent.node.actions import LocalFailure
from muster.agent.node.decisions import decide
from muster.agent.node.state import NodeState
from muster.agent.node.transition_log import TransitionLog
from muster.agent.rendezvous.backends.selection import create_rendezvous
from muster.agent.rendezvous.interface import BreakKind, JobEnded, Notice, RoundBroken
from muster.agent.round import Round
from muster.agent.runtime.event_log import EventLog
from muster.agent.runtime.loop import Loop, Timer
from muster.agent.runtime.signals import SignalWatch
from muster.agent.workers.environment import build_worker_env, substitute_macros
from muster.agent.workers.pool import LiveWorker, WorkerEnd, WorkerPool
from muster.agent.workers.spec import WorkerSpec, WorkerStarter

if TYPE_CHECKING:  # loaded when first needed: every import delays the first worker
    from muster.agent.diagnosis.hang import Activity, HangWatch
    from muster.agent.placement.affinity import WorkerPlacement

_SETTLE_TURNS = 2
"""Turns of the loop between a worker's end and its failure record: what it wrote last is in the pipes by then."""

_STACKS_LIMIT_S = stacks.LIMIT_S + 0.5
"""The longest that a stop waits for stacks."""

HOLD_S = 5.0
"""The longest that workers are held back for global rank 0's: its node may have more to import, and a program that
needs no rendezvous of its own shall not wait for that."""


class Supervisor:
    """One agent, from the first signal handler to the exit code. Use `run` once."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        loop: Loop,
        lease: GuardLease,
        logs: LogRouter,
        journal: EventLog,
        starter: WorkerStarter,
        placements: "tuple[WorkerPlacement, ...]",
    ) -> None:
        """Wire the parts together; nothing is started yet.

        Args:
            config: the agent's.
            loop: the queue and the clock.
            lease: the guard's fencing lease.
            logs: takes the workers' output; closed by `run`.
            journal: takes the records; closed by `run`.
            starter: how workers are started; closed by `run`.
            placements: length nproc, indexed by local rank; empty: workers run where the agent may.
        """
        self._config = config
        self._guard_pid = os.getppid()
        self._loop = loop
        self._lease = lease
        self._logs = logs
        self._journal = journal
        self._transcript = TransitionLog(journal, logs.say, logs.tell_trouble)
        self._placements = placements
        self._starter = starter
        self._group = WorkerPool(
            loop,
            starter,
            on_started=self._note_started,
            on_spawn_failed=self._note_spawn_failed,
            on_ended=self._note_ended,
            note_workers=None if LINUX else lease.note_workers,
        )
        self._rendezvous = create_rendezvous(
            config.rendezvous, config.nproc, config.role, loop, lease, config.node_name
        )
        self._failures = FailureCollector(host=config.node_name, clock=loop.clock, logs=logs)
        self._stacks = stacks.StackCollector(loop)
        self._hang = self._watch_for_hangs()
        self._state = NodeState(nproc=config.nproc)
        self._streams: dict[int, WorkerStreams] = {}
        self._ends: dict[int, WorkerEnd] = {}
        self._taken: dict[int, str] = {}
        self._grace: Timer | None = None
        self._delayed_start: Timer | None = None
        self._held: Round | None = None
        self._is_prepared = False
        self._code: int | None = None
        self._failed_s: float | None = None

    def _watch_for_hangs(self) -> "HangWatch | None":
        if self._config.hang_timeout_s is None:
            return None
        from muster.agent.diagnosis.hang import HangWatch

        return HangWatch(
            self._loop, limit_s=self._config.hang_timeout_s, read=self._read_activity, on_idle=self._note_idle
        )

    def _read_activity(self) -> "dict[int, Activity]":
        from muster.agent.diagnosis import hang

        live = self._group.live
        processes = hang.read_sessions({worker.pid: self._streams[worker.local_rank].stack_file for worker in live})
        return {
            worker.local_rank: hang.Activity(
                captured_bytes=self._logs.bytes_seen(worker.local_rank), processes=processes[worker.pid]
            )
            for worker in live
        }

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Take part in the job until it is over; the exit code. Leaves no process of the workers behind."""
        become_subreaper()
        signals = SignalWatch(
            self._loop,
            handled=self._config.signals_to_handle,
            on_signal=self._note_signal,
            on_child=self._group.reaped,
            on_stacks=self._print_stacks,
        )
        if self._lease.guard_fd is not None:
            self._loop.watch_readable(self._lease.guard_fd, self._note_guard_gone)
        try:
            self._journal.write("agent_started", pid=os.getpid(), start=self._config.start)
            self._starter.prepare(self._note_prepared)
            self._rendezvous.join(is_prepared=self._is_prepared)
            while self._code is None:
                self._loop.turn()
                while self._code is None and (event := self._loop.take_event()) is not None:
                    self._take(event)
            self._journal.write("agent_ended", exit_code=int(self._code))
            return self._code
        finally:
            self._close()
            signals.close()
            if self._failed_s is not None:
                outcome.wait_for_common_exit(self._config, self._failed_s)

    def _take(self, event: Any) -> None:
        self._transcript.take(event)
        if isinstance(event, Notice):
            return
        if isinstance(event, JobEnded) and not event.succeeded:
            self._failed_s = self._loop.clock.now_s()
        if isinstance(event, RoundBroken) and event.kind in (BreakKind.FAILURE, BreakKind.MEMBERSHIP):
            self._starter.park(self._config.nproc)  # forked while the old ones are being stopped
        self._state, decided = decide(self._state, event)
        for action in decided:
            self._act(action)

    def _act(self, action: actions.Action) -> None:
        handler: Callable[[Any], None] = getattr(self, _ACTIONS[type(action)])
        handler(action)

    def _close(self) -> None:
        if self._hang is not None:
            self._hang.close()
        self._rendezvous.close()
        self._group.close()
        self._logs.close()
        self._journal.close()

    # -- facts ------------------------------------------------------------------------------------------------------

    def _note_prepared(self) -> None:
        self._is_prepared = True
        self._rendezvous.report_prepared()

    def _note_started(self, worker: LiveWorker) -> None:
        self._logs.close_child_ends(worker.local_rank)
        self._loop.post(events.WorkerStarted(number=worker.number, local_rank=worker.local_rank))

    def _note_spawn_failed(self, number: int, local_rank: int, reason: str) -> None:
        self._loop.post(events.SpawnFailed(number=number, local_rank=local_rank, reason=reason))

    def _note_ended(self, end: WorkerEnd) -> None:
        if end.code == -signal.SIGKILL and self._lease.take_fired():
            self._loop.post(events.Fenced())
        self._ends[end.worker.local_rank] = end
        self._loop.post(events.WorkerExited(number=end.worker.number, local_rank=end.worker.local_rank, code=end.code))

    def _note_signal(self, signum: int) -> None:
        self._loop.post(events.SignalReceived(signum=signum, guard_died=os.getppid() != self._guard_pid))

    def _note_guard_gone(self) -> None:
        if self._lease.guard_fd is not None:
            self._loop.unwatch(self._lease.guard_fd)
        self._loop.post(events.SignalReceived(signum=signal.SIGTERM, guard_died=True))

    def _note_idle(self, reason: str | None) -> None:
        if reason is None:
            self._loop.post(events.WorkersIdle(number=self._state.number))
            return
        ranks = tuple(sorted(worker.local_rank for worker in self._group.live))
        self._loop.post(events.WorkersIdle(number=self._state.number, local_ranks=ranks, reason=reason))

    # -- actions ----------------------------------------------------------------------------------------------------

    def _start_workers(self, action: actions.StartWorkers) -> None:
        self._ends.clear()
        self._taken = {}
        longest_s = self._config.longest_backoff_s(action.round.attempt)
        if action.is_held:  # the node of global rank 0 backs off for all
            self._held = action.round
            delay_s = longest_s + HOLD_S
        elif longest_s > 0.0:
            delay_s = self._draw_backoff_s(longest_s)
            self._logs.say(f"waiting {delay_s:.1f} s before attempt {action.round.attempt} (--restart-backoff)")
        else:
            self._start_now(action.round)
            return
        self._delayed_start = self._loop.call_later(delay_s, lambda: self._start_now(action.round))

    def _open_starts(self, _action: actions.ReleaseStarts) -> None:
        if self._held is not None:
            if self._delayed_start is not None:
                self._delayed_start.cancel()
            self._start_now(self._held)

    @staticmethod
    def _draw_backoff_s(longest_s: float) -> float:
        """With jitter, so that jobs which failed together do not march in step."""
        import random  # only a job that fails again and again needs it

        return longest_s * random.uniform(0.5, 1.0)  # noqa: S311  # no secret

    def _start_now(self, formed: Round) -> None:
        self._held = None
        self._logs.open_round(formed)
        self._transcript.open_file(self._logs.run_dir)
        self._failures.begin()
        if self._hang is not None:
            self._hang.reset()
        local_rank = 0
        specs: list[WorkerSpec] = []
        try:
            for local_rank in range(self._config.nproc):
                specs.append(self._build_spec(formed, local_rank))
        except SpawnError as error:  # no descriptors left for its output
            self._note_spawn_failed(formed.number, local_rank, str(error))
            return
        self._group.start(formed.number, specs)

    def _build_spec(self, formed: Round, local_rank: int) -> WorkerSpec:
        streams = self._streams[local_rank] = self._logs.open_worker(local_rank)
        placement = self._placements[local_rank] if self._placements else None
        hosts_store = formed.rank_offset + local_rank == 0 and formed.world_size > 1 and not formed.use_agent_store
        return WorkerSpec(
            local_rank=local_rank,
            program=substitute_macros(self._config.program, local_rank),
            env=build_worker_env(self._config, formed, local_rank, error_file=streams.error_file),
            stdout_fd=streams.stdout_fd,
            stderr_fd=streams.stderr_fd,
            cpus=placement.cpus if placement else None,
            command_prefix=placement.command_prefix if placement else (),
            error_file=streams.error_file,
            store_port=formed.master_port if hosts_store else None,
            stack_file=streams.stack_file,
        )

    def _cancel_starts(self, _action: actions.CancelStarts) -> None:
        self._held = None
        if self._delayed_start is not None:
            self._delayed_start.cancel()
        self._group.cancel_starts()
        for local_rank in self._streams:
            self._logs.close_child_ends(local_rank)

    def _take_stacks(self, action: actions.CollectStacks) -> None:
        self._stacks.take(self._stack_targets(), lambda texts: self._keep_stacks(action.number, texts))
        # Whatever becomes of the collection, it never keeps a stop from going on.
        self._loop.call_later(_STACKS_LIMIT_S, lambda: self._loop.post(events.StacksCollected(number=action.number)))

    def _keep_stacks(self, number: int, texts: dict[int, str]) -> None:
        if number != self._state.number:
            return
        self._taken = texts
        self._journal.write("stacks_taken", ranks=self._transcript.global_ranks(*texts), since="broken")
        self._loop.post(events.StacksCollected(number=number))

    def _stack_targets(self) -> dict[int, stacks.StackTarget]:
        targets: dict[int, stacks.StackTarget] = {}
        for worker in self._group.live:
            stack_file = self._streams[worker.local_rank].stack_file
            if stack_file is not None:
                targets[worker.local_rank] = stacks.StackTarget(pid=worker.pid, stack_file=stack_file)
        return targets

    def _print_stacks(self) -> None:
        """SIGUSR2: the stacks of all live workers on the console, equal ones once; the workers run on."""

        def say(texts: dict[int, str]) -> None:
            from muster.agent.diagnosis.report_text import format_stacks  # only a request for stacks needs it

            ranked = {self._transcript.global_ranks(local_rank)[0]: text for local_rank, text in texts.items()}
            for line in format_stacks(ranked, missing=len(self._group.live) - len(ranked)):
                self._logs.say(line)

        self._stacks.take(self._stack_targets(), say)

    def _signal_workers(self, action: actions.SignalWorkers) -> None:
        self._group.send(action.signum)

    def _arm_grace(self, _action: actions.StartGracePeriod) -> None:
        self._grace = self._loop.call_later(
            self._config.shutdown_timeout_s, lambda: self._loop.post(events.GraceExpired())
        )

    def _kill_tree(self, _action: actions.KillWorkers) -> None:
        if self._grace is not None:
            self._grace.cancel()
        self._group.sweep(lambda: self._logs.finish_round(self._note_tree_gone))

    def _note_tree_gone(self) -> None:
        self._journal.write("workers_stopped", since="broken")
        self._loop.post(events.WorkersGone())

    def _tell_started(self, action: actions.ReportStarted) -> None:
        self._journal.write(
            "workers_started", ranks=self._transcript.global_ranks(*range(self._config.nproc)), since="formed"
        )
        self._starter.when_ahead(lambda: self._rendezvous.report_started(action.number))

    def _settle_failure(self, action: actions.SettleFailure) -> None:
        self._journal.write(
            "worker_failed",
            ranks=self._transcript.global_ranks(action.failure.local_rank),
            reason=action.failure.reason,
        )
        settled = events.FailureSettled(number=action.number, local_rank=action.failure.local_rank)
        self._after_turns(_SETTLE_TURNS, lambda: self._loop.post(settled))

    def _after_turns(self, turns: int, call: Callable[[], None]) -> None:
        self._loop.call_soon(call if turns <= 1 else lambda: self._after_turns(turns - 1, call))

    def _tell_failed(self, action: actions.ReportFailed) -> None:
        self._rendezvous.report_failures(action.number, (self._collect(action.failure),))

    def _collect(self, failure: LocalFailure) -> Failure:
        formed, local_rank = self._state.round, failure.local_rank
        assert formed is not None  # noqa: S101  # workers only exist in a round
        return self._failures.collect(
            formed, local_rank, self._ends.get(local_rank), self._streams.get(local_rank), failure.reason
        )

    def _tell_idle(self, action: actions.ReportIdle) -> None:
        failures = tuple(
            self._collect(LocalFailure(local_rank=local_rank, reason=action.reason))
            for local_rank in action.local_ranks
        )
        self._journal.write("workers_idle", ranks=self._transcript.global_ranks(*action.local_ranks))
        self._rendezvous.report_idle(action.number, failures)

    def _tell_succeeded(self, action: actions.ReportSucceeded) -> None:
        self._rendezvous.report_succeeded(action.number)

    def _tell_stopped(self, action: actions.ReportStopped) -> None:
        formed = self._state.round
        failures = tuple(map(self._collect, action.late))
        taken = tuple(
            Stack(global_rank=formed.rank_offset + rank, node=formed.group_rank, local_rank=rank, text=text)
            for rank, text in self._taken.items()
            if formed
        )
        self._rendezvous.report_stopped(action.number, failures, taken)

    def _tell_leave(self, action: actions.LeaveJob) -> None:
        self._logs.say(f"{action.reason}: stopping")
        self._rendezvous.report_leaving(action.reason)

    def _finish(self, action: actions.Finish) -> None:
        self._code = outcome.report_outcome(action, self._config, self._logs)


_ACTIONS: dict[type, str] = {
    actions.StartWorkers: "_start_workers",
    actions.ReleaseStarts: "_open_starts",
    actions.CancelStarts: "_cancel_starts",
    actions.CollectStacks: "_take_stacks",
    actions.SignalWorkers: "_signal_workers",
    actions.StartGracePeriod: "_arm_grace",
    actions.KillWorkers: "_kill_tree",
    actions.ReportStarted: "_tell_started",
    actions.SettleFailure: "_settle_failure",
    actions.ReportFailed: "_tell_failed",
    actions.ReportIdle: "_tell_idle",
    actions.ReportSucceeded: "_tell_succeeded",
    actions.ReportStopped: "_tell_stopped",
    actions.LeaveJob: "_tell_leave",
    actions.Finish: "_finish",
}
