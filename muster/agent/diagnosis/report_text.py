"""Formats a failed job's report, and stacks, as text for people."""

import textwrap
import time
from collections.abc import Iterable, Iterator

from muster._shared.causes import UNKNOWN, name_class
from muster._shared.contract import show_controls
from muster._shared.job_view import format_rate
from muster._shared.reports import Failure, OomEvidence, RankProgress, Report, Stack, format_size, name_ranks
from muster.agent.diagnosis.root_cause import find_kind, find_root
from muster.agent.diagnosis.stacks import group_stacks
from muster.agent.diagnosis.tracebacks import find_place, remove_traceback

_STACK_LINES = 30
_BRIEF_CHARS = 160
_LISTED = 16
"""The most groups of other failures, or of stacks, that are printed; the rest is counted."""


def format_report(report: Report, *, has_colour: bool = False, printed_as: str | None = None, columns: int = 70) -> str:
    """Format one page without a final newline: the root cause, what it made fail, and the stacks of the others.

    Args:
        report: the job's.
        has_colour: whether the headline is red.
        printed_as: the prefix of the root cause's lines on this console, which already has its traceback. None means
            that this console does not have it, or the reader may not see it, so the page shows it.
        columns: the width of the page. Texts without a blank may be wider.
    """
    root = find_root(report)
    headline = format_headline(report, columns)
    shown = [show_controls(line) for line in headline]
    lines = ["=" * columns, *headline]
    if report.max_restarts and not report.reason.endswith(" used"):  # "all 3 restarts are used"
        most = "1 restart" if report.max_restarts == 1 else f"{report.max_restarts} restarts"
        lines.append(f"after {report.attempt} of {most}")
    lines.append("-" * columns)
    if root is not None and root.collateral:  # the headline names the cause
        lines += _format_others("Ended because of it", list(report.failures), columns, with_end=True)
    elif root is not None:
        same = [failure for failure in report.failures if failure is not root and not failure.collateral]
        lines += [_name_root(root, len(same)), *_format_failure(root, printed_as, columns)]
        lines += _format_others("Failed in the same way", same, columns, with_end=False)
        rest = [failure for failure in report.failures if failure is not root and failure.collateral]
        title = "Waited for it" if root.hung else "Ended because of it"
        lines += _format_others(title, rest, columns, with_end=not root.hung)
    for line in report.suspected:
        lines += _wrap("Suspected   : ", line, columns)
    lines += _format_stacks(report, columns)
    lines.append("=" * columns)
    page = show_controls("\n".join(lines))
    return page.replace("\n".join(shown), "\n".join(map(_paint_red, shown)), 1) if has_colour else page


def format_headline(report: Report, columns: int) -> list[str]:
    """Return the lines that say what failed and why, as wide as the page."""
    name = "" if report.run_id == "none" else f"{report.run_id}: "  # torchrun's default
    text = f"JOB FAILED  {name}{report.reason}"
    return textwrap.wrap(text, columns, break_long_words=False, break_on_hyphens=False) or [text]


def _paint_red(line: str) -> str:
    return f"\x1b[1;31m{line}\x1b[0m"


def _name_root(root: Failure, same: int) -> str:
    if root.check:
        return f"Root cause (found by the {root.check.feature})"
    if root.hung:
        return "Root cause (the rank that the others wait for)" if root.blocking and not same else "Hung"
    return "Root cause (the first of several that failed in the same way)" if same else "Root cause (the first failure)"


