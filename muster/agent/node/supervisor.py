"""Runs the node: the only module that acts.

Rendezvous, the reaper, timers and signals post events on the loop's queue. `decisions` returns the actions that follow;
the methods below carry them out, one per action (over 400 lines for that reason). Every transition writes one record to
the event log.
"""

import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from muster._guard import GuardLease
from muster._processes import LINUX, become_subreaper
from muster.agent.config import AgentConfig
from muster.agent.diagnosis.oom import OomWatch
from muster.agent.errors import SpawnError
from muster.agent.logs import LogRouter, WorkerStreams
from muster.agent.node import actions, events
from muster.agent.node.actions import LocalFailure
from muster.agent.node.decisions import decide
from muster.agent.node.state import NodeState
from muster.agent.node.transition_log import TransitionLog
from muster.agent.rendezvous.backends.selection import create_rendezvous
from muster.agent.rendezvous.interface import BreakKind, JobEnded, Notice, RoundBroken
from muster.agent.round import Round
from muster.agent.runtime.event_log import EventLog
from muster.agent.runtime.loop import Loop, Timer
from muster.agent.runtime.signals import ChildWatch, SignalWatch
from muster.agent.workers.environment import build_worker_env, substitute_macros
from muster.agent.workers.pool import LiveWorker, WorkerEnd, WorkerPool
from muster.agent.workers.spec import WorkerSpec, WorkerStarter

if TYPE_CHECKING:  # loaded when first needed: every import delays the first worker
    from muster.agent.diagnosis.failures import FailureCollector
    from muster.agent.diagnosis.hang import Activity, HangWatch
    from muster.agent.diagnosis.report import Failure, Stack
    from muster.agent.diagnosis.stacks import StackCollector
    from muster.agent.placement.affinity import WorkerPlacement

_SETTLE_TURNS = 2
"""Turns of the loop between a worker's end and its failure record: its last output is in the pipes by then."""

_STACKS_MARGIN_S = 0.5
"""A stop waits at most this much longer for stacks than their collection may take."""

HOLD_S = 5.0
"""The longest that workers wait for global rank 0: its node may have more to import, but a program may need no process
group."""


