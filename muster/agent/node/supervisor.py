"""Runs the node: passes events to `decisions` and carries out the actions that follow. It decides nothing.

Rendezvous, `ChildWatch`, timers and signals post events on the node's queue. Between two turns of the loop all are
decided, in order. `round_workers` acts on workers, and `evidence` reads about them; this module does all the rest.
Every transition writes one record to the event log.
"""

import os
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from muster._shared.contract import ExitCode
from muster._shared.processes import become_subreaper, find_nvml
from muster._shared.records import assert_never
from muster.agent.config import AgentConfig
from muster.agent.node import actions, events
from muster.agent.node.actions import LocalFailure
from muster.agent.node.decisions import decide
from muster.agent.node.round_workers import AgentParts, RoundWorkers
from muster.agent.node.state import NodeRules, NodeState
from muster.agent.node.transition_log import TransitionLog
from muster.agent.rendezvous.interface import (
    AllStarted,
    DrainAsked,
    Leaving,
    PlainNodeMessage,
)
from muster.agent.runtime.signals import SignalWatch

if TYPE_CHECKING:  # imports delay the first worker
    from muster._shared.contract import AskKind
    from muster._shared.reports import Failure, Stack
    from muster.agent.control import ControlServer
    from muster.agent.control.question import TerminalQuestion
    from muster.agent.node.evidence import Evidence
    from muster.agent.round import Checkpoint, Round
    from muster.agent.telemetry import Telemetry
    from muster.agent.telemetry.devices import Devices

_LOAD_EVIDENCE_AFTER_S = 1.0
"""How long after the start of a round evidence is loaded, when its workers probably do not load their own modules any
more."""
_HANDLE = "TORCHX_JOB_ID"
"""The variable in which TorchX puts the app's handle."""
_NOTICE_S = 60.0
"""How long an agent that was not stopped waits to say that output was lost, because what reads it stands still."""
_SETTLE_TURNS = 2
"""Turns of the loop between a worker's end and its failure record. By then its last output is in the pipes."""


