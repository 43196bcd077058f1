"""Reads what an agent left about its job: its report, the error file in torch's format, and its records.

What is declared in `_shared.reports` is read by `codec.salvage`, because a container may have written the file itself.
"""

import json
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from muster._shared.codec import salvage
from muster._shared.contract import FormatError, check_format, show_controls
from muster._shared.fields import Count, Line, Name, Range
from muster._shared.foreign_files import parse_json, read_regular
from muster._shared.records import record
from muster._shared.reports import Failure, Report
from muster._shared.verdicts.causes import name_class

if TYPE_CHECKING:  # `torchx list` needs none
    from muster._shared.job_view import JobStatus


def parse_report(text: str | bytes) -> Report | None:
    """Read an agent's report. Return None for other text, such as the one sentence of an agent without a round.

    The reason of a report with another format says so.
    """
    try:
        data = parse_json(text)
        if not isinstance(data, dict) or "format" not in data:
            return None
        check_format(data["format"], "the agents' report")
        return salvage(Report, data)
    except FormatError as error:
        return Report(reason=str(error))
    except ValueError:
        return None


def describe_report(report: Report) -> str:
    """Return a report in one line: why the job ended, and what the root cause raised."""
    parts = [report.reason]
    root = find_root_cause(report)
    if root is not None and root.exception and root.exception not in report.reason:
        parts.append(root.exception)
    line = " ".join(": ".join(part for part in parts if part).split())
    named = [f"cause: {name_class(root.cause)}"] if root is not None and root.cause else []
    named += [f"suspected: {'; '.join(report.suspected)}"] if report.suspected else []
    return show_controls("; ".join([line, *named]))


USAGE_LINE_LIMIT_BYTES = 1 << 16
"""How much of the end of an agent's stderr is searched for its last sentence."""


def find_usage_line(errors: bytes) -> str:
    """Find what an agent that exited with 2 says of its command line, before any log folder is known.

    "": it says nothing.

    Args:
        errors: the end of its stderr. The first line may be incomplete.
    """
    lines = [line for line in errors.split(b"\n") if line.startswith(b"muster: ")]
    return show_controls(lines[-1][len(b"muster: ") :].decode(errors="replace").strip()) if lines else ""


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
    restarts_left: Count | None = None


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


@record
class RoundFacts:
    """The round in which a job is, as its agents have recorded it."""

    attempt: Count
    restarts_left: Count | None
    formed_s: float
    """By a node's wall clock."""


def parse_round(records: bytes) -> RoundFacts | None:
    """Return the last round that was formed, from an agent's records. None: they have none."""
    formed = [event for event in _parse_events(records) if event.what == "round_formed"]
    if not formed:
        return None
    last = formed[-1]
    return RoundFacts(attempt=last.attempt, restarts_left=last.detail.restarts_left, formed_s=last.time_s or 0.0)


_HALF_DAY_S = 12 * 3600
_HANG, _STILL = "hang_named", "stood_still"
_ADVICE: Final = "`muster stacks` prints all stacks, `muster stop` ends the job"
_NO_HANG = ("hang_ended", "moved_again", "round_formed", "round_broken", "workers_stopped", "fenced", "job_ended")


def parse_hang(records: bytes) -> str:
    """Describe a hang with which the job goes on in one line, with the time of its report. "": none goes on.

    Args:
        records: lines of JSON, of the agents of one job. The first may be incomplete.
    """
    lines: list[str] = []
    at_s, last = 0.0, ""
    for event in _parse_events(records):
        if event.what in _NO_HANG:
            lines = []
        elif event.what == _HANG and last == _HANG:
            lines.append(event.detail.text)
        elif event.what in (_HANG, _STILL):  # a later one knows more
            at_s, lines = event.time_s or 0.0, [event.detail.text]
        last = event.what if event.what in (_HANG, _STILL, *_NO_HANG) else last
    seen = f"{datetime.fromtimestamp(at_s, timezone.utc):%Y-%m-%d %H:%M:%S}"
    text = f"{'; '.join(lines)} (reported at {seen} UTC); {_ADVICE}"
    return show_controls(" ".join(text.split())) if lines else ""


def parse_break(records: bytes) -> str:
    """Return why the nodes form a new round at the moment, in one line. "": they do not.

    Args:
        records: see `parse_hang`.
    """
    reason = ""
    for event in _parse_events(records):
        if event.what == "round_broken" and event.detail.kind not in ("", "final"):
            named = f" (cause: {name_class(event.detail.cause)})" if event.detail.cause else ""
            reason = f"the nodes form a new round: {event.detail.reason}{named}"
        elif event.what in ("round_formed", "job_ended", "round_broken"):
            reason = ""
    return show_controls(" ".join(reason.split()))


def describe_trouble(records: bytes) -> str:
    """Return a hang with which a job goes on, and why it forms a new round. "": neither."""
    return "; ".join(filter(None, (parse_hang(records), parse_break(records))))


def parse_status(status: bytes) -> "JobStatus | None":
    """Return the status file. Return None if it is none.

    Raises:
        FormatError: it has another format.
    """
    if not status:
        return None
    from muster._shared.job_view import JobStatus

    try:
        data = parse_json(status)
        if not isinstance(data, dict) or "format" not in data:
            return None
        check_format(data["format"], "the agents' status")
        return salvage(JobStatus, data)
    except FormatError:
        raise
    except ValueError:
        return None


def describe_status(status: "JobStatus") -> str:
    """Return how far a job is, in a few words, or since when it is paused. "": not known."""
    return show_controls(status.describe(f" since {format_clock(status.paused_since_s)}"))


def format_clock(at_s: float | None) -> str:
    """Return the time of day here, with the date if it was more than half a day ago."""
    if at_s is None:
        return "?"
    try:
        at = datetime.fromtimestamp(at_s, timezone.utc).astimezone()
    except (OSError, OverflowError, ValueError):
        return "?"
    is_recent = abs(time.time() - at.timestamp()) < _HALF_DAY_S
    return f"{at:%H:%M}" if is_recent else f"{at:%Y-%m-%d %H:%M}"


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