class Supervisor:
    """One agent, from the first signal handler to the exit code. Call `run` once."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        loop: Loop,
        lease: GuardLease,
        logs: LogRouter,
        event_log: EventLog,
        children: ChildWatch,
        starter: WorkerStarter,
        placements: "tuple[WorkerPlacement, ...]",
    ) -> None:
        """Connect the parts; nothing is started yet.

        Args:
            config: the agent's.
            loop: the queue and the clock.
            lease: the guard's fencing lease.
            logs: receives the workers' output; closed by `run`.
            event_log: receives the records; closed by `run`.
            children: tells the ends of the workers; closed by `run`.
            starter: how workers are started; closed by `run`.
            placements: length nproc, indexed by local rank; empty: workers run where the agent may.
        """
        self._config = config
        self._guard_pid = os.getppid()
        self._loop = loop
        self._lease = lease
        self._logs = logs
        self._event_log = event_log
        self._transition_log = TransitionLog(event_log, logs.print_line, logs.report_incomplete_logs)
        self._placements = placements
        self._children = children
        self._starter = starter
        self._pool = WorkerPool(
            loop,
            children,
            starter,
            on_started=self._on_worker_started,
            on_spawn_failed=self._on_spawn_failed,
            on_ended=self._on_worker_ended,
            report_workers=None if LINUX else lease.record_workers,
        )
        self._rendezvous = create_rendezvous(
            config.rendezvous, config.nproc, config.role, loop, lease, config.node_name
        )
        self._oom = OomWatch()
        self._failures: FailureCollector | None = None
        self._stacks: StackCollector | None = None
        self._hang = self._watch_for_hangs()
        self._state = NodeState(nproc=config.nproc)
        self._streams: dict[int, WorkerStreams] = {}
        self._ends: dict[int, WorkerEnd] = {}
        self._stack_texts: dict[int, str] = {}
        self._grace_timer: Timer | None = None
        self._delayed_start: Timer | None = None
        self._held_round: Round | None = None
        self._is_prepared = False
        self._code: int | None = None
        self._job_failed_s: float | None = None

    def _watch_for_hangs(self) -> "HangWatch | None":
        if self._config.hang_timeout_s is None:
            return None
        from muster.agent.diagnosis.hang import HangWatch

        return HangWatch(
            self._loop, limit_s=self._config.hang_timeout_s, read=self._read_activity, on_idle=self._on_idle
        )

    def _read_activity(self) -> "dict[int, Activity]":
        from muster.agent.diagnosis import hang

        live = self._pool.live
        processes = hang.read_sessions({worker.pid: self._streams[worker.local_rank].stack_file for worker in live})
        return {
            worker.local_rank: hang.Activity(
                captured_bytes=self._logs.count_captured_bytes(worker.local_rank), processes=processes[worker.pid]
            )
            for worker in live
        }

    # -- running ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Take part in the job until it has ended; the exit code. Leaves no process of the workers behind."""
        become_subreaper()
        signals = SignalWatch(
            self._loop,
            self._children,
            handled=self._config.signals_to_handle,
            on_signal=self._on_signal,
            on_stacks=self._print_stacks,
        )
        if self._lease.guard_fd is not None:
            self._loop.watch_readable(self._lease.guard_fd, self._on_guard_gone)
        try:
            self._event_log.write("agent_started", pid=os.getpid(), start=self._config.start)
            self._starter.prepare(self._on_prepared)
            self._rendezvous.join(is_prepared=self._is_prepared)
            while self._code is None:
                self._loop.turn()
                while self._code is None and (event := self._loop.pop_event()) is not None:
                    self._handle_event(event)
            self._event_log.write("agent_ended", exit_code=int(self._code))
            return self._code
        finally:
            self._close()
            signals.close()
            self._children.close()
            if self._job_failed_s is not None:
                from muster.agent.node import outcome

                outcome.wait_for_common_exit(self._config, self._job_failed_s)

    def _handle_event(self, event: Any) -> None:
        self._transition_log.record(event)
        if isinstance(event, Notice):
            return
        if isinstance(event, JobEnded) and not event.succeeded:
            self._job_failed_s = self._loop.clock.now_s()
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
        self._pool.close()
        self._logs.close()
        self._event_log.close()

    # -- callbacks that post events ---------------------------------------------------------------------------------

    def _on_prepared(self) -> None:
        self._is_prepared = True
        self._rendezvous.report_prepared()

    def _on_worker_started(self, worker: LiveWorker) -> None:
        self._logs.close_child_ends(worker.local_rank)
        self._loop.post(events.WorkerStarted(number=worker.number, local_rank=worker.local_rank))

    def _on_spawn_failed(self, number: int, local_rank: int, reason: str) -> None:
        # When descriptors run out, the imports for the failure's description need one of these.
        self._logs.close_child_ends(local_rank)
        self._loop.post(events.SpawnFailed(number=number, local_rank=local_rank, reason=reason))

    def _on_worker_ended(self, end: WorkerEnd) -> None:
        if end.code == -signal.SIGKILL and self._lease.pop_fenced():
            self._loop.post(events.Fenced())
        self._ends[end.worker.local_rank] = end
        self._loop.post(events.WorkerExited(number=end.worker.number, local_rank=end.worker.local_rank, code=end.code))

    def _on_signal(self, signum: int) -> None:
        self._loop.post(events.SignalReceived(signum=signum, guard_died=os.getppid() != self._guard_pid))

    def _on_guard_gone(self) -> None:
        if self._lease.guard_fd is not None:
            self._loop.unwatch(self._lease.guard_fd)
        self._loop.post(events.SignalReceived(signum=signal.SIGTERM, guard_died=True))

    def _on_idle(self, reason: str | None) -> None:
        if reason is None:
            self._loop.post(events.WorkersIdle(number=self._state.number))
            return
        ranks = tuple(sorted(worker.local_rank for worker in self._pool.live))
        self._loop.post(events.WorkersIdle(number=self._state.number, local_ranks=ranks, reason=reason))

    # -- actions ----------------------------------------------------------------------------------------------------

    def _start_workers(self, action: actions.StartWorkers) -> None:
        self._ends.clear()
        self._stack_texts = {}
        longest_s = self._config.longest_backoff_s(action.round.attempt)
        if action.is_held:  # the node of global rank 0 backs off for all
            self._held_round = action.round
            delay_s = longest_s + HOLD_S
        elif longest_s > 0.0:
            delay_s = self._draw_backoff_s(longest_s)
            self._logs.print_line(f"waiting {delay_s:.1f} s before attempt {action.round.attempt} (--restart-backoff)")
        else:
            self._start_now(action.round)
            return
        self._delayed_start = self._loop.call_later(delay_s, lambda: self._start_now(action.round))

    def _release_starts(self, _action: actions.ReleaseStarts) -> None:
        if self._held_round is not None:
            if self._delayed_start is not None:
                self._delayed_start.cancel()
            self._start_now(self._held_round)

    @staticmethod
    def _draw_backoff_s(longest_s: float) -> float:
        """With jitter, so that jobs that failed together do not restart together."""
        import random  # only a job that fails again and again needs it

        return longest_s * random.uniform(0.5, 1.0)  # noqa: S311  # no secret

    def _start_now(self, formed: Round) -> None:
        self._held_round = None
        self._logs.open_round(formed)
        self._transition_log.open_file(self._logs.run_dir)
        self._oom.reset()
        if self._hang is not None:
            self._hang.reset()
        local_rank = 0
        specs: list[WorkerSpec] = []
        try:
            for local_rank in range(self._config.nproc):
                specs.append(self._build_spec(formed, local_rank))
        except SpawnError as error:  # no descriptors left for its output
            for opened in self._streams:
                self._logs.close_child_ends(opened)
            self._on_spawn_failed(formed.number, local_rank, str(error))
            return
        self._pool.start(formed.number, specs)

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
        self._held_round = None
        if self._delayed_start is not None:
            self._delayed_start.cancel()
        self._pool.cancel_starts()
        for local_rank in self._streams:
            self._logs.close_child_ends(local_rank)

    def _collect_stacks(self, action: actions.CollectStacks) -> None:
        from muster.agent.diagnosis.stacks import LIMIT_S

        self._request_stacks(lambda texts: self._on_stacks_collected(action.number, texts))
        # However the collection ends, the stop continues.
        self._loop.call_later(
            LIMIT_S + _STACKS_MARGIN_S, lambda: self._loop.post(events.StacksCollected(number=action.number))
        )

    def _on_stacks_collected(self, number: int, texts: dict[int, str]) -> None:
        if number != self._state.number:
            return
        self._stack_texts = texts
        self._event_log.write("stacks_taken", ranks=self._transition_log.global_ranks(*texts), since="broken")
        self._loop.post(events.StacksCollected(number=number))

    def _request_stacks(self, on_done: Callable[[dict[int, str]], None]) -> None:
        from muster.agent.diagnosis.stacks import StackCollector, StackTarget  # only a request for stacks needs it

        targets: dict[int, StackTarget] = {}
        for worker in self._pool.live:
            stack_file = self._streams[worker.local_rank].stack_file
            if stack_file is not None:
                targets[worker.local_rank] = StackTarget(pid=worker.pid, stack_file=stack_file)
        if self._stacks is None:  # one for all requests: overlapping ones share dumps
            self._stacks = StackCollector(self._loop)
        self._stacks.collect(targets, on_done)

    def _print_stacks(self) -> None:
        """SIGUSR2: print the stacks of all live workers on the console, equal ones once. The workers keep running."""

        def print_stacks(texts: dict[int, str]) -> None:
            from muster.agent.diagnosis.report_text import format_stacks  # only a request for stacks needs it

            ranked = {self._transition_log.global_ranks(local_rank)[0]: text for local_rank, text in texts.items()}
            for line in format_stacks(ranked, missing=len(self._pool.live) - len(ranked)):
                self._logs.print_line(line)

        self._request_stacks(print_stacks)

    def _signal_workers(self, action: actions.SignalWorkers) -> None:
        self._pool.send(action.signum)

    def _start_grace_period(self, _action: actions.StartGracePeriod) -> None:
        self._grace_timer = self._loop.call_later(
            self._config.shutdown_timeout_s, lambda: self._loop.post(events.GraceExpired())
        )

    def _kill_workers(self, _action: actions.KillWorkers) -> None:
        if self._grace_timer is not None:
            self._grace_timer.cancel()
        self._pool.sweep(lambda: self._logs.finish_round(self._on_workers_gone))

    def _on_workers_gone(self) -> None:
        self._event_log.write("workers_stopped", since="broken")
        self._loop.post(events.WorkersGone())

    def _report_started(self, action: actions.ReportStarted) -> None:
        self._event_log.write(
            "workers_started", ranks=self._transition_log.global_ranks(*range(self._config.nproc)), since="formed"
        )
        self._starter.run_after_head_start(lambda: self._rendezvous.report_started(action.number))

    def _settle_failure(self, action: actions.SettleFailure) -> None:
        self._event_log.write(
            "worker_failed",
            ranks=self._transition_log.global_ranks(action.failure.local_rank),
            reason=action.failure.reason,
        )
        settled = events.FailureSettled(number=action.number, local_rank=action.failure.local_rank)
        self._after_turns(_SETTLE_TURNS, lambda: self._loop.post(settled))

    def _after_turns(self, turns: int, call: Callable[[], None]) -> None:
        self._loop.call_soon(call if turns <= 1 else lambda: self._after_turns(turns - 1, call))

    def _report_failed(self, action: actions.ReportFailed) -> None:
        self._rendezvous.report_failures(action.number, (self._collect_failure(action.failure),))

    def _collect_failure(self, failure: LocalFailure, *, hung_pid: int | None = None) -> "Failure":
        formed, local_rank = self._state.round, failure.local_rank
        assert formed is not None  # noqa: S101  # workers only exist in a round
        if self._failures is None:
            from muster.agent.diagnosis.failures import FailureCollector  # only a failure needs it

            self._failures = FailureCollector(
                host=self._config.node_name, clock=self._loop.clock, logs=self._logs, oom=self._oom
            )
        return self._failures.collect(
            formed,
            local_rank,
            self._ends.get(local_rank),
            self._streams.get(local_rank),
            failure.reason,
            hung_pid=hung_pid,
        )

    def _report_idle(self, action: actions.ReportIdle) -> None:
        pids = {worker.local_rank: worker.pid for worker in self._pool.live}
        failures = tuple(
            self._collect_failure(LocalFailure(local_rank=local_rank, reason=action.reason), hung_pid=pids[local_rank])
            for local_rank in action.local_ranks
            if local_rank in pids
        )
        self._event_log.write("workers_idle", ranks=self._transition_log.global_ranks(*action.local_ranks))
        self._rendezvous.report_idle(action.number, failures)

    def _report_succeeded(self, action: actions.ReportSucceeded) -> None:
        self._rendezvous.report_succeeded(action.number)

    def _report_stopped(self, action: actions.ReportStopped) -> None:
        formed = self._state.round
        failures = tuple(map(self._collect_failure, action.late))
        self._rendezvous.report_stopped(
            action.number, failures, self._build_stacks(formed) if formed and self._stack_texts else ()
        )

    def _build_stacks(self, formed: Round) -> "tuple[Stack, ...]":
        from muster.agent.diagnosis.report import Stack

        return tuple(
            Stack(global_rank=formed.rank_offset + rank, node=formed.group_rank, local_rank=rank, text=text)
            for rank, text in self._stack_texts.items()
        )

    def _leave_job(self, action: actions.LeaveJob) -> None:
        self._logs.print_line(f"{action.reason}: stopping")
        self._rendezvous.report_leaving(action.reason)

    def _finish(self, action: actions.Finish) -> None:
        from muster.agent.node import outcome

        self._code = outcome.report_outcome(action, self._config, self._logs)


_ACTIONS: dict[type, str] = {
    actions.StartWorkers: "_start_workers",
    actions.ReleaseStarts: "_release_starts",
    actions.CancelStarts: "_cancel_starts",
    actions.CollectStacks: "_collect_stacks",
    actions.SignalWorkers: "_signal_workers",
    actions.StartGracePeriod: "_start_grace_period",
    actions.KillWorkers: "_kill_workers",
    actions.ReportStarted: "_report_started",
    actions.SettleFailure: "_settle_failure",
    actions.ReportFailed: "_report_failed",
    actions.ReportIdle: "_report_idle",
    actions.ReportSucceeded: "_report_succeeded",
    actions.ReportStopped: "_report_stopped",
    actions.LeaveJob: "_leave_job",
    actions.Finish: "_finish",
}