class Supervisor:
    """One agent, from the first signal handler to the exit code. Call `run` once."""

    def __init__(self, config: AgentConfig, parts: AgentParts) -> None:
        """Connect the parts without starting anything."""
        self._config = config
        self._guard_pid = os.getppid()
        self._loop = parts.loop
        self._lease = parts.lease
        self._logs = parts.logs
        self._children = parts.children
        self._event_log = parts.event_log
        self._transition_log = TransitionLog(
            parts.event_log,
            lambda: self._state.round,
            submit=parts.logs.files.thread.submit,
            on_trouble=parts.logs.report_incomplete_logs,
        )
        self._events: deque[events.Event] = deque()
        self._workers = RoundWorkers(
            config,
            parts,
            self._events.append,
            lambda: self._rendezvous,
        )
        self._rendezvous = parts.connect(self._events.append)
        self._evidence: Evidence | None = None
        self._control: ControlServer | None = None
        self._question: TerminalQuestion | None = None
        self._telemetry: Telemetry | None = None
        self._state = NodeState(rules=_build_rules(config))
        self._code: int | None = None
        self._job_failed_s: float | None = None
        self._prints_report = False
        self._witnesses = parts.witnesses
        self._has_checkpoint = config.rendezvous.checkpoint is not None

    # -- running ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Take part in the job until it has ended; return the exit code. No process of the workers is left behind."""
        become_subreaper()
        signals = SignalWatch(
            self._loop,
            self._children,
            handled=[*self._config.signals_to_handle, *filter(None, (self._config.preempt_signal,))],
            on_signal=self._on_signal,
            on_stacks=lambda: self._events.append(events.StacksRequested()),
        )
        try:
            self._event_log.write(
                "agent_started",
                pid=os.getpid(),
                start=self._config.start,
                host=self._config.node_name,
                node_index=self._config.rendezvous.node_index,
                slurm_job=self._config.slurm_job,
            )
            self._workers.prepare()
            if self._config.asks_at_interrupt and not os.isatty(0):
                self._logs.print_line("--interrupt-action ask: standard input is not a terminal; Ctrl-C stops the job")
            code = self._handle_events()
            while code is None:
                self._loop.turn()
                code = self._handle_events()
            self._event_log.write("agent_ended", exit_code=int(code))
            return code
        finally:
            self._close()
            signals.close()
            self._children.close()
            if self._job_failed_s is not None:
                from muster.agent.node import outcome

                outcome.wait_for_exit(self._config, self._job_failed_s, prints_report=self._prints_report)

    def _handle_events(self) -> int | None:
        """Decide all queued events in order; return the exit code once the agent is done."""
        while self._code is None and self._events:
            event = self._events.popleft()
            self._transition_log.record(event)
            for witness in self._witnesses:
                witness.read(event, self._state.round)
            self._state, decided = decide(self._state, event)
            for action in decided:
                self._act(action)
        return self._code

    def _on_signal(self, signum: int) -> None:
        received = events.SignalReceived(
            signum=signum,
            guard_died=os.getppid() != self._guard_pid,
            is_asked=self._workers.is_asked(),
            at_s=self._loop.clock.now_s(),
            foreground=self._workers.foreground,
            still_s=self._workers.parts.still_s,
            is_at_terminal=os.isatty(0),
        )
        self._events.append(received)

    def _post_request(self, request: int, kind: "AskKind", limit_s: float) -> None:
        self._events.append(events.Requested(request=request, kind=kind, limit_s=limit_s))

    def _close(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._question is not None:
            self._question.close()
        self._rendezvous.close()
        self._wait_for_witnesses()
        self._workers.close()
        self._event_log.close()
        has_time = self._code is not None and self._code <= ExitCode.of_signal(0)
        self._logs.close(notice_s=_NOTICE_S if has_time else 1.0)

    def _wait_for_stopping_nodes(self) -> None:
        """Keep leading while other nodes stop their workers. Without a leader, these workers would be killed.

        They may still save, and their nodes may be stopped, too. The wait takes at most the grace period. Ctrl-C and
        the guard's death end it.
        """
        self._loop.turn(0.0)  # delivers this node's `Leaving`
        until_s = self._loop.clock.now_s() + self._config.shutdown_timeout_s
        while self._leads_stopping_nodes() and (left_s := until_s - self._loop.clock.now_s()) > 0:
            self._loop.turn(left_s)
            signals = [each for each in self._events if isinstance(each, events.SignalReceived)]
            if any(each.guard_died or each.signum == signal.SIGINT for each in signals):
                return
            self._events.clear()

    def _leads_stopping_nodes(self) -> bool:
        found = self._rendezvous.read_members()
        return found is not None and any(each.is_stopping and not each.is_leader for each in found.members)

    def _wait_for_witnesses(self) -> None:
        """Wait for what reports the end, which has its limit. A signal leaves it the grace period; Ctrl-C ends it."""
        while self._code is not None and any(witness.is_busy for witness in self._witnesses):
            self._loop.turn()
            for event in self._events:
                if isinstance(event, events.SignalReceived):
                    limit_s = 0.0 if event.signum == signal.SIGINT else self._config.shutdown_timeout_s
                    for witness in self._witnesses:
                        witness.shorten(limit_s)
            self._events.clear()

    # -- actions ----------------------------------------------------------------------------------------------------

    def _act(self, action: actions.Action) -> None:
        if isinstance(action, actions.WorkerAction):
            self._workers.act(action)
        elif isinstance(action, actions.DiagnosisAction):
            self._diagnose(action)
        elif isinstance(action, actions.RendezvousAction):
            self._report(action)
        else:
            self._act_alone(action)

    def _diagnose(self, action: actions.DiagnosisAction) -> None:
        match action:
            case actions.SettleFailure():
                self._settle_failure(action)
            case actions.CollectStacks():
                number = action.round.number
                self._read_evidence().collect_stacks(
                    action.round,
                    lambda stacks: self._events.append(events.StacksCollected(round_number=number, stacks=stacks)),
                    is_hang=action.is_hang,
                )
            case actions.PrintStacks():
                self._read_evidence().print_stacks(action.round)
            case actions.PrintPage():
                self._read_evidence().print_page(action.round, action.stacks)
            case actions.SendStacks():
                self._read_evidence().send_stacks(action.round, action.number, self._rendezvous)
            case _:
                assert_never(action)

    def _load_evidence(self) -> None:
        """Load each part in a turn of its own: on a busy machine one takes a second, and heartbeats wait for it."""
        for turns, load in enumerate((self._open_control, self._load_diagnosis, self._begin_telemetry), 1):
            self._after_turns(turns, partial(self._load_part, load))

    def _load_part(self, load: Callable[[], None]) -> None:
        if self._code is None:
            with suppress(OSError, ImportError):  # no descriptors left: keep the workers
                load()

    def _load_diagnosis(self) -> None:
        self._read_evidence().skip_kernel_log()

    def _begin_telemetry(self) -> None:
        if self._telemetry is not None:
            return
        from muster.agent.telemetry import StatusFile, Telemetry

        run_dir = self._logs.run_dir
        self._telemetry = Telemetry(
            self._loop,
            self._workers,
            self._rendezvous,
            nproc=self._config.nproc,
            host=self._config.node_name,
            run_id=self._config.rendezvous.run_id,
            devices=self._find_devices(),
            status_file=None if run_dir is None else StatusFile(run_dir, self._logs.files.thread.submit),
            on_status=self._event_log.tell_status,
            on_look=self._event_log.on_look,
            on_trouble=self._logs.print_line,
        )
        self._telemetry.watch(self._event_log)

    def _find_devices(self) -> "Devices | None":
        """Return what reads the node's GPUs; load nothing for it if there is no driver."""
        nproc, env = self._config.nproc, self._config.base_env
        library = find_nvml(env)
        if library is None:
            return None
        from muster.agent.telemetry.devices import Devices

        return Devices(nproc, env.get("CUDA_VISIBLE_DEVICES"), library)

    def _open_control(self) -> None:
        """Accept requests of people from now on, unless the job has no token because no adapter has started it."""
        token = self._config.rendezvous.token
        if self._control is None and token is not None:
            from muster.agent.control import ControlServer

            self._control = ControlServer(self._loop, token, self._post_request)

    def _read_evidence(self) -> "Evidence":
        if self._evidence is None:
            from muster.agent.node.evidence import Evidence

            self._evidence = Evidence(self._config, self._loop, self._logs, self._workers)
        return self._evidence

    def _settle_failure(self, action: actions.SettleFailure) -> None:
        failure = action.failure
        self._transition_log.write_failure(action.round, failure)
        settled = events.FailureSettled(round_number=action.round.number, local_rank=failure.local_rank)
        self._after_turns(_SETTLE_TURNS, lambda: self._events.append(settled))

    def _after_turns(self, turns: int, call: Callable[[], None]) -> None:
        self._loop.call_soon(call if turns <= 1 else lambda: self._after_turns(turns - 1, call))

    def _report(self, action: actions.RendezvousAction) -> None:
        rendezvous = self._rendezvous
        match action:
            case actions.JoinJob():
                rendezvous.join(
                    is_prepared=action.is_prepared,
                    can_host_store=self._workers.can_host_store,
                    list_offers=self._workers.parts.list_offers,
                    on_stream=self._workers.parts.take_stream,
                )
            case actions.Send():
                self._note_sending(action.message)
                rendezvous.send(action.message)
            case actions.ReportFailed():
                self._report_failed(action)
            case actions.ReportIdle():
                self._report_idle(action)
            case actions.ReportStopped():
                self._report_stopped(action)
            case _:
                assert_never(action)

    def _note_sending(self, message: PlainNodeMessage) -> None:
        if isinstance(message, AllStarted) and self._state.round is not None:
            kept = self._workers.kept_count
            self._transition_log.write_started(self._state.round, self._config.nproc, kept)
            if kept:
                from muster._shared.reports import describe_replaced

                where = " of this node" if self._state.round.group_world_size > 1 else ""
                self._logs.print_line(describe_replaced(self._config.nproc - kept, self._config.nproc, where))
            # Loading it takes 6 ms, which would delay a recovery.
            self._loop.call_later(_LOAD_EVIDENCE_AFTER_S, self._load_evidence)
        elif isinstance(message, DrainAsked | Leaving):
            self._logs.mute_notices()

    def _report_failed(self, action: actions.ReportFailed) -> None:
        from muster.agent.rendezvous.report_messages import Failed

        failures = self._collect_failures(action.round, (action.failure,))
        has_stepped = self._workers.has_stepped(action.round.number)
        self._rendezvous.send(Failed(round_number=action.round.number, failures=failures, has_stepped=has_stepped))

    def _report_idle(self, action: actions.ReportIdle) -> None:
        from muster.agent.rendezvous.report_messages import Idle

        self._transition_log.write_idle(action.round, action.local_ranks)
        failures = self._collect_idle(action)
        self._rendezvous.send(Idle(round_number=action.round.number, failures=failures, is_urgent=action.is_urgent))

    def _collect_failures(self, round: "Round", failures: tuple[LocalFailure, ...]) -> "tuple[Failure, ...]":  # noqa: A002
        return self._read_evidence().collect_failures(round, failures) if failures else ()

    def _collect_idle(self, action: actions.ReportIdle) -> "tuple[Failure, ...]":
        if not action.local_ranks:
            return ()
        return self._read_evidence().collect_idle(action.round, action.local_ranks, action.reason)

    def _report_stopped(self, action: actions.ReportStopped) -> None:
        if self._config.rendezvous.lends_endpoint:
            self._workers.end_store()  # the leader listens there again
        from muster.agent.rendezvous.report_messages import Stopped

        failures = self._collect_failures(action.round, action.late)
        stacks: tuple[Stack, ...] = ()
        if action.stacks or self._workers.early_exits:
            from muster.agent.node.evidence import build_stacks

            stacks = (*build_stacks(action.round, action.stacks), *self._read_evidence().list_ended(action.round))
        has_stepped = self._workers.has_stepped(action.round.number)
        self._rendezvous.send(
            Stopped(round_number=action.round.number, failures=failures, stacks=stacks, has_stepped=has_stepped)
        )
        if has_stepped:  # within a second: the next round has another page
            self._begin_telemetry()

    def _act_alone(self, action: actions.AgentAction) -> None:  # noqa: C901  # one case for each
        match action:
            case actions.StartTimer():
                expired = events.TimerExpired(timer=action.timer)
                self._loop.call_later(action.delay_s, lambda: self._events.append(expired))
            case actions.BeginRound():
                self._workers.begin_round(action.round)
                self._logs.open_round(action.round)
                self._transition_log.open_file(self._logs.run_dir)
                self._transition_log.write_round(action.round)
            case actions.RecordFencing():
                self._transition_log.write_fencing()
            case actions.KeepCheckpoint():
                self._keep_checkpoint(action.checkpoint)
            case actions.PrintLine():
                self._logs.print_line(action.text)
            case actions.AnswerPerson():
                if self._control is not None:
                    self._control.answer(action.requests, action.answer)
            case actions.AskPerson():
                self._ask_person()
            case actions.EndQuestion():
                if self._question is not None:
                    self._question.close()
            case actions.RecordJobFailure():
                self._job_failed_s = self._loop.clock.now_s()
            case actions.Finish():
                from muster.agent.node import outcome

                if action.ended is None and action.rendezvous_failed is None and not action.at_once:
                    self._wait_for_stopping_nodes()
                if action.ended is not None and action.ended.succeeded and self._logs.run_dir is not None:
                    self._remove_checkpoint(self._logs.run_dir)
                self._prints_report = action.ended is not None and action.ended.prints_report
                if self._state.round is not None and self._workers.has_stepped(self._state.round.number):
                    self._begin_telemetry()
                if self._telemetry is not None:
                    # the summary has the last step
                    self._telemetry.look(is_stopped=action.code > ExitCode.of_signal(0))
                self._code = outcome.report_outcome(
                    action, self._config, self._logs, self._event_log.times, self._state.round
                )
                for witness in self._witnesses:
                    witness.read_end(action, self._state.round, self._event_log.times)
            case _:
                assert_never(action)

    def _ask_person(self) -> None:
        if self._question is None:
            from muster.agent.control.question import TerminalQuestion

            self._question = TerminalQuestion(self._loop, self._logs, self._on_typed)
        self._question.ask()

    def _on_typed(self, typed: str | None) -> None:
        from muster.agent.node.request_decisions import parse_choice

        self._events.append(events.PersonChose(choice=parse_choice(typed)))

    def _keep_checkpoint(self, checkpoint: "Checkpoint") -> None:
        from muster.agent import checkpoint_file

        self._has_checkpoint = True
        self._transition_log.write_checkpoint(checkpoint)
        run_dir, logs = self._logs.run_dir, self._logs
        if run_dir is not None:
            on_error = logs.report_incomplete_logs
            logs.files.thread.submit(lambda: checkpoint_file.write(run_dir, checkpoint, on_error))

    def _remove_checkpoint(self, run_dir: str) -> None:
        """Remove the checkpoint of a job that succeeded, so that no other job with its run id resumes from it."""
        if self._has_checkpoint:
            from muster.agent import checkpoint_file

            self._logs.files.thread.submit(lambda: checkpoint_file.remove(run_dir))


def _build_rules(config: AgentConfig) -> NodeRules:
    handle = config.base_env.get(_HANDLE) if config.rendezvous.token is not None else None
    share = 1.0
    if config.restart_backoff_s > 0.0:
        import random

        share = random.uniform(0.5, 1.0)  # noqa: S311  # no secret
    return NodeRules(
        nproc=config.nproc,
        shutdown_timeout_s=config.shutdown_timeout_s,
        stops_together=config.stops_together,
        node_index=config.rendezvous.node_index,
        drain_limit_s=config.drain_limit_s,
        preempt_signals=frozenset(signal.Signals[name] for name in ("SIGTERM", config.preempt_signal) if name),
        stacks_command=f"muster stacks {handle}" if handle else f"kill -USR2 {os.getpid()}",
        stop_command=f"muster stop {handle}" if handle else "",
        asks_at_interrupt=config.asks_at_interrupt,
        sigterm_senders=config.sigterm_senders,
        is_elastic=config.rendezvous.min_nodes < config.rendezvous.max_nodes,
        restart_backoff_s=config.restart_backoff_s,
        # A program of functions prints its own output, and torch's API prints no thread counts.
        omp_num_threads=config.omp_num_threads if config.control_fd is None else None,
        loss=config.loss,
        backoff_share=share,
    )
