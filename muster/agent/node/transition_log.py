"""Writes each event of the supervisor as a record into the event log, and the notable ones as lines on the console."""

import os
import signal
from collections.abc import Callable
from typing import Any

from muster._contract import LogNames
from muster.agent.node import events
from muster.agent.rendezvous.interface import BreakKind, JobEnded, Notice, RendezvousFailed, RoundBroken, RoundFormed
from muster.agent.runtime.event_log import EventLog, JsonlSink

_FENCED_LINE = "this node lost contact with the job: its workers were killed, because other nodes may replace them"


class TransitionLog:
    """Receives every event before `decide` does."""

    def __init__(self, log: EventLog, print_line: Callable[[str], None], on_trouble: Callable[[str], None]) -> None:
        """`print_line` prints one line on the console; `on_trouble` gets a line about a file that cannot be written."""
        self.event_log = log
        self._print_line = print_line
        self._on_trouble = on_trouble
        self._offset = 0
        self._has_file = False

    def open_file(self, run_dir: str | None) -> None:
        """Write the records into the run's folder, earlier ones too. Only the first call has an effect."""
        if run_dir is None or self._has_file:
            return
        self._has_file = True
        path = os.path.join(run_dir, LogNames.EVENTS)
        try:
            self.event_log.add_sink(JsonlSink(path, self._on_trouble), replay=True)
        except OSError as error:
            self._on_trouble(f"cannot write {path}: {error.strerror}")

    def global_ranks(self, *local_ranks: int) -> tuple[int, ...]:
        """This node's global ranks in the latest round."""
        return tuple(self._offset + local_rank for local_rank in local_ranks)

    def record(self, event: Any) -> None:
        """Record one event, and print it if it is notable."""
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            getattr(self, handler)(event)

    def _on_notice(self, event: Notice) -> None:
        self.event_log.write("notice", text=event.text)
        self._print_line(event.text)

    def _on_round_formed(self, event: RoundFormed) -> None:
        formed, event_log = event.round, self.event_log
        event_log.node, event_log.node_index = formed.group_rank, formed.node_index
        event_log.round, event_log.attempt = formed.number, formed.attempt
        self._offset = formed.rank_offset
        event_log.write(
            "round_formed",
            world_size=formed.world_size,
            nodes=formed.group_world_size,
            master=f"{formed.master_addr}:{formed.master_port}",
            restarts_left=formed.restarts_left,
        )
        event_log.mark("formed")

    def _on_round_broken(self, event: RoundBroken) -> None:
        self.event_log.mark("broken")
        self.event_log.write("round_broken", kind=event.kind.value, reason=event.reason)
        if event.kind is BreakKind.FAILURE:
            self._print_line(f"{event.reason}; restarting all workers")
        elif event.kind is not BreakKind.FINAL:  # the report shows that one
            self._print_line(event.reason)

    def _on_worker_exited(self, event: events.WorkerExited) -> None:
        self.event_log.write("worker_exited", ranks=self.global_ranks(event.local_rank), code=event.code)

    def _on_signal(self, event: events.SignalReceived) -> None:
        name = signal.Signals(event.signum).name
        self.event_log.mark("broken")
        self.event_log.write("signal", name=name, guard_died=event.guard_died)

    def _on_fenced(self, _event: events.Fenced) -> None:
        self.event_log.mark("broken")
        self.event_log.write("fenced")
        self._print_line(_FENCED_LINE)

    def _on_job_ended(self, event: JobEnded) -> None:
        self.event_log.write("job_ended", succeeded=event.succeeded)

    def _on_rendezvous_failed(self, event: RendezvousFailed) -> None:
        self.event_log.write("rendezvous_lost", reason=event.reason)


_HANDLERS: dict[type, str] = {
    Notice: "_on_notice",
    RoundFormed: "_on_round_formed",
    RoundBroken: "_on_round_broken",
    events.WorkerExited: "_on_worker_exited",
    events.SignalReceived: "_on_signal",
    events.Fenced: "_on_fenced",
    JobEnded: "_on_job_ended",
    RendezvousFailed: "_on_rendezvous_failed",
}
