"""Writes what happens on the node as records into the event log."""

import os
from collections.abc import Callable

from muster._shared.contract import LogNames, name_signal
from muster._shared.layouts import StatusPageLayout as Layout
from muster.agent.logs import open_own
from muster.agent.node import events
from muster.agent.node.actions import LocalFailure
from muster.agent.rendezvous.interface import (
    DrainBegun,
    DrainCommitted,
    DrainWithdrawn,
    JobEnded,
    Notice,
    RendezvousFailed,
    RequestAnswered,
    RoundBroken,
    RoundFormed,
)
from muster.agent.round import Checkpoint, Round
from muster.agent.runtime.event_log import EventLog, JsonlSink


class TransitionLog:
    """Receives every event before it is decided, and some of what follows."""

    def __init__(
        self,
        log: EventLog,
        find_round: Callable[[], Round | None],
        *,
        submit: Callable[[Callable[[], None]], None],
        on_trouble: Callable[[str], None],
    ) -> None:
        """Connect the log; every record is stamped with the current round.

        Args:
            log: gets the records.
            find_round: returns the current round; None before the first.
            submit: runs a call in the thread that writes the file.
            on_trouble: gets a line about a file that cannot be written.
        """
        self._log = log
        self._log.find_round = find_round
        self._find_round = find_round
        self._submit = submit
        self._on_trouble = on_trouble
        self._has_file = False
        self._idle: tuple[int, ...] = ()
        """The ranks of the last record of idle workers."""

    def open_file(self, run_dir: str | None) -> None:
        """Write the records, including earlier ones, into the run's folder. Only the first call has an effect."""
        if run_dir is None or self._has_file:
            return
        self._has_file = True
        path = os.path.join(run_dir, LogNames.EVENTS)
        self._log.add_sink(JsonlSink(path, self._submit, open_own, self._on_trouble), replay=True)

    def record(self, event: events.Event) -> None:  # noqa: C901  # one line for each event
        """Record one event. Unlisted events are recorded with what follows from them, or not at all."""
        log = self._log
        match event:
            case Notice():
                if event.kind.value:
                    log.write(f"{event.feature}_{event.kind.value}".lstrip("_"), ranks=event.ranks, text=event.text)
            case RoundBroken():
                self._write_break(event)
            case DrainBegun():
                log.mark("drain")
                log.write("drain_begun", drain=event.drain, kind=Layout.KINDS[event.kind], limit_s=event.limit_s)
            case DrainCommitted():
                log.write("drain_committed", drain=event.drain, step=event.step, since="drain")
            case DrainWithdrawn():
                log.write("drain_withdrawn", drain=event.drain, reason=event.reason, since="drain")
            case RequestAnswered():
                log.write("request_answered", outcome=event.answer.outcome.value, text=event.answer.line)
            case RoundFormed():
                log.release()
            case events.TimerExpired():
                if event.timer.purpose is events.TimerPurpose.LINES:
                    log.release()
            case JobEnded():
                log.release()
                reason = "" if event.report is None else event.report.reason
                log.write("job_ended", succeeded=event.succeeded, drained=event.is_drained, reason=reason)
            case RendezvousFailed():
                log.release()
                log.write("rendezvous_lost", reason=event.reason)
            case events.Requested():
                log.write("requested", kind=event.kind.value, limit_s=event.limit_s)
            case events.WorkerExited():
                log.write(
                    "worker_exited", ranks=self._find_ranks(event.round_number, event.local_rank), code=event.code
                )
            case events.StacksCollected():
                log.write("stacks_taken", ranks=self._find_ranks(event.round_number, *event.stacks), since="broken")
            case events.WorkersGone():
                log.write("workers_stopped", since="broken")
            case events.WorkersNotEnded():
                log.write("workers_not_ended", since="broken", pids=event.pids)
            case events.SignalReceived():
                log.mark("broken")
                log.write("signal", name=name_signal(event.signum), guard_died=event.guard_died)
            case _:
                pass

    def _write_break(self, event: RoundBroken) -> None:
        """Record why the round ends. If that may be a consequence, record it once its cause is known."""
        log, current = self._log, self._find_round()
        if log.is_holding:
            log.release(kind=event.kind.value, reason=event.reason, cause=event.cause)
        elif not event.explains:
            log.mark("broken")
            if event.is_provisional and current is not None and current.number == event.round_number:
                log.hold()
            log.write(
                "round_broken",
                kind=event.kind.value,
                reason=event.reason,
                hang=event.is_hang,
                joined=event.is_join,
                left=event.is_leave,
                cause=event.cause,
            )

    def _find_ranks(self, number: int, *local_ranks: int) -> tuple[int, ...]:
        """Return the global ranks in the current round; empty for another round."""
        current = self._find_round()
        if current is None or current.number != number:
            return ()
        return _list_ranks(current, *local_ranks)

    def write_round(self, formed: Round) -> None:
        """Record that the node takes part in this round from now on."""
        self._idle = ()
        self._log.write(
            "round_formed",
            world_size=formed.world_size,
            nodes=formed.group_world_size,
            master=f"{formed.master_addr}:{formed.master_port}",
            restarts_left=formed.restarts_left,
            rank_offset=formed.rank_offset,
            role_rank_offset=formed.role_rank_offset,
            role_world_size=formed.role_world_size,
            snapshot_step=formed.continued_step,
        )
        self._log.mark("formed")

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Record that all ranks of the job have saved a checkpoint."""
        self._log.write("checkpoint_completed", step=checkpoint.step, path=checkpoint.path)

    def write_started(self, started: Round, nproc: int, kept: int) -> None:
        """Record that all workers of the round run, of which so many ran before."""
        self._log.write("workers_started", ranks=_list_ranks(started, *range(nproc)), since="formed", kept=kept)

    def write_failure(self, current: Round, failure: LocalFailure) -> None:
        """Record that a worker has failed."""
        self._log.write("worker_failed", ranks=_list_ranks(current, failure.local_rank), reason=failure.reason)

    def write_idle(self, current: Round, local_ranks: tuple[int, ...]) -> None:
        """Record which workers are idle, or none if they are active again. What is known already makes no record."""
        ranks = _list_ranks(current, *local_ranks)
        if ranks != self._idle:
            self._idle = ranks
            self._log.write("workers_idle", ranks=ranks)

    def write_fencing(self) -> None:
        """Record that the guard has killed the workers."""
        self._log.mark("broken")
        self._log.write("fenced")


def _list_ranks(current: Round, *local_ranks: int) -> tuple[int, ...]:
    return tuple(current.rank_offset + local_rank for local_rank in local_ranks)
