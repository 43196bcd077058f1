"""Reads what an agent left about its job: its report, the error file in torch's format, and its records.

The agent writes both in `diagnosis/report_files.py`; adapters never import it, and older agents' reports lack fields.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from muster._shared.contract import STATUS_SCHEMA, parse_json, read_regular, show_controls


def parse_report(text: str | bytes) -> Mapping[str, Any] | None:
    """An agent's report; None if the text is something else, for instance one sentence: then there was no round."""
    try:
        data = parse_json(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) and ("failures" in data or "reason" in data) else None


def describe_report(report: Mapping[str, Any]) -> str:
    """A report in one line: why the job ended, and what the root cause raised."""
    parts = [str(report.get("reason") or "")]
    raised = find_root_cause(report).get("exception")
    if raised and str(raised) not in parts[0]:
        parts.append(str(raised))
    return show_controls(" ".join(": ".join(part for part in parts if part).split()))


USAGE_LINE_LIMIT_BYTES = 1 << 16
"""How much of the end of an agent's stderr is searched for its last sentence."""


def find_usage_line(errors: bytes) -> str:
    """What an agent that exited with 2 says about its command line, before any log folder is known; "" if nothing.

    Args:
        errors: the end of its stderr; the first line may be incomplete.
    """
    lines = [line for line in errors.split(b"\n") if line.startswith(b"muster: ")]
    return show_controls(lines[-1][len(b"muster: ") :].decode(errors="replace").strip()) if lines else ""


def find_root_cause(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first failure that is not collateral; empty if the report has none. A field of another type is left out."""
    found = report.get("failures")
    failures = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    root = next((each for each in failures if not each.get("collateral")), {})
    return {name: value for name, value in root.items() if name not in _TYPES or _TYPES[name](value)}


_TYPES: Mapping[str, Callable[[object], bool]] = {
    "exception": lambda value: isinstance(value, str),
    "traceback": lambda value: isinstance(value, str),
    "stderr_tail": lambda value: isinstance(value, list) and all(isinstance(line, str) for line in value),
    "exit_code": lambda value: isinstance(value, int),
    "time_s": lambda value: isinstance(value, int | float) and math.isfinite(value),
}
"""What adapters read of a failure; a container may have written the report itself."""


def parse_attempt(records: bytes) -> int:
    """How often workers were restarted in place because one failed, from the last of an agent's records; else 0.

    Args:
        records: lines of JSON; the first may be incomplete.
    """
    lines = [line for line in records.split(b"\n") if line]
    try:
        record = parse_json(lines[-1]) if lines else None
    except ValueError:
        return 0
    attempt = record.get("attempt") if isinstance(record, dict) else 0
    return attempt if isinstance(attempt, int) and 0 <= attempt <= _MOST_ATTEMPTS else 0


_MOST_ATTEMPTS = 1_000_000
_HALF_DAY_S = 12 * 3600
_VALUE_CHARS = 32
_HANG, _STILL = "hang_named", "stood_still"
_NO_HANG = ("hang_ended", "moved_again", "round_formed", "round_broken", "workers_stopped", "fenced", "job_ended")


def parse_hang(records: bytes) -> str:
    """What is known of a hang with which the job goes on, in one line, with the time of its report; "": none goes on.

    Args:
        records: lines of JSON, of the agents of one job; the first may be incomplete.
    """
    lines: list[str] = []
    seen = last = ""
    for what, at, detail in filter(None, map(_parse_record, records.split(b"\n"))):
        text = str(detail.get("text", ""))
        if what in _NO_HANG:
            lines = []
        elif what == _HANG and last == _HANG:
            lines.append(text)
        elif what in (_HANG, _STILL):  # what is said later knows more
            seen, lines = at, [text]
        last = what if what in (_HANG, _STILL, *_NO_HANG) else last
    return show_controls(" ".join(f"{'; '.join(lines)} (reported at {seen} UTC)".split())) if lines else ""


def parse_break(records: bytes) -> str:
    """Why the nodes form a new round at the moment, in one line; "": they do not.

    Args:
        records: see `parse_hang`.
    """
    reason = ""
    for what, _, detail in filter(None, map(_parse_record, records.split(b"\n"))):
        if what == "round_broken" and detail.get("kind") != "final":
            reason = f"the nodes form a new round: {detail.get('reason', '')}"
        elif what in ("round_formed", "job_ended", "round_broken"):
            reason = ""
    return show_controls(" ".join(reason.split()))


def describe_running(records: bytes, status: bytes | None = None) -> str:
    """What `torchx status` says of agents of one job that runs: a hang, a new round, how far it is; "": nothing.

    Args:
        records: see `parse_hang`.
        status: the job's status file; None: it may be the last line of `records`.
    """
    if status is None:
        status = records.rstrip().rpartition(b"\n")[2]
    return "; ".join(filter(None, (parse_hang(records), parse_break(records), describe_progress(status))))


def describe_progress(status: bytes) -> str:
    """The status file in a few words: "step 812 of 1000, 7.9 a second, loss 0.31", or since when it is paused."""
    try:
        found = parse_json(status)
    except ValueError:
        return ""
    if not isinstance(found, dict) or found.get("schema") != STATUS_SCHEMA:
        return ""
    step, total, rate, values = (found.get(name) for name in ("step", "total", "rate", "values"))
    done = found.get("optimizer_steps")
    if not (_is_number(step) or _is_number(done)):
        return ""
    is_paused = found.get("state") == "paused"
    place = f"step {step}" if _is_number(step) else f"step {done} (by optimizer)"
    if is_paused:
        words = [f"paused at {place} since {_format_clock(found.get('paused_since_s'))}"]
    else:
        words = [f"{place} of {total}" if _is_number(step) and _is_number(total) else place]
        words += [f"{rate:.1f} a second" if rate < 20 else f"{rate:.0f} a second"] if _is_number(rate) and rate else []
    words += [f"{name} {_format_value(value)}" for name, value in values.items()] if isinstance(values, dict) else []
    return show_controls(", ".join(words))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _format_value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:_VALUE_CHARS]


def _format_clock(at_s: object) -> str:
    """The time of day here, with the date if it was more than half a day ago."""
    try:
        at = datetime.fromtimestamp(float(str(at_s)), timezone.utc).astimezone()
    except (OSError, OverflowError, ValueError):
        return "?"
    is_recent = abs(time.time() - at.timestamp()) < _HALF_DAY_S
    return f"{at:%H:%M}" if is_recent else f"{at:%Y-%m-%d %H:%M}"


def _parse_record(line: bytes) -> tuple[str, str, Mapping[str, Any]] | None:
    """(what, time in UTC, detail); None if it is cut off, damaged or of another version."""
    try:
        record: Any = parse_json(line)
        seen = datetime.fromtimestamp(record["time_s"], timezone.utc)
        return record["what"], f"{seen:%Y-%m-%d %H:%M:%S}", {**record.get("detail", {})}
    except (AttributeError, KeyError, OSError, OverflowError, TypeError, ValueError):
        return None


def join_roles(running: Mapping[str, str]) -> str:
    """One line of what `describe_running` has returned of each role."""
    known = {role: text for role, text in running.items() if text}
    return "; ".join(text if len(running) == 1 else f"{role}: {text}" for role, text in known.items())


_ERROR_LIMIT_BYTES = 4 << 20


def read_error_file(path: Path) -> str | None:
    """An error file in torch's format as one line of JSON; None if there is none that TorchX can print."""
    try:
        content = parse_json(read_regular(str(path), _ERROR_LIMIT_BYTES))
    except (OSError, ValueError):
        return None
    return json.dumps(content) if isinstance(content, dict) else None
