"""Decides which event of the job `--notify` reports, and on which node. Pure.

One node of the job reports an event. The leading node reports a hang, because only it has the lines about it. The node
that prints the report reports a failure. The first node of the round reports all else. With a handler of torch, the
first node reports everything.
"""

from muster._shared.contract import ExitCode
from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.records import record
from muster._shared.reports import Report
from muster.agent.node.actions import Finish
from muster.agent.node.events import Event
from muster.agent.rendezvous.interface import (
    BreakKind,
    DrainBegun,
    DrainCommitted,
    JobEnded,
    Notice,
    NoticeKind,
    RoundBroken,
    RoundFormed,
)
from muster.agent.round import Round

FAILED, HANG, PREEMPTED, ENDED, STOPPED = "failed", "hang", "preempted", "ended", "stopped"


@record
class Notification:
    """What the command receives."""

    event: str
    round: int
    """The event's round; 0 if there was none yet."""
    attempt: int
    reason: str
    """One line."""
    text: str
    """The command's standard input."""
    number: int = 1
    """The number of this hang in its round; 1 for all else."""
    step: int | None = None
    """The step; None means the last one in the job's status."""
    exit_code: int | None = None
    """The exit code; None if the job continues or has not ended yet."""

    @property
    def key(self) -> str:
        """The key under which an event is reported once."""
        return f"{self.event}_{self.round}_{self.number}"


class NotifyStory:
    """What one node has seen of the job."""

    def __init__(self, *, is_agreed: bool) -> None:
        """Begin.

        If `is_agreed`, the agents agree among themselves. Otherwise each decides alone, behind a handler of torch.
        """
        self._is_agreed = is_agreed
        self._hang_lines: list[str] = []
        self._is_hanging = False
        self._hangs = 0
        self._asked: set[int] = set()
        """Numbers of this round's drains that end the round."""
        self._preempted: set[int] = set()
        self._was_asked = False
        """Whether a person had asked for the last committed one of these drains."""

    def read(self, event: Event, current: Round | None) -> Notification | None:
        """Read an event of the node before it is decided.

        Args:
            event: the event.
            current: the round; None if there is none yet.
        """
        match event:
            case RoundFormed():
                self._hangs, self._is_hanging, self._hang_lines = 0, False, []
                self._asked, self._preempted, self._was_asked = set(), set(), False
            case DrainBegun() if event.kind == Layout.STOP:
                (self._asked if event.is_asked else self._preempted).add(event.drain)
            case DrainCommitted() if current is not None and event.round_number == current.number:
                return self._read_committed(event, current)
            case RoundBroken() if current is not None and event.round_number == current.number:
                return self._read_broken(event, current)
            case Notice():
                self._read_notice(event, current)
            case _:
                pass
        return None

    def _read_committed(self, event: DrainCommitted, current: Round) -> Notification | None:
        self._was_asked = event.drain in self._asked
        if event.drain not in self._preempted or current.group_rank > 0:
            return None
        return _build(PREEMPTED, current, f"preempted: all ranks stop at step {event.step}", step=event.step)

    def _read_broken(self, event: RoundBroken, current: Round) -> Notification | None:
        is_teller = event.is_leader if self._is_agreed else current.group_rank == 0
        if not event.is_hang or event.kind is not BreakKind.FAILURE or not is_teller:
            return None
        self._hangs += 1
        return _build(HANG, current, event.reason, number=self._hangs)

    def _read_notice(self, event: Notice, current: Round | None) -> None:
        is_teller = self._is_agreed or (current is not None and current.group_rank == 0)
        if event.kind is NoticeKind.HANG_OVER:
            self._is_hanging = False
        elif event.kind is NoticeKind.HANG and is_teller and not self._is_hanging:
            self._is_hanging = True
            self._hangs += 1
            self._hang_lines = [event.text]
        elif event.kind in (NoticeKind.HANG, NoticeKind.STACK) and self._hang_lines:
            self._hang_lines.append(event.text)

    @property
    def has_hang(self) -> bool:
        """Whether lines about a hang were read that `build_hang` has not returned yet; more may follow at once."""
        return bool(self._hang_lines)

    def build_hang(self, current: Round | None) -> Notification | None:
        """Build the notification of the hang from all of its lines; None if it was reported."""
        lines, self._hang_lines = self._hang_lines, []
        if not lines or current is None:
            return None
        return _build(HANG, current, lines[0], text="\n".join(lines), number=self._hangs)

    def end(self, finish: Finish, last: Round | None, *, is_first: bool, line: str, page: str) -> Notification | None:
        """Return the notification of the job's end, or of this node's.

        Args:
            finish: how the job ends.
            last: the last round of this node; None if there was none.
            is_first: whether this node is the first of that round, or of the job.
            line: the job's last line.
            page: the report as printed; "" if there is none.
        """
        code, ended, failed = int(finish.code), finish.ended, finish.rendezvous_failed
        if failed is not None:
            is_told = is_first and code == ExitCode.RENDEZVOUS
            return _build(FAILED, last, failed.reason, exit_code=code) if is_told else None
        if ended is None:
            if last is None or not is_first or code <= ExitCode.of_signal(0):
                return None  # the job may continue
            is_preempted = code == ExitCode.TERMINATED and not self._asked  # or `muster stop`
            return _build(PREEMPTED if is_preempted else STOPPED, last, line, exit_code=code)
        if ended.report is not None:
            is_told = ended.prints_report if self._is_agreed else is_first
            return _build_failed(ended.report, last, page, code) if is_told else None
        return _build(self._name_end(ended), last, line, exit_code=code) if is_first else None

    def _name_end(self, ended: JobEnded) -> str:
        if ended.succeeded:
            return ENDED
        return STOPPED if self._was_asked else PREEMPTED


def _build_failed(report: Report, last: Round | None, page: str, code: int) -> Notification:
    root = report.failures[0] if report.failures else None
    step = None if root is None else root.step
    return _build(FAILED, last, report.reason, text=page, step=step, exit_code=code)


def _build(
    event: str,
    current: Round | None,
    reason: str,
    *,
    text: str = "",
    number: int = 1,
    step: int | None = None,
    exit_code: int | None = None,
) -> Notification:
    return Notification(
        event=event,
        round=0 if current is None else current.number,
        attempt=0 if current is None else current.attempt,
        reason=" ".join(reason.split()),
        text=text or reason,
        number=number,
        step=step,
        exit_code=exit_code,
    )
