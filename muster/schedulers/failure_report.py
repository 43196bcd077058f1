"""Reads what an agent left about its job: its report, the error file in torch's format, and its records.

What is declared in `_shared.reports` is read by `codec.salvage`, because a container may have written the file itself.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar

from muster._shared.codec import salvage
from muster._shared.contract import FormatError, LogNames, check_format, show_controls
from muster._shared.fields import Line, Name, Range
from muster._shared.foreign_files import parse_json, read_regular
from muster._shared.records import record
from muster._shared.reports import Failure, Report
from muster.schedulers.wording.reasons import Code, JobFacts, Reason, Reasons
from muster.schedulers.wording.words import word

if TYPE_CHECKING:
    from muster._shared.job_view import JobStatus

T = TypeVar("T")


def parse_report(text: str | bytes) -> Report | None:
    """Read an agent's report. Return None for other text, such as the one sentence of an agent without a round.

    The reason of a report with another format says so.
    """
    try:
        return _parse(Report, text, "the agents' report")
    except FormatError as error:
        return Report(reason=str(error))


def _parse(kind: type[T], text: str | bytes, what: str) -> T | None:
    """Read a record that agents write. Return None if it is none.

    Raises:
        FormatError: it has another format.
    """
    try:
        data = parse_json(text)
        if not isinstance(data, dict) or "format" not in data:
            return None
        check_format(data["format"], what)
        return salvage(kind, data)
    except FormatError:
        raise
    except ValueError:
        return None


def explain_report(report: Report) -> Reason:
    """Return why the job of a report has ended, and what the root cause raised."""
    root = find_root_cause(report)
    exception = "" if root is None or not root.exception or root.exception in report.reason else root.exception
    return Reason(
        code=Code.JOB_FAILED,
        text=_join(report.reason),
        exception=_join(exception),
        cause="" if root is None else root.cause,
        count=report.attempt,
        total=report.max_restarts,
        suspected=report.suspected,
    )


def describe_report(report: Report) -> str:
    """Return the same in one line."""
    return word(explain_report(report))


def explain_message(message: bytes) -> Reason | None:
    """Return what an agent's last message says: a report as JSON, or one sentence if there was no round at all."""
    report = parse_report(message)
    if report is not None:
        return explain_report(report)
    text = _join(message.decode(errors="replace"))
    return Reason(code=Code.AGENT_SAID, text=text) if text else None


def explain_start_failure(error: object, image: str, command: str, *, runs_agent: bool) -> Reason:
    """Return why a container could not be started, as its runtime says it. The most common reason has its own code."""
    message = _join(str(error))
    missing = "executable file not found" in message or "no such file or directory" in message.lower()
    if missing and command and command in message:
        return Reason(code=Code.IMAGE_LACKS_COMMAND, image=image, program=command, is_agent=runs_agent)
    return Reason(code=Code.COULD_NOT_START, text=message)


USAGE_LINE_LIMIT_BYTES = 1 << 16
"""How much of the end of an agent's stderr is searched for its last sentence."""


def find_usage_line(errors: bytes) -> Reasons:
    """Find what an agent that exited with 2 says of its command line, before any log folder is known.

    Empty: it says nothing.

    Args:
        errors: the end of its stderr. The first line may be incomplete.
    """
    lines = [line for line in errors.split(b"\n") if line.startswith(b"muster: ")]
    text = lines[-1][len(b"muster: ") :].decode(errors="replace") if lines else ""
    return (Reason(code=Code.AGENT_SAID, text=_join(text)),) if text.strip() else ()


def find_root_cause(report: Report) -> Failure | None:
    """Return the first failure that is not collateral, or None if the report has none."""
    return next((each for each in report.failures if not each.collateral), None)


_LAST_S = 253_402_300_799.0
"""The end of the year 9999, after which `datetime` has nothing."""


@record
class _EventDetail:
    """The fields that adapters read."""

    text: Line = ""
    kind: Name = ""
    reason: Line = ""
    cause: Name = ""


@record
class _Event:
    """What adapters read of a record of an agent (`agent.runtime.event_log.EventRecord`)."""

    what: Name = ""
    time_s: Annotated[float, Range(least=0, most=_LAST_S)] | None = None
    """By the node's wall clock. None: it has none."""
    attempt: Annotated[int, Range(least=0, most=1_000_000)] = 0
    detail: _EventDetail = _EventDetail()


def parse_attempt(records: bytes) -> int:
    """Return how often workers were restarted in place because one failed.

    The number is from the last of an agent's records, or 0.

    Args:
        records: lines of JSON. The first may be incomplete.
    """
    lines = [line for line in records.split(b"\n") if line]
    event = _parse_event(lines[-1]) if lines else None
    return 0 if event is None else event.attempt


