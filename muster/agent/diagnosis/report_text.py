"""A failed job's report, and stacks, as text for people."""

import time
from collections.abc import Iterable, Iterator, Mapping

from muster.agent.diagnosis.report import Failure, OomEvidence, Report
from muster.agent.diagnosis.root_cause import find_root
from muster.agent.diagnosis.stacks import group_stacks

_WIDTH = 88
_STACK_LINES = 30
_LISTED = 16
"""At most so many groups of other failures, or of stacks, are printed; the rest is counted."""


def format_report(report: Report) -> str:
    """Format one page: the root cause, what failed because of it, the stacks of the others. Ends without a newline."""
    root = find_root(report)
    lines = ["=" * _WIDTH, f"JOB FAILED  {report.run_id}: {report.reason}"]
    if report.max_restarts:
        lines.append(f"after {report.attempt} of {report.max_restarts} restarts")
    lines.append("-" * _WIDTH)
    if root is not None:
        lines += ["Root cause (the first failure)", *_format_failure(root)]
        lines += _format_others([failure for failure in report.failures if failure is not root])
    lines += _format_stacks(report)
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _format_failure(failure: Failure) -> Iterator[str]:
    yield f"  rank      : {failure.global_rank} (local rank {failure.local_rank} on node {failure.node})"
    yield f"  host      : {failure.host}"
    yield f"  time      : {_format_time(failure.time_s)} on that host's clock"
    yield f"  ended     : {describe_end(failure)}" + (f" (pid {failure.pid})" if failure.pid else "")
    if failure.oom is not None:
        yield f"  memory    : {describe_oom(failure.oom)}"
    if failure.exception:
        yield f"  exception : {_indent_rest(failure.exception, 14)}"
    if failure.traceback:
        yield from (f"    {line}" for line in failure.traceback.splitlines())
    tail = _list_other_stderr(failure)
    if tail:
        yield "  last lines of stderr:"
        yield from (f"    | {line}" for line in tail)
    if failure.log_path:
        yield f"  log       : {failure.log_path}"
    if failure.error_file:
        yield f"  error file: {failure.error_file}"


def describe_end(failure: Failure) -> str:
    """`exit code 1`, `killed by SIGKILL`, or the reason when no process has exited."""
    if failure.reason:
        return failure.reason
    if failure.signal:
        return f"killed by {failure.signal}"
    return "did not start" if failure.exit_code is None else f"exit code {failure.exit_code}"


def describe_oom(oom: OomEvidence) -> str:
    """Describe the evidence in one line; a guess is called one."""
    figures = [
        f"{what} {size / (1 << 30):.2f} GiB"
        for what, size in (("limit", oom.limit_bytes), ("peak", oom.peak_bytes))
        if size is not None
    ]
    source = ", ".join([*figures, *([f"from {oom.source}"] if oom.source else [])])
    if oom.certain:
        return f"the OOM killer killed a process in this node's cgroup ({source})"
    return f"possibly the OOM killer: a guess ({source})"


def _format_others(failures: list[Failure]) -> Iterator[str]:
    own = [failure for failure in failures if not failure.collateral]
    collateral = [failure for failure in failures if failure.collateral]
    if own:
        yield "Failed independently"
        yield from _group_failures(own)
    if collateral:
        yield "Ended because of it"
        yield from _group_failures(collateral)


def _group_failures(failures: list[Failure]) -> Iterator[str]:
    """Print ranks of one node that ended in the same way on one line."""
    groups: dict[tuple[int, str, str], list[int]] = {}
    for failure in failures:
        how = describe_end(failure) + (f", {failure.exception.splitlines()[0]}" if failure.exception else "")
        groups.setdefault((failure.node, failure.host, how), []).append(failure.global_rank)
    for (node, host, how), ranks in list(groups.items())[:_LISTED]:
        yield f"  {name_ranks(ranks)} (node {node}, {host}): {how}"
    yield from _format_rest(len(groups) - _LISTED, "such line")


def _format_stacks(report: Report) -> Iterator[str]:
    groups = group_stacks({stack.global_rank: stack.text for stack in report.stacks})
    if not groups:
        return
    yield "-" * _WIDTH
    yield "Python stacks of the live workers before they were stopped"
    for ranks, text in groups[:_LISTED]:
        lines = text.splitlines()
        yield f"  {name_ranks(ranks)}:"
        yield from (f"    {line}" for line in lines[:_STACK_LINES])
        yield from (f"  {line}" for line in _format_rest(len(lines) - _STACK_LINES, "line"))
    yield from _format_rest(len(groups) - _LISTED, "stack")


def _format_rest(count: int, what: str) -> Iterator[str]:
    if count > 0:
        yield f"  ... and {count} more {what}{'s' if count > 1 else ''}"


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0-3, 8`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(spans) > 1 or spans[0][0] != spans[0][1] else ''} {text}"


def _list_other_stderr(failure: Failure) -> list[str]:
    """The stderr lines that are not in the traceback above them."""
    shown = set((failure.traceback or "").splitlines()) | {failure.exception}
    return [line for line in failure.stderr_tail if line not in shown]


def _indent_rest(text: str, width: int) -> str:
    return text.replace("\n", "\n" + " " * width)


def _format_time(time_s: float) -> str:
    whole = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
    return f"{whole}.{int(time_s % 1 * 1000):03d} {time.strftime('%z', time.localtime(time_s))}"


def format_stacks(by_rank: Mapping[int, str], *, missing: int) -> Iterator[str]:
    """Format stacks by global rank for the console, equal ones once; `missing` workers gave none."""
    for ranks, text in group_stacks(by_rank):
        yield f"stacks of {name_ranks(ranks)}:"
        yield from (f"  {line}" for line in text.splitlines())
    if missing > 0:
        yield f"{missing} worker{'s' if missing > 1 else ''} gave no stack: not Python, stopped, or just started"
