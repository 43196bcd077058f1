"""Decides what follows from a failure: a restart here, a restart elsewhere, or a stop. Pure.

The defaults favour a restart. Without a rule of the user (`--on`, `_shared.policy`) the job stops only when

- a start-up error of the class `usage` comes twice in a row, each time within seconds, or
- the same cause comes at the same place twice in a row, it is known that neither attempt has done a step, and its class
  does not come from outside (only if a scheduler has started the job: on a command line `--max-restarts` means what it
  means to torchrun), or
- a check before the start has found what the same nodes would find again, and no spare node can take the place of that
  node, or
- no restart is left, or a hang ends the job (--hang-action stop), or a rank has given up.

It is known that a rank has done no step only if the script reports its steps. `Restarts` is what the leader keeps of
earlier attempts. A completed step, or a checkpoint, resets its counts.

An attempt is counted when the next round is formed (`formation`) and refunded when a lost node explains the failure
(`failures.refund_attempt`).
"""

import zlib
from typing import TYPE_CHECKING

from muster._shared.causes import DEVICE, HOST_OOM, NETWORK, PREEMPTION, TIME_LIMIT
from muster._shared.records import record, replace
from muster._shared.reports import Failure, FinalFailure
from muster.agent.diagnosis.root_cause import describe_failure, find_kind
from muster.agent.rendezvous.restarts import CauseCount, Restarts

if TYPE_CHECKING:
    from muster._shared.policy import Rule

_FROM_OUTSIDE = (HOST_OOM, DEVICE, NETWORK, PREEMPTION, TIME_LIMIT)
"""Classes that the unchanged program may survive the next time, although it has met them twice at one place."""
MOST_CAUSES = 8
"""The most causes whose counts are kept."""


@record
class VerdictRules:
    """The settings with which the job was started."""

    max_restarts: int = 0
    flag: str = "--max-restarts"
    """The name of this limit that the user knows."""
    stops_on_hang: bool = False
    """Whether no attempt follows a hang (--hang-action stop)."""
    stops_on_repeat: bool = False
    """Whether the second rule above applies."""
    policy: str = ""
    """The value of --on."""


@record
class Verdict:
    """What follows from one failure."""

    final: FinalFailure | None = None
    """Why the job ends; None if another attempt follows.

    With `is_elsewhere`, it ends only if no spare can replace the node.
    """
    is_elsewhere: bool = False
    """Whether the rank's node should leave if another can replace it."""
    is_wanted: bool = False
    """Whether a rule of the user, or the rank itself, demands it; then a node that the scheduler starts instead is
    enough."""
    is_free: bool = False
    """Whether it uses none of the restarts that are allowed."""
    restarts: Restarts = Restarts()
    """What is known of attempts, including this failure."""


def decide_verdict(
    root: Failure | None, restarts: Restarts, attempt: int, rules: VerdictRules, *, has_stepped: bool = False
) -> Verdict:
    """Decide what follows from a failure.

    Args:
        root: the root cause; None if unknown.
        restarts: what is known of earlier attempts.
        attempt: how many restarts there were.
        rules: the job's.
        has_stepped: whether a rank of the job is known to have done a step in this attempt, or all have saved a
            checkpoint.
    """
    has_stepped = has_stepped or (root is not None and _has_stepped(root))
    before = restarts.forget_causes() if has_stepped else restarts
    counted = _count_cause(root, before, has_stepped=has_stepped)
    verdict = _find_verdict(root, before, counted, rules)
    free = counted.free + (1 if verdict.is_free else 0)
    verdict = replace(verdict, restarts=replace(counted, free=free))
    if verdict.final is not None or verdict.is_free or attempt - restarts.free < rules.max_restarts:
        return verdict
    if rules.max_restarts:
        reason = "its one restart is used" if rules.max_restarts == 1 else f"all {rules.max_restarts} restarts are used"
    else:
        reason = f"no restarts are allowed ({rules.flag} 0)"
    return replace(verdict, final=_end(root, reason), is_elsewhere=False)


