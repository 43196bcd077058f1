"""Orders failures, chooses the root cause, recognises repeated start-up errors, builds the job's report. Pure."""

import json
from collections.abc import Iterable
from dataclasses import replace

from muster.agent.diagnosis.report import Failure, Report, Stack
from muster.agent.runtime.records import record

REPORT_LIMIT_BYTES = 6 * 1024 * 1024
"""Limit on the size of a report as JSON. A message between members may be much longer."""
_ENTRY_BYTES = 1024
"""Size of a failure or a stack without its texts."""
LEFT_OUT = "(left out: the report is full)"
_SHORT_CHARS = 60
"""Characters that are kept of a text that does not fit."""


@record
class DatedFailure:
    """A failure and its time on the leader's clock: arrival minus age."""

    when_s: float
    failure: Failure


def order_failures(seen: Iterable[DatedFailure]) -> tuple[Failure, ...]:
    """The root cause first, then by time; all but the root marked collateral.

    A worker that ended after the agent had sent it a signal is always collateral, however early its node dates it. Of
    one worker only the first failure counts.
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
    """Choose the root cause; None when our own signals ended every worker."""
    ordered = order_failures(seen)
    return ordered[0] if ordered and not ordered[0].collateral else None


def find_signature(root: Failure | None) -> str | None:
    """What is equal for two equal start-up failures; None when this one is not a start-up failure."""
    if root is None or not root.early:
        return None
    return root.exception or root.signal or f"exit code {root.exit_code}: {root.reason}".rstrip(": ")


def describe_failure(root: Failure | None) -> str:
    """Describe it in one clause for the console: "rank 3 on node 1 (host-b) exited with code 1"."""
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


def build_report(
    run_id: str,
    reason: str,
    attempt: int,
    max_restarts: int,
    seen: Iterable[DatedFailure],
    stacks: tuple[Stack, ...],
) -> Report:
    """Build the one report of the job; `reason` is what `find_final_reason` returned.

    It fits into one message: if it is too long, the texts of the last ranks are left out.
    """
    seen = tuple(seen)
    left = REPORT_LIMIT_BYTES
    failures, shown = [], []
    for failure in order_failures(seen):
        texts = (failure.traceback or "", failure.exception or "", failure.reason, *failure.stderr_tail)
        left -= _ENTRY_BYTES + sum(map(_count_json_bytes, texts))
        failures.append(failure if left > 0 else _shorten(failure))
    for stack in sorted(stacks, key=lambda stack: stack.global_rank):
        left -= _ENTRY_BYTES + _count_json_bytes(stack.text)
        shown.append(stack if left > 0 else replace(stack, text=LEFT_OUT))
    return Report(
        run_id=run_id,
        reason=_replace_cause(reason, seen),
        attempt=attempt,
        max_restarts=max_restarts,
        failures=tuple(failures),
        stacks=tuple(shown),
    )


def _count_json_bytes(text: str) -> int:
    return len(json.dumps(text))


def _shorten(failure: Failure) -> Failure:
    exception = failure.exception[:_SHORT_CHARS] if failure.exception else None
    return replace(failure, traceback=None, exception=exception, reason=failure.reason[:_SHORT_CHARS], stderr_tail=())


def _replace_cause(reason: str, seen: tuple[DatedFailure, ...]) -> str:
    """Name the final root cause in the reason: when several fail at once, another failure may have arrived first."""
    root = choose_root(seen)
    for first in (f"{describe_failure(each.failure)}; " for each in seen):
        if root is not None and reason.startswith(first):
            return f"{describe_failure(root)}; {reason.removeprefix(first)}"
    return reason


def find_root(report: Report) -> Failure | None:
    """The root cause: the first failure that is not collateral; None when no failure is known."""
    return next((failure for failure in report.failures if not failure.collateral), None) or next(
        iter(report.failures), None
    )
