"""Orders failures, names the root cause, and builds the job's report. Pure.

The report's `reason` names the root cause for all readers: the console, `torchx status`, Docker and Kubernetes.

Several ranks often fail because of one. The root cause is the first failure in time that is an error of its own, and
neither an end by our signal nor the complaint that another rank's connection closed. Ranks with the same error failed
in the same way and are no collateral. In a hang the root cause is the rank that is not where the others wait.
"""

import json
import re
from collections.abc import Iterable, Sequence

from muster._shared.causes import CRASH, NETWORK
from muster._shared.contract import describe_end
from muster._shared.records import record, replace
from muster._shared.reports import (
    ENDED,
    Failure,
    FinalFailure,
    OomEvidence,
    Report,
    Stack,
    format_size,
    name_ranks,
)

REPORT_LIMIT_BYTES = 6 * 1024 * 1024
"""Limit on the size of a report as JSON. A message between members may be much longer."""
_ENTRY_BYTES = 1024
"""Size of a failure or a stack without its texts."""
LEFT_OUT = "(left out: the report is full)"
_SHORT_CHARS = 60
"""Characters that are kept of a text that does not fit."""
_SAME_TIME_S = 1.0
"""Two ranks that ended without text, with only an exit code, failed in the same way if they ended this close together.
"""
_SYMPTOMS = (
    "Connection closed by peer",  # gloo
    "Connection reset by peer",
    "Broken pipe",
    "ncclRemoteError",
    "remote process exited",  # NCCL
    "DistNetworkError",
    "failed to recv, got 0 bytes",  # TCPStore
)
"""Texts in exceptions of ranks whose peer has ended."""


@record
class DatedFailure:
    """A failure and its time on the leader's clock: arrival minus age."""

    when_s: float
    failure: Failure


# -- which failure ----------------------------------------------------------------------------------------------------


def order_failures(seen: Iterable[DatedFailure], stacks: Sequence[Stack] = ()) -> tuple[Failure, ...]:
    """Return the root cause first, then the others by time. Mark all that did not fail in the same way as collateral.

    A worker that ended after the agent had sent it a signal is always collateral, however early its node dates it. Only
    the first failure of each worker counts.
    """
    ordered = sorted(seen, key=_get_order)
    unique: dict[tuple[int, int], DatedFailure] = {}
    for entry in ordered:
        unique.setdefault((entry.failure.node, entry.failure.local_rank), entry)
    entries = list(unique.values())
    if entries and entries[0].failure.hung:
        return _order_hang([entry.failure for entry in entries], stacks)
    return tuple(
        replace(
            entry.failure, collateral=entry.failure.stopped_by_us if place == 0 else not _is_same(entries[0], entry)
        )
        for place, entry in enumerate(entries)
    )


def _get_order(entry: DatedFailure) -> tuple[bool, bool, float, int]:
    failure = entry.failure
    return failure.stopped_by_us, is_symptom(failure), entry.when_s, failure.global_rank


def is_symptom(failure: Failure) -> bool:
    """Return whether the rank says only that a peer is gone.

    If another failure becomes known, that is the cause.
    """
    return not failure.reason and any(text in (failure.exception or "") for text in _SYMPTOMS)


def add_early_exits(failure: Failure, ranks: Iterable[int]) -> Failure:
    """Name the ranks that had ended with success when this one lost the connection to a peer.

    Then the cause is the program, which lets ranks end at different places, and not the network.

    Args:
        failure: as collected, or as reported by its node, which knows only its own ranks.
        ranks: more ranks that have ended.
    """
    if failure.stopped_by_us or not is_symptom(failure):
        return failure
    ended = tuple(sorted({*failure.ended_ranks, *ranks}))
    failure = replace(failure, ended_ranks=ended)
    if ended and failure.cause == NETWORK:
        failure = replace(failure, cause=CRASH, evidence=f"{name_ranks(ended)} ended before the others")
    return failure


def _order_hang(failures: list[Failure], stacks: Sequence[Stack]) -> tuple[Failure, ...]:
    """Order the ranks of a hang: those that are not where the others wait come first.

    If there are no such ranks, all hang in the same way.
    """
    from muster.agent.diagnosis.hangs import load_judge

    found = load_judge().find_cause(stacks)
    hung = [failure for failure in failures if failure.hung]
    causes = [replace(failure, blocking=found.clause) for failure in hung if failure.global_rank in found.ranks]
    if found.ranks and not causes:  # ended, which is no failure
        ended = f"{name_ranks(found.ranks)} {found.clause}"
        hung = [replace(failure, reason=f"{ended}; {failure.reason}") for failure in hung]
    first = causes or hung
    ranks = {failure.global_rank for failure in first}
    rest = [failure for failure in failures if failure.global_rank not in ranks]
    return (
        *(replace(failure, collateral=False) for failure in first),
        *(replace(failure, collateral=True) for failure in rest),
    )


def _is_same(root: DatedFailure, other: DatedFailure) -> bool:
    """Return whether the other failure happened in the same way as the root cause."""
    first, failure = root.failure, other.failure
    if other is root or first.stopped_by_us:
        return not first.stopped_by_us
    if first.exception and not first.reason:
        return find_kind(failure) == find_kind(first)
    if failure.exception or failure.stopped_by_us:
        return False
    same = (failure.exit_code, failure.signal, failure.reason) == (first.exit_code, first.signal, first.reason)
    return same and abs(other.when_s - root.when_s) <= _SAME_TIME_S


def find_kind(failure: Failure) -> str:
    """Return the exception's first line without numbers.

    The numbers of ranks and sizes differ between ranks that fail in the same way.
    """
    return re.sub(r"\d+", "#", failure.exception.splitlines()[0]) if failure.exception else ""