_HANG, _STILL = "hang_named", "stood_still"
_NO_HANG = ("hang_ended", "moved_again", "round_formed", "round_broken", "workers_stopped", "fenced", "job_ended")


def find_trouble(records: bytes) -> Reasons:
    """Return a hang with which a job goes on, with the time of its report, and why its nodes form a new round.

    Args:
        records: lines of JSON, of the agents of one job. The first may be incomplete.
    """
    lines: list[str] = []
    at_s, last = 0.0, ""
    broken: Reasons = ()
    for event in _parse_events(records):
        if event.what in _NO_HANG:
            lines = []
        elif event.what == _HANG and last == _HANG:
            lines.append(event.detail.text)
        elif event.what in (_HANG, _STILL):  # a later one knows more
            at_s, lines = event.time_s or 0.0, [event.detail.text]
        last = event.what if event.what in (_HANG, _STILL, *_NO_HANG) else last
        if event.what == "round_broken" and event.detail.kind not in ("", "final"):
            text = _join(event.detail.reason)
            broken = (Reason(code=Code.NEW_ROUND, text=text, cause=event.detail.cause),)
        elif event.what in ("round_formed", "job_ended", "round_broken"):
            broken = ()
    hang = (Reason(code=Code.HANGS, text=_join("; ".join(lines)), at_s=at_s),) if lines else ()
    return (*hang, *broken)


def _join(text: str) -> str:
    """Return a text in one line, without what would control a terminal."""
    return show_controls(" ".join(text.split()))


def parse_status(status: bytes) -> "JobStatus | None":
    """Return the status file. Return None if it is none.

    Raises:
        FormatError: it has another format.
    """
    from muster._shared.job_view import JobStatus

    return _parse(JobStatus, status, "the agents' status")


def _parse_events(records: bytes) -> Iterator[_Event]:
    events = map(_parse_event, records.split(b"\n"))
    return (event for event in events if event is not None and event.time_s is not None)


def _parse_event(line: bytes) -> _Event | None:
    """Parse an event. Return None if it is cut off or damaged."""
    try:
        return salvage(_Event, parse_json(line))
    except ValueError:
        return None


_ERROR_LIMIT_BYTES = 4 << 20


def read_error_file(path: Path) -> str | None:
    """Return an error file in torch's format as one line of JSON. None: there is none that TorchX can print."""
    try:
        content = parse_json(read_regular(str(path), _ERROR_LIMIT_BYTES))
    except (OSError, ValueError):
        return None
    return json.dumps(content) if isinstance(content, dict) else None


ReadBytes: TypeAlias = Callable[[Sequence[str]], Sequence[bytes]]
"""(names of files, of `LogNames`) -> the last 64 KiB or more of each file in the role's newest run; b"" if it is
missing.

An agent knows the whole job, so files of node 0, or of any node whose agent runs, will do.
"""


class RecordReader:
    """Reads what the agents of one role say of their job. It reads once, when it is first asked.

    Args:
        read_bytes: reads files that the role's agents write. See `ReadBytes`. What it raises is passed on.
        since: when the node whose files are read was made, as RFC 3339. What is older is of an earlier incarnation, in
            a folder that outlived it, and nothing is known of this one. "": not known.
    """

    def __init__(self, read_bytes: ReadBytes, since: str = "") -> None:
        self._read_bytes = read_bytes
        self._since = since

    @cached_property
    def _files(self) -> tuple[bytes, bytes]:
        events, status = self._read_bytes((LogNames.EVENTS, LogNames.STATUS))
        return events, status

    @property
    def restarts(self) -> int:
        """How often workers were restarted in place because one failed."""
        return parse_attempt(self._files[0])

    @property
    def job(self) -> JobFacts:
        """What is known of a job that runs."""
        records, status = self._files
        try:
            parsed = parse_status(status)
        except FormatError as error:
            return JobFacts(trouble=(Reason(code=Code.OTHER_FORMAT, text=str(error)),))
        if parsed is not None and self._is_older(parsed.time_s):
            return JobFacts()
        attempt = max(self.restarts, 0 if parsed is None else parsed.attempt)
        return JobFacts(trouble=find_trouble(records), attempt=attempt, status=parsed)

    def _is_older(self, written_s: float) -> bool:
        from muster.schedulers.timestamps import parse_timestamp  # nodes of Slurm's have none

        try:
            return 0 < written_s < parse_timestamp(self._since)[0]
        except ValueError:
            return False