def _format_failure(failure: Failure, printed_as: str | None, columns: int) -> Iterator[str]:
    place = f"{failure.global_rank} (local rank {failure.local_rank} on node {failure.node})"
    yield from _wrap(*(("  node      : ", f"{failure.node}") if failure.check else ("  rank      : ", place)), columns)
    yield f"  host      : {failure.host}"
    yield from _wrap("  time      : ", f"{_format_time(failure.time_s)} on that host's clock", columns)
    if failure.check:
        yield from _wrap("  check     : ", failure.check.name, columns)
        yield from _wrap("  found     : ", failure.reason, columns)
        if failure.cause and failure.cause != UNKNOWN:
            yield from _wrap("  cause     : ", describe_class(failure), columns)
        return
    end = "hung, then was stopped" if failure.hung else failure.describe_end()
    if failure.exception and failure.signal == "SIGTERM":
        end = "raised the exception below, and got SIGTERM before it had ended"
    yield from _wrap("  process   : ", end + (f" (pid {failure.pid})" if failure.pid else ""), columns)
    step = _describe_last_step(failure)
    if step is not None:
        yield from _wrap("  step      : ", ", ".join((step, *format_values(failure.values))), columns)
    for label, text in (("  cause     : ", describe_class(failure)), ("  next      : ", failure.advice)):
        yield from _wrap(label, text, columns) if text else ()
    if failure.oom is not None:
        yield from _wrap("  memory    : ", describe_oom(failure.oom), columns)
    if failure.traceback and printed_as is not None:
        yield from _refer_to_traceback(failure, failure.traceback, printed_as, columns)
    else:
        yield from _format_texts(failure, columns)
        if printed_as == "" and failure.exit_code is not None and not failure.stderr_tail:
            yield from _wrap("  stderr    : ", "above, if any; with --tee 2 its last lines are also here", columns)
    if failure.log_path:
        yield f"  log       : {failure.log_path}"
    if failure.error_file:
        yield f"  error file: {failure.error_file}"


def _describe_last_step(failure: Failure) -> str | None:
    if failure.step is not None:
        return describe_step(failure.step, failure.total_steps, None)
    if failure.optimizer_steps:
        return f"{failure.optimizer_steps} since the process began (by optimizer)"
    if failure.saved_step is not None:
        return f"none in this attempt; the last saved step is {failure.saved_step}"
    return "none in this attempt" if failure.reports_steps else None


def _refer_to_traceback(failure: Failure, traceback: str, printed_as: str, columns: int) -> Iterator[str]:
    """Name what was raised and where; the rest is further up on the same console."""
    if failure.exception:
        yield from _wrap("  exception : ", failure.exception, columns)
    place = find_place(traceback)
    if place:
        yield from _wrap("  raised at : ", ", in ".join(place), columns)
    yield from _wrap("  traceback : ", f"above, in the lines {printed_as}" if printed_as else "above", columns)


def _format_texts(failure: Failure, columns: int) -> Iterator[str]:
    """Return the traceback, and the last lines of stderr without it."""
    if failure.traceback:
        yield from (f"    {line}".rstrip() for line in failure.traceback.splitlines())
    elif failure.exception:
        yield from _wrap("  exception : ", failure.exception, columns)
    tail = remove_traceback(failure.stderr_tail, failure.exception, failure.traceback)
    if any(line.strip() for line in tail):
        yield "  last lines of stderr:"
        yield from (f"    | {line}".rstrip() for line in tail)


def _wrap(label: str, text: str, columns: int) -> Iterator[str]:
    """Return one field, with its further lines indented below the first."""
    width = max(columns, len(label) + 20)
    for paragraph in text.splitlines() or [""]:
        for line in textwrap.wrap(paragraph, width - len(label), break_long_words=False, break_on_hyphens=False) or [
            ""
        ]:
            yield label + line
            label = " " * len(label)


def describe_class(failure: Failure) -> str:
    """Describe the class of the failure's cause, and its evidence if the report does not show that anyway."""
    name, evidence = name_class(failure.cause), failure.evidence
    is_shown = not evidence or evidence in (failure.exception or "") or evidence in failure.reason or failure.oom
    return name if is_shown else f"{name} ({evidence})"


def describe_oom(oom: OomEvidence) -> str:
    """Describe the evidence in one line; a guess is called one."""
    figures = [
        f"{what} {format_size(size, 2)}"
        for what, size in (("limit", oom.limit_bytes), ("peak", oom.peak_bytes))
        if size is not None
    ]
    source = ", ".join([*figures, *([f"from {oom.source}"] if oom.source else [])])
    if oom.certain:
        return f"the OOM killer killed a process in this node's cgroup ({source})"
    return f"possibly the OOM killer: a guess ({source})"


