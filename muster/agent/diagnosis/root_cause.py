"""Whose failure it was: order, root cause, repeated start-up errors, the job's report. Pure."""

import json
from collections.abc import Iterable
from dataclasses import replace

from muster.agent.diagnosis.report import Failure, Report, Stack
from muster.agent.runtime.records import record

REPORT_LIMIT_BYTES = 6 * 1024 * 1024
"""What the texts of a report may take as JSON, and what it holds besides. A letter may be much longer."""
ENTRY_BYTES = 1024
"""What a failure or a stack takes besides its texts."""
LEFT_OUT = "(left out: the report is full)"
SHORT = 60
"""Characters that are left of a text which does not fit any more."""


@record
class DatedFailure:
    """A failure and when it happened by the leader's clock: arrival minus its age."""

    when_s: float
    failure: Failure


def order_failures(seen: Iterable[DatedFailure]) -> tuple[Failure, ...]:
    """The root cause first, then by time; all but the root marked collateral.

    What ended after the agent had sent it a signal is always collateral, however early its node's clock claims it was.
    Of one worker only the first word counts.
    """
    ordered = sorted(seen, key=lambda s: (s.failure.stopped_by_us, s.when_s, s.failure.global_rank))
    unique: dict[tuple[int, int], Failure] = {}
    for entry in ordered:
        unique.setdefault((entry.failure.node, entry.failure.local_rank), entry.failure)
    failures = tuple(unique.values())
    return tuple(
        replace(failure, collateral=failure.stopped_by_us or place > 0) for place, failure in enumerate(failures)
    )


def choose_root(seen: Iterable[DatedFailure]) -> Failure | None:
    """The root cause, None when every failure was our own doing."""
    ordered = order_failures(seen)
    return ordered[0] if ordered and not ordered[0].collateral else None


def find_signature(root: Failure | None) -> str | None:
    """What makes two start-up failures the same; None when this one was no start-up failure."""
    if root is None or not root.early:
        return None
    return root.exception or root.signal or f"exit code {root.exit_code}: {root.reason}".rstrip(": ")


def describe_failure(root: Failure | None) -> str:
    """One clause for the console: "rank 3 on node 1 (host-b) exited with code 1"."""
    if root is None:
        return "a worker failed"
    if root.reason:
        how = root.reason
    elif root.signal:
        how = f"was ended by {root.signal}"
    else:
        how = f"exited with code {root.exit_code}"
    what = f" ({root.exception.splitlines()[0][:200]})" if root.exception else ""
    return f"rank {root.global_rank} on node {root.node} ({root.host}) {how}{what}"


def explain_end(root: Failure | None, early: str | None, attempt: int, max_restarts: int) -> str | None:
    """One line when a failure ends the job, None when another attempt is due.

    Args:
        root: the root cause.
        early: signature of the start-up failure that ended the attempt before.
        attempt: how many restarts are used.
        max_restarts: how many there are.
    """
    signature = find_signature(root)
    if signature is not None and signature == early:
        return f"{describe_failure(root)}; it failed the same way right after the start twice in a row: not retried"
    if attempt >= max_restarts:
        used = f"all {max_restarts} restarts are used" if max_restarts else "no restarts are allowed (--max-restarts 0)"
        return f"{describe_failure(root)}; {used}"
    return None


def build_report(
    run_id: str,
    reason: str,
    attempt: int,
    max_restarts: int,
    seen: Iterable[DatedFailure],
    stacks: tuple[Stack, ...],
) -> Report:
    """The one report of the job; `reason` as `explain_end` gave it.

    It fits into one letter: where there is too much, the texts of the last ranks are left out.
    """
    seen = tuple(seen)
    left = REPORT_LIMIT_BYTES
    failures, shown = [], []
    for failure in order_failures(seen):
        texts = (failure.traceback or "", failure.exception or "", failure.reason, *failure.stderr_tail)
        left -= ENTRY_BYTES + sum(map(_measure, texts))
        failures.append(failure if left > 0 else _shorten(failure))
    for stack in sorted(stacks, key=lambda stack: stack.global_rank):
        left -= ENTRY_BYTES + _measure(stack.text)
        shown.append(stack if left > 0 else replace(stack, text=LEFT_OUT))
    return Report(
        run_id=run_id,
        reason=_name_root(reason, seen),
        attempt=attempt,
        max_restarts=max_restarts,
        failures=tuple(failures),
        stacks=tuple(shown),
    )


def _measure(text: str) -> int:
    return len(json.dumps(text))


def _shorten(failure: Failure) -> Failure:
    exception = failure.exception[:SHORT] if failure.exception else None
    return replace(failure, traceback=None, exception=exception, reason=failure.reason[:SHORT], stderr_tail=())


def _name_root(reason: str, seen: tuple[DatedFailure, ...]) -> str:
    """The reason with the root cause as known at the end: of what failed at the same moment, one is heard of first."""
    root = choose_root(seen)
    for told in (f"{describe_failure(each.failure)}; " for each in seen):
        if root is not None and reason.startswith(told):
            return f"{describe_failure(root)}; {reason.removeprefix(told)}"
    return reason


def find_root(report: Report) -> Failure | None:
    """The root cause: the first failure that is not collateral; None when nothing is known to have failed."""
    return next((failure for failure in report.failures if not failure.collateral), None) or next(
        iter(report.failures), None
    )
