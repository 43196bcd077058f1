"""Reads what an agent left about its job: its report, the error file in torch's format, and its records.

The agent writes both in `diagnosis/report_files.py`; adapters never import it, and older agents' reports lack fields.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def parse_report(text: str | bytes) -> Mapping[str, Any] | None:
    """An agent's report; None if the text is something else, for instance one sentence: then there was no round."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) and ("failures" in data or "reason" in data) else None


def describe_report(report: Mapping[str, Any]) -> str:
    """A report in one line: why the job ended, and what the root cause raised."""
    parts = [str(report.get("reason") or "")]
    raised = find_root_cause(report).get("exception")
    if raised and str(raised) not in parts[0]:
        parts.append(str(raised))
    return " ".join(": ".join(part for part in parts if part).split())


def find_root_cause(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first failure that is not collateral; empty if the report has none."""
    failures = [each for each in report.get("failures") or () if isinstance(each, dict)]
    return next((each for each in failures if not each.get("collateral")), {})


def parse_attempt(records: bytes) -> int:
    """How often workers were restarted in place because one failed, from the last of an agent's records; else 0.

    Args:
        records: lines of JSON; the first may be incomplete.
    """
    lines = [line for line in records.split(b"\n") if line]
    try:
        return int(json.loads(lines[-1]).get("attempt", 0)) if lines else 0
    except (AttributeError, TypeError, ValueError):
        return 0


def read_error_file(path: Path) -> str | None:
    """An error file as one line of JSON; None if there is none that can be read."""
    try:
        return json.dumps(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