def _format_others(title: str, failures: list[Failure], columns: int, *, with_end: bool) -> Iterator[str]:
    """Print ranks of one node that ended in the same way on one line."""
    if not failures:
        return
    yield title
    groups: dict[tuple[int, str], list[Failure]] = {}
    for failure in failures:
        groups.setdefault((failure.node, find_kind(failure) or failure.describe_end()), []).append(failure)
    for members in list(groups.values())[:_LISTED]:
        first, ranks = members[0], name_ranks(member.global_rank for member in members)
        end = f": {_describe_briefly(first, plural=len(members) > 1)}" if with_end else ""
        yield from _wrap("  ", f"{ranks} (node {first.node}, {first.host}){end}", columns)
    yield from _format_rest(len(groups) - _LISTED, "such line")


def _describe_briefly(failure: Failure, *, plural: bool) -> str:
    """Return how the failure ended the worker, or the beginning of its exception."""
    if not failure.exception:
        return failure.describe_end(plural=plural)
    text = failure.exception.splitlines()[0]
    if len(text) <= _BRIEF_CHARS:
        return text
    beginning = text[:_BRIEF_CHARS]
    return f"{beginning.rpartition(' ')[0] or beginning} ..."  # whole words


def _format_stacks(report: Report, columns: int) -> Iterator[str]:
    groups = group_stacks(report.stacks)
    if not groups:
        return
    yield "-" * columns
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


def _format_time(time_s: float) -> str:
    whole = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
    return f"{whole}.{int(time_s % 1 * 1000):03d} {time.strftime('%z', time.localtime(time_s))}"


def format_stacks(stacks: Iterable[Stack], *, missing: int) -> Iterator[str]:
    """Format stacks for the console, equal ones once; `missing` workers gave none."""
    for ranks, text in group_stacks(stacks):
        yield f"stacks of {name_ranks(ranks)}:"
        yield from (f"  {line}" for line in text.splitlines())
    if missing > 0:
        yield f"{missing} worker{'s' if missing > 1 else ''} gave no stack: not Python, stopped, or just started"


def describe_step(step: int | None, total: int | None, optimizer_steps: int | None) -> str | None:
    """Describe a rank's progress by its reports, or else by its optimizer; None if it has done no step.

    Args:
        step: the last step that it has reported.
        total: how many steps it expects.
        optimizer_steps: the steps that its busiest optimizer has done.
    """
    if step is not None:
        return f"{step} of {total}" if total else f"{step}"
    return f"{optimizer_steps} (by optimizer)" if optimizer_steps else None


def describe_progress(progress: RankProgress) -> str | None:
    """Describe a rank's progress, rate and values: "812 of 1000, 7.9 a second, loss 0.31"; else None."""
    step = describe_step(progress.step, progress.total, progress.optimizer_steps)
    if step is None:
        return None
    rate = (f"{format_rate(progress.rate)} a second",) if progress.rate else ()
    return ", ".join((step, *rate, *format_values(progress.values)))


def format_values(values: Iterable[tuple[str, str]]) -> list[str]:
    """Format each value as `loss 0.31`."""
    return [f"{name} {text}" for name, text in values]


def format_steps(progress: Iterable[RankProgress]) -> Iterator[str]:
    """Format the steps of ranks, equal ones on one line, with what the lowest of them shows."""
    groups: dict[str, list[RankProgress]] = {}
    for each in progress:
        step = describe_step(each.step, each.total, each.optimizer_steps)
        if step is not None:
            groups.setdefault(step, []).append(each)
    for step, ranks in list(groups.items())[:_LISTED]:
        shown = ", ".join((step, *format_values(ranks[0].values)))
        yield f"{name_ranks(each.global_rank for each in ranks)}: step {shown}"
    yield from _format_rest(len(groups) - _LISTED, "such line")