def choose_root(seen: Iterable[DatedFailure]) -> Failure | None:
    """Choose the root cause; None if our own signals ended every worker."""
    first = min(seen, key=_get_order, default=None)
    return None if first is None or first.failure.stopped_by_us else first.failure


def find_root(report: Report) -> Failure | None:
    """Return the root cause, the first failure that is not collateral; None if no failure is known."""
    return next((failure for failure in report.failures if not failure.collateral), None) or next(
        iter(report.failures), None
    )


# -- in words ---------------------------------------------------------------------------------------------------------


def describe_failure(root: Failure | None) -> str:
    """Describe it in one clause for the console: "rank 3 on node 1 (host-b) exited with code 1"."""
    if root is None:
        return "a worker failed"
    if root.hung and not root.blocking:
        return f"the job {root.describe_end()}"
    if root.check:
        return f"{root.check.feature} of node {root.node} ({root.host}): {root.reason}"
    how = f"{_describe_end(root)}{_describe_ended(root)}"
    what = f" ({root.exception.splitlines()[0][:300]})" if root.exception else ""
    return f"rank {root.global_rank} on node {root.node} ({root.host}) {how}{what}"


def _describe_ended(failure: Failure) -> str:
    return f" after {name_ranks(failure.ended_ranks)} had {describe_end(0)}" if failure.ended_ranks else ""


def _describe_end(failure: Failure, *, plural: bool = False) -> str:
    if not failure.reason and failure.exception and failure.signal == "SIGTERM":
        return "failed"  # signalled during its end
    how = failure.describe_end(plural=plural)
    if failure.oom is None or failure.reason:
        return how
    return f"{how}: {_describe_memory(failure.oom, is_killed=bool(failure.signal))}"


def _describe_memory(oom: OomEvidence, *, is_killed: bool) -> str:
    """Name the OOM killer, and call a guess a guess."""
    if not oom.certain:
        return "possibly out of memory (OOM)"
    limit = f", limit {format_size(oom.limit_bytes, 2)}" if oom.limit_bytes else ""
    return f"out of memory (OOM{limit})" if is_killed else f"out of memory (OOM in one of its processes{limit})"


def describe_cause(failures: tuple[Failure, ...]) -> str:
    """Name the root cause and the ranks that failed in the same way, in one clause.

    Args:
        failures: as `order_failures` returned them.
    """
    root = next(iter(failures), None)
    if root is None or root.collateral:
        return describe_failure(None)
    same = [failure.global_rank for failure in failures if not failure.collateral]
    if root.hung:
        return f"{name_ranks(same)} {root.describe_end()}"
    if len(same) == 1:
        return describe_failure(root)
    how = root.exception.splitlines()[0][:300] if root.exception else _describe_end(root, plural=True)
    return f"{name_ranks(same)} failed in the same way: {how}{_describe_ended(root)}"


# -- the report -------------------------------------------------------------------------------------------------------


def build_report(
    run_id: str,
    final: FinalFailure,
    attempt: int,
    max_restarts: int,
    seen: Iterable[DatedFailure],
    stacks: tuple[Stack, ...],
    suspected: tuple[str, ...] = (),
) -> Report:
    """Build the one report of the job.

    It must fit into one message. If it is too long, the texts of the last ranks are omitted.
    """
    seen = tuple(seen)
    ordered = _add_ended(order_failures(seen, stacks), stacks)
    left = REPORT_LIMIT_BYTES
    failures, shown = [], []
    for failure in ordered:
        texts = (failure.traceback or "", failure.exception or "", failure.reason, *failure.stderr_tail)
        left -= _ENTRY_BYTES + sum(map(_count_json_bytes, texts))
        failures.append(failure if left > 0 else _shorten(failure))
    for stack in sorted(stacks, key=lambda stack: stack.global_rank):
        if not stack.text:
            continue
        left -= _ENTRY_BYTES + _count_json_bytes(stack.text)
        shown.append(replace(stack, view=None, progress=None, text=stack.text if left > 0 else LEFT_OUT))
    return Report(
        run_id=run_id,
        reason=_renew_cause(final, ordered).describe(),
        attempt=attempt,
        max_restarts=max_restarts,
        failures=tuple(failures),
        stacks=tuple(shown),
        suspected=suspected,
    )


def _add_ended(ordered: tuple[Failure, ...], stacks: Iterable[Stack]) -> tuple[Failure, ...]:
    """Add to the root cause what all nodes know of ranks that have ended without a failure."""
    failed = {failure.global_rank for failure in ordered}
    views = (stack.view for stack in stacks if stack.view is not None)
    ended = {view.global_rank for view in views if view.state == ENDED} - failed
    return (add_early_exits(ordered[0], ended), *ordered[1:]) if ordered else ()


def _count_json_bytes(text: str) -> int:
    return len(json.dumps(text))


def _shorten(failure: Failure) -> Failure:
    exception = failure.exception[:_SHORT_CHARS] if failure.exception else None
    return replace(failure, traceback=None, exception=exception, reason=failure.reason[:_SHORT_CHARS], stderr_tail=())


def _renew_cause(final: FinalFailure, ordered: tuple[Failure, ...]) -> FinalFailure:
    """Describe the root cause as it is known now. If several fail at once, another may have been reported first.

    This does not apply if the final failure is unknown: after a takeover only failures that it caused may be known.
    """
    is_known = any(failure.global_rank == final.global_rank for failure in ordered)
    if not is_known or ordered[0].collateral:
        return final
    return FinalFailure(cause=describe_cause(ordered), global_rank=ordered[0].global_rank, verdict=final.verdict)
