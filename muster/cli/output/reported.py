"""What a job's report knows of a rank whose output is gone. Pure."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from muster._shared.reports import Failure, Report
from muster.cli.output.streaming import hold_report

_RANK: Final = re.compile(r"  rank +: (\d+) \(local rank ")
"""The line of a printed report that names the rank of the root cause. It comes before all other ranks."""


def find_failure(report: Report, rank: int, attempt: int | None) -> Failure | None:
    """Return how a rank has failed, in this attempt or else in its last. None: the report does not have it."""
    found = [each for each in report.failures if each.global_rank == rank and attempt in (None, each.attempt)]
    return max(found, key=lambda each: each.attempt, default=None)


def list_stderr(failure: Failure) -> Iterator[str]:
    """Yield the last lines of a rank's stderr, and its traceback unless they have it. Nothing: the report has none."""
    yield from failure.stderr_tail
    tail = "\n".join(failure.stderr_tail)
    text = failure.traceback or failure.exception or ""
    if any(line.strip() not in tail for line in text.splitlines()):
        yield from text.splitlines()


def find_printed_report(lines: Iterable[str]) -> list[str]:
    """Return the last report of a failed job in the output of a node, and what follows it. []: it has none."""
    report: list[str] = []
    for _ in hold_report(lines, report):
        pass
    return report


def find_printed_rank(report: Sequence[str]) -> int | None:
    """Return the rank of the root cause of a printed report. None: it names none."""
    return next((int(found[1]) for line in report if (found := _RANK.match(line))), None)
