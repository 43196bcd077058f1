"""What all ranks do at one step: they stop in a drain, or the drain is withdrawn as a whole; and they save. Pure.

This is the leader's part.

A rank asks `should_stop(i)` about rising steps, and waits once `i` has reached the ceiling of its node
(`rendezvous.drain_ceiling`). Each member reports its ceiling and how far its ranks have asked. From then on none of its
ranks passes the ceiling, so that every rank can still stop at any step at or above all ceilings:

- Once all members have reported, or their workers have ended, the leader commits to the smallest such step that every
  asking rank will ask about: its last step plus a multiple of its stride.
- A rank that has not asked yet is taken to ask about the steps that all others ask about. It may start late: it sees
  the committed step.
- The leader withdraws the drain if there is no such step, or if a member says that none can be agreed on with a rank.
- The member that asked for the drain ends it at the deadline: it leaves, and that breaks the round.
- When all workers have ended at the step and `min` members stay, the round is broken as drained: those that asked for
  the drain leave, the others form the next round. Otherwise the job ends for all of them, and may be run again.
- A member that is lost ends the round, and the drain with it. There is no other way out: no rank waits by a clock of
  its own, because ranks that give up one by one stop at different steps.

Each member reports a step once all of its ranks have saved it. Ranks save at their own pace, so that reports of two
steps can be on their way at once. A checkpoint is complete as soon as all members of the round have reported its step,
also while the round is being stopped. A member that is lost before it has reported leaves the one before as the last.
"""

from collections.abc import Iterable
from math import gcd

from muster._contract import StatusPageLayout
from muster.agent.rendezvous.consensus.actions import (
    Action,
    BeginDrain,
    CommitDrain,
    CompleteCheckpoint,
    Notify,
    WithdrawDrain,
)
from muster.agent.rendezvous.consensus.events import DrainAsked, DrainReported, Saved, Succeeded
from muster.agent.rendezvous.consensus.failures import break_round, has_enough_members
from muster.agent.rendezvous.consensus.state import Decision, Drain, JobState, RoundRunning, Saving, describe_member
from muster.agent.rendezvous.interface import BreakKind, DrainReport
from muster.agent.round import Checkpoint
from muster.agent.runtime.persistent import PersistentSet
from muster.agent.runtime.records import replace

SAVING_LIMIT = 4
"""How many steps are counted at once. A member that is further behind than that reports a later one."""

NO_COMMON_STEP = "there is no step that all ranks will ask about"


def on_drain_asked(state: JobState, event: DrainAsked, now_s: float) -> Decision:
    """Begin a drain, unless one has begun already: then its answer serves this member, too."""
    phase = state.phase
    if event.round_number != state.round_number or event.id not in state.assignments:
        return state, ()
    if not isinstance(phase, RoundRunning):
        return state, ()  # the round has ended, and its members know or will
    if phase.drain is None and event.id in phase.succeeded:
        return state, ()
    if phase.drain is not None:
        drain = replace(phase.drain, leaving=phase.drain.leaving.with_item(event.id))
        return replace(state, phase=replace(phase, drain=drain)), ()
    number = phase.drains + 1
    reason = f"{describe_member(state, state.members[event.id])} {event.reason}"
    if number > StatusPageLayout.MAX_DRAIN:
        withdrawal = WithdrawDrain(
            ids=(event.id,), round_number=state.round_number, drain=0, reason="too many drains in one round"
        )
        return state, (withdrawal,)
    ids = tuple(each for each in state.assignments if each not in phase.succeeded)
    drain = Drain(
        number=number, reason=reason, begun_s=now_s, ids=PersistentSet(ids), leaving=PersistentSet((event.id,))
    )
    begin = BeginDrain(ids=ids, round_number=state.round_number, drain=number, limit_s=event.limit_s)
    return replace(state, phase=replace(phase, drain=drain, drains=number)), (begin,)


def on_drain_reported(state: JobState, event: DrainReported, now_s: float) -> Decision:
    """Record a member's report, and decide the drain if it was the last one."""
    phase = state.phase
    if not isinstance(phase, RoundRunning) or event.round_number != state.round_number or phase.drain is None:
        return state, ()
    drain = phase.drain
    if event.drain != drain.number or event.id not in drain.ids or drain.step is not None:
        return state, ()
    drain = replace(drain, reports=drain.reports.with_item(event.id, event.report))
    return _decide_drain(replace(state, phase=replace(phase, drain=drain)), now_s)


def on_workers_ended(state: JobState, phase: RoundRunning, event: Succeeded, now_s: float) -> Decision:
    """All workers of a member have ended during a drain: they hold nothing up.

    Args:
        state: before the event.
        phase: with the event applied.
        event: which member, and its rank that ended last.
        now_s: now.
    """
    drain = phase.drain
    if drain is None:
        return replace(state, phase=phase), ()
    if event.drained_rank is not None:
        drain = replace(drain, last_rank=event.drained_rank)
    state = replace(state, phase=replace(phase, drain=drain))
    if drain.step is None:
        return _decide_drain(state, now_s)
    if drain.last_rank is None or len(phase.succeeded) < len(state.assignments):
        return state, ()
    took_s = now_s - drain.begun_s
    line = f"all ranks have stopped at step {drain.step} and ended, {took_s:.1f} s after the drain began; "
    notify = Notify(text=f"{line}rank {drain.last_rank} was the last")
    if phase.loss_wait_until_s is not None or not has_enough_members(state, drain):
        return state, (notify,)
    state, broken = break_round(state, BreakKind.DRAINED, _describe_leaving(state, drain), now_s)
    return state, (notify, *broken)