def _find_verdict(root: Failure | None, before: Restarts, counted: Restarts, rules: VerdictRules) -> Verdict:
    """Return the verdict, regardless of whether a restart is left."""
    if root is None:
        return Verdict()
    if root.requested_verdict == "stop":
        return Verdict(final=_end(root, f"rank {root.global_rank} has given up: a restart is not wanted"))
    if root.requested_verdict == "elsewhere":
        return Verdict(is_elsewhere=True, is_wanted=True)
    is_repeat = _is_repeat(root, before, counted)
    rule = _find_rule(root, rules.policy, is_repeat=is_repeat) if rules.policy else None
    if rule is not None:
        return _follow_rule(root, rule, counted.causes[-1].count)
    last = before.causes[-1] if before.causes else None
    if root.early and last is not None and last.early and last.signature == counted.causes[-1].signature:
        reason = "the same failure right after the start twice in a row: not retried without --on 'usage: restart'"
        return Verdict(final=_end(root, reason))
    if root.check:
        reason = f"the same nodes would find it again: not retried ({root.check.advice})"
        return Verdict(final=_end(root, reason), is_elsewhere=True, is_free=True)
    if rules.stops_on_hang and root.hung:
        return Verdict(final=_end(root, "a hang ends the job (--hang-action stop)"))
    if is_repeat and rules.stops_on_repeat and root.cause not in _FROM_OUTSIDE:
        reason = (
            "no step, and the same failure at the same place twice in a row: not retried without --on 'repeat: restart'"
        )
        return Verdict(final=_end(root, reason))
    return Verdict(is_elsewhere=root.cause == DEVICE)


def _follow_rule(root: Failure, rule: "Rule", count: int) -> Verdict:
    from muster._shared.policy import ELSEWHERE, STOP

    if rule.verdict == STOP:
        return Verdict(final=_end(root, f"--on '{rule.text}'"))
    if rule.most is not None and count > rule.most:
        times = "once" if rule.most == 1 else f"{rule.most} times"
        return Verdict(final=_end(root, f"restarted {times} without progress since (--on '{rule.text}')"))
    is_elsewhere = rule.verdict == ELSEWHERE
    return Verdict(is_elsewhere=is_elsewhere, is_wanted=is_elsewhere, is_free=rule.is_free)


def _find_rule(root: Failure, policy: str, *, is_repeat: bool) -> "Rule | None":
    from muster._shared.policy import Happened, find_rule, parse_policy
    from muster.agent.diagnosis.classes import name_exception

    return find_rule(
        parse_policy(policy),
        Happened(
            cause=root.cause,
            exit_code=root.exit_code,
            signal=root.signal or "",
            exception=name_exception(root),
            is_repeat=is_repeat,
        ),
    )


def _end(root: Failure | None, reason: str) -> FinalFailure:
    global_rank = None if root is None else root.global_rank
    return FinalFailure(cause=describe_failure(root), global_rank=global_rank, verdict=reason)


# -- what is kept of an attempt ---------------------------------------------------------------------------------------


def find_signature(root: Failure) -> str:
    """Return what is equal for one cause at one place, or position in the data: its class, and a checksum."""
    exception = (root.exception or "").split("\n", 1)[0]
    is_exact = root.early or root.cause == "data"
    what = exception if is_exact else find_kind(root)
    what = what or root.signal or f"exit code {root.exit_code}: {root.reason}".rstrip(": ")
    where = _find_place(root)
    return f"{root.cause} {zlib.crc32(f'{what} at {where}'.encode(errors='replace')):08x}"


def _find_place(root: Failure) -> str:
    from muster.agent.diagnosis.tracebacks import find_place

    return ", in ".join(find_place(root.traceback or "") or ())


def _has_stepped(root: Failure) -> bool:
    return root.step is not None or bool(root.optimizer_steps)


def _count_cause(root: Failure | None, before: Restarts, *, has_stepped: bool) -> Restarts:
    """Count this failure, which becomes the last cause."""
    has_reported = before.has_reported or has_stepped
    if root is None:
        return replace(before, has_reported=has_reported)
    signature = find_signature(root)
    known = next((each.count for each in before.causes if each.signature == signature), 0)
    others = tuple(each for each in before.causes if each.signature != signature)
    counted = CauseCount(
        signature=signature,
        count=known + 1,
        is_stepless=not has_stepped and (has_reported or root.reports_steps),
        early=root.early,
    )
    return replace(before, causes=(*others, counted)[-MOST_CAUSES:], has_reported=has_reported)


def _is_repeat(root: Failure, before: Restarts, counted: Restarts) -> bool:
    """Return whether this is the cause of the attempt before, at the same place, and neither has done a step."""
    last, now = before.causes[-1:], counted.causes[-1]
    is_same = bool(last) and last[0].signature == now.signature and last[0].is_stepless and now.is_stepless
    return is_same and (bool(_find_place(root)) or root.cause == "data")