def _describe_leaving(state: JobState, drain: Drain) -> str:
    """Which nodes leave after the drain's step: "node 1 (host-b) leaves after step 41, the job continues"."""
    names = [describe_member(state, state.members[each]) for each in drain.leaving if each in state.members]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{shown} {'leaves' if len(names) == 1 else 'leave'} after step {drain.step}: the job continues"


def _decide_drain(state: JobState, now_s: float) -> Decision:
    """Commit or withdraw the drain once that can be decided."""
    phase = state.phase
    if not isinstance(phase, RoundRunning) or phase.drain is None:
        return state, ()
    drain = phase.drain
    refusal = next((each.refusal for each in drain.reports.values() if each.refusal is not None), None)
    if refusal is not None:
        return _withdraw(state, phase, drain, refusal)
    if any(each not in drain.reports and each not in phase.succeeded for each in drain.ids):
        return state, ()
    if not _list_live(phase, drain):
        return replace(state, phase=replace(phase, drain=None)), ()
    reports = [report for each, report in drain.reports.items() if each not in phase.succeeded]
    step = choose_step(reports)
    if step is None:
        return _withdraw(state, phase, drain, NO_COMMON_STEP)
    commit = CommitDrain(ids=tuple(state.assignments), round_number=state.round_number, drain=drain.number, step=step)
    line = describe_commit(drain.reason, step, reports, now_s - drain.begun_s)
    return replace(state, phase=replace(phase, drain=replace(drain, step=step))), (commit, Notify(text=line))


def _withdraw(state: JobState, phase: RoundRunning, drain: Drain, reason: str) -> Decision:
    withdrawal = WithdrawDrain(
        ids=_list_live(phase, drain), round_number=state.round_number, drain=drain.number, reason=reason
    )
    actions: tuple[Action, ...] = (withdrawal, Notify(text=f"{drain.reason}, but {reason}: no common last step"))
    return replace(state, phase=replace(phase, drain=None)), actions


def _list_live(phase: RoundRunning, drain: Drain) -> tuple[str, ...]:
    return tuple(each for each in drain.ids if each not in phase.succeeded)


def describe_commit(reason: str, step: int, reports: Iterable[DrainReport], took_s: float) -> str:
    """The line about a committed drain: why, the step, how long the agreement took, and which rank is behind."""
    last = min((rank for report in reports for rank in report.ranks), key=lambda rank: rank.asked, default=None)
    behind = "" if last is None else f"; rank {last.global_rank} is the last, at step {last.asked}"
    return f"{reason}: all ranks stop at step {step}, agreed in {took_s * 1000:.0f} ms{behind}"


def choose_step(reports: Iterable[DrainReport]) -> int | None:
    """The smallest step at or above every ceiling that every asking rank will ask about; None: there is none.

    A rank asks about its last step plus multiples of its stride, so all of them meet where these congruences do.
    """
    found = list(reports)
    ranks = [rank for report in found for rank in report.ranks]
    if not ranks:
        return None
    remainder, modulus = 0, 1
    cadences = dict.fromkeys((each.asked % each.stride, each.stride) for each in ranks)
    if len(cadences) > 1 and any(report.has_silent for report in found):
        return None
    for cadence in cadences:
        merged = _merge(remainder, modulus, *cadence)
        if merged is None:
            return None
        remainder, modulus = merged
    least = max(*(report.ceiling for report in found), *(rank.asked for rank in ranks))
    step = least + (remainder - least) % modulus
    return step if step <= StatusPageLayout.MAX_STEP else None


def _merge(remainder: int, modulus: int, other_remainder: int, other_modulus: int) -> tuple[int, int] | None:
    """Merge two congruences into one (the Chinese remainder theorem); None: no number satisfies both."""
    common = gcd(modulus, other_modulus)
    if (other_remainder - remainder) % common:
        return None
    factor = other_modulus // common
    times = (other_remainder - remainder) // common * pow(modulus // common, -1, factor) % factor
    product = modulus * factor
    return (remainder + times * modulus) % product, product


def on_saved(state: JobState, event: Saved) -> Decision:
    """Count a member's report; with the last one the checkpoint is complete."""
    assignment = state.assignments.get(event.id)
    if assignment is None or event.round_number != state.round_number:
        return state, ()
    counted = tuple(each for each in state.saving if each.round_number == state.round_number)
    others = tuple(each for each in counted if each.step != event.step)
    saving = next((each for each in counted if each.step == event.step), None) or Saving(
        round_number=state.round_number, step=event.step, path_rank=assignment.group_rank
    )
    saving = replace(saving, ids=saving.ids.with_item(event.id))
    if event.path and (not saving.path or assignment.group_rank < saving.path_rank):
        saving = replace(saving, path=event.path, path_rank=assignment.group_rank)
    if len(saving.ids) < len(state.assignments):
        return replace(state, saving=(*others, saving)[-SAVING_LIMIT:]), ()
    state = replace(state, saving=tuple(each for each in others if each.step > event.step))
    if not saving.path:
        return state, ()
    number = 1 if state.checkpoint is None else state.checkpoint.number + 1
    checkpoint = Checkpoint(number=number, step=saving.step, path=saving.path)
    ids = tuple(state.members)
    return replace(state, checkpoint=checkpoint), (CompleteCheckpoint(ids=ids, checkpoint=checkpoint),)
