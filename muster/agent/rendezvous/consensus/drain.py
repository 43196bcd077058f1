"""Decides what all ranks do at one step: stop, save or pause in a drain, unless it is withdrawn as a whole. Pure.

This is the leader's part. It has over 400 lines because requests, the agreement and the answers all change one record,
the drain.

A rank asks `should_stop(i)` about rising steps, and waits once `i` has reached the ceiling of its node
(`rendezvous.drain_ceiling`). Each member reports its ceiling and how far its ranks have asked. From then on none of its
ranks passes the ceiling, so that every rank can still stop at any step at or above all ceilings:

- Once all members have reported, or their workers have ended, the leader commits to the smallest such step that every
  asking rank will ask about: its last step plus a multiple of its stride.
- A rank that has not asked yet is assumed to ask about the steps that all others ask about. It may start late, because
  it sees the committed step.
- The leader withdraws the drain if there is no such step, or if a member says that none can be agreed on with a rank.
- The member that asked for the drain ends it at the deadline: it leaves, and that breaks the round.
- For nodes that join, the leader itself begins a stop. If the ranks do not ask for it, but keep snapshots, they wait
  with the snapshot of one step, and the round breaks when all of them do. If no step can be agreed on, or if the ranks
  take too long, it breaks at once.
- When all workers have ended at the step and `min` members stay, the round is broken as drained: the members that asked
  for the drain leave, and the others form the next round. Otherwise the job ends for all of them, and may be run again.
- A lost member ends the round, and the drain with it. There is no other way out. No rank waits by its own clock,
  because ranks that give up one by one stop at different steps.

A drain has a kind: the ranks stop, save or pause at the step. People ask for all three (`_on_asked`). Then the members
report which ranks are late when the limit is over, and each person gets one answer:

- A stop replaces a drain of another kind. It waits only for a committed checkpoint, because ranks that have begun to
save may wait for the others. If two other requests contradict each other, the first wins.
- A pause that some ranks do not reach is withdrawn. A checkpoint is not, for the reason above.
- After a pause the drain stays until a person resumes the job, or a stop or the end of the round ends it.

Each member reports a step once all of its ranks have saved it. Ranks save at their own pace, so reports of two steps
can be in transit at once. A checkpoint is complete as soon as all members of the round have reported its step, even
while the round is being stopped. If a member is lost before it has reported, the checkpoint before stays the last.
"""

from collections.abc import Iterable
from math import gcd

from muster._shared.contract import AskKind, AskOutcome
from muster._shared.fields import LateRank
from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.records import assert_never, replace
from muster._shared.reports import Answer, Stack
from muster._shared.transitions import expect
from muster.agent.rendezvous.consensus.actions import Action, Notify, RecoveryChanged, Send
from muster.agent.rendezvous.consensus.failures import break_round, has_enough_members
from muster.agent.rendezvous.consensus.state import (
    HANG,
    STANDSTILL,
    Asker,
    Decision,
    Drain,
    JobState,
    RoundRunning,
    Saving,
    WantedDrain,
    WantedStacks,
    describe_member,
    update_recovery,
)
from muster.agent.rendezvous.interface import (
    Asked,
    BreakKind,
    DrainAsked,
    DrainBegun,
    DrainCommitted,
    DrainDone,
    DrainReport,
    DrainReported,
    DrainWithdrawn,
    NoticeKind,
    Saved,
    StacksWanted,
    StoodStill,
)
from muster.agent.rendezvous.report_messages import RequestAnswer, StacksTaken
from muster.agent.round import Checkpoint
from muster.agent.runtime.limits import JOIN_STOP_LIMIT_S
from muster.agent.runtime.persistent import PersistentSet

LATE_LIMIT = 64
_NAMED_LATE = 4
"""The most late ranks in an answer, and the most that its line names."""

SAVING_LIMIT = 4
"""How many steps are counted at once. A member that is further behind will report a later one."""

MOVES = Notify(text="the job goes on and no longer stands still", kind=NoticeKind.STILL_OVER)

NO_COMMON_STEP = "there is no step that all ranks will ask about"

COLLECTIVES_LINE = "torch's own timeout of collectives keeps running"
"""A longer pause may end the job."""


CommonStepMessage = DrainAsked | DrainReported | DrainDone | Asked | StacksTaken | StoodStill | Saved
"""The messages on which this module decides."""


def decide_common_step(state: JobState, sender: str, message: CommonStepMessage, now_s: float) -> Decision:
    """Decide on a message that the table of `decisions` accepts."""
    match message:
        case DrainAsked():
            return _on_drain_asked(state, sender, message, now_s)
        case DrainReported():
            return _on_drain_reported(state, sender, message, now_s)
        case DrainDone():
            return _on_drain_done(state, sender, message, now_s)
        case Asked():
            return _on_asked(state, sender, message, now_s)
        case StacksTaken():
            return _on_stacks_taken(state, sender, message, now_s)
        case StoodStill():
            return _on_stood_still(state, sender, message, now_s)
        case Saved():
            return _on_saved(state, sender, message, now_s)
        case _:
            assert_never(message)


def _on_drain_asked(state: JobState, sender: str, message: DrainAsked, now_s: float) -> Decision:
    """Begin a drain, unless one has begun already, whose answer then serves this member as well."""
    phase = expect(state.phase, RoundRunning)
    if phase.drain is None and sender in phase.succeeded:
        return state, ()
    reason = f"{describe_member(state, state.members[sender])} {message.reason}"
    own = (sender,)
    if phase.drains >= Layout.MAX_DRAIN:
        return state, (_withdraw_from(state, own, 0, "too many drains in one round"),)
    wanted = WantedDrain(kind=Layout.STOP, reason=reason, limit_s=message.limit_s, leaving=own, preempted=own)
    return _want_stop(state, phase, wanted, now_s)


def _on_asked(state: JobState, sender: str, message: Asked, now_s: float) -> Decision:
    """Do what a person asks for, or say why that is not done."""
    phase = state.phase
    asker = Asker(id=sender, request=message.request, kind=message.kind)
    if not isinstance(phase, RoundRunning):
        return state, _refuse((asker,), "the workers are being stopped or started", is_unchanged=True)
    if message.kind is AskKind.STACKS:
        return _want_stacks(state, phase, asker, now_s)
    if message.kind is AskKind.RESUME:
        return _resume(state, phase, asker, now_s)
    if phase.drains >= Layout.MAX_DRAIN:
        return state, _refuse((asker,), "too many drains in one round", is_unchanged=True)
    kind = Layout.KINDS.index(message.kind.value)
    wanted = WantedDrain(kind=kind, reason=f"muster {message.kind.value}", limit_s=message.limit_s, askers=(asker,))
    if kind == Layout.STOP:
        return _want_stop(state, phase, replace(wanted, leaving=tuple(state.members)), now_s)
    drain = phase.drain
    if drain is None:
        return _begin(state, phase, wanted, now_s)
    if drain.queued is not None or drain.kind == Layout.STOP:
        return state, _refuse((asker,), f"the job is being stopped ({_name_stop(drain)})", is_unchanged=True)
    if _is_paused(drain):
        is_same = kind == Layout.PAUSE
        line = f"the job is paused at step {drain.step}{' already' if is_same else ': resume it first'}"
        answer = Answer(outcome=AskOutcome.DONE if is_same else AskOutcome.REFUSED, line=line, step=drain.step)
        return state, _answer((asker,), answer)
    if drain.kind == kind:
        if not drain.askers:
            return state, _refuse_late(drain, (asker,))
        drain = replace(drain, askers=(*drain.askers, asker))
        return replace(state, phase=replace(phase, drain=drain)), ()
    since_s = now_s - drain.begun_s
    line = f"{drain.reason} of {since_s:.1f} s ago is not done yet"
    return state, _refuse((asker,), line, is_unchanged=True)


def _name_stop(drain: Drain) -> str:
    return drain.reason if drain.queued is None else drain.queued.reason


def _is_paused(drain: Drain) -> bool:
    return drain.kind == Layout.PAUSE and drain.step is not None and not drain.askers


def begin_join(state: JobState, phase: RoundRunning, reason: str, now_s: float) -> Decision:
    """Begin a stop for nodes that join, which then take part in the next round. No member leaves with it."""
    if phase.drains >= Layout.MAX_DRAIN:
        return break_round(state, BreakKind.MEMBERSHIP, reason, now_s, is_join=True)
    until_s = now_s + JOIN_STOP_LIMIT_S
    wanted = WantedDrain(kind=Layout.STOP, reason=reason, limit_s=JOIN_STOP_LIMIT_S, until_s=until_s)
    return _begin(state, phase, wanted, now_s)


def check_join(state: JobState, phase: RoundRunning, drain: Drain, now_s: float) -> Decision:
    """Give up a stop for nodes that join if it takes too long, or if they are gone before its step is committed."""
    if now_s >= drain.until_s:
        return _break_for_join(state, drain, "not all ranks have stopped in time", now_s)
    if drain.step is not None or phase.batch_since_s is not None:
        return state, ()
    state = replace(state, phase=replace(phase, drain=None))
    return state, (_withdraw_from(state, _list_live(phase, drain), drain.number, "no node joins any more"),)


def _break_for_join(state: JobState, drain: Drain, why: str, now_s: float) -> Decision:
    """Break the round at once, because its ranks do not stop at one step for the nodes that join."""
    reason = f"{drain.reason}, but {why}: no common last step"
    return break_round(state, BreakKind.MEMBERSHIP, reason, now_s, is_join=True)


def _want_stop(state: JobState, phase: RoundRunning, wanted: WantedDrain, now_s: float) -> Decision:
    """Begin a stop, now or after a checkpoint that is committed."""
    drain = phase.drain
    if drain is None:
        return _begin(state, phase, wanted, now_s)
    if drain.kind == Layout.STOP and not (drain.is_join and drain.step is None):
        leaving = PersistentSet((*drain.leaving, *wanted.leaving))
        drain = replace(drain, askers=(*drain.askers, *wanted.askers), leaving=leaving)
        return replace(state, phase=replace(phase, drain=drain)), ()
    if drain.kind == Layout.CHECKPOINT and drain.step is not None:
        if wanted.askers and not drain.askers:
            return state, _refuse_late(drain, wanted.askers)
        queued = wanted if drain.queued is None else _merge_wanted(drain.queued, wanted)
        return replace(state, phase=replace(phase, drain=replace(drain, queued=queued))), ()
    line = f"the job is stopped instead ({wanted.reason})"
    state, ended = _end(state, phase, drain, Answer(outcome=AskOutcome.REFUSED, line=line), wanted.reason)
    if not isinstance(state.phase, RoundRunning):
        return state, ended
    state, begun = _begin(state, state.phase, wanted, now_s)
    return state, (*ended, *begun)


def _merge_wanted(first: WantedDrain, second: WantedDrain) -> WantedDrain:
    """Combine two stops that wait into one. The limit is that of a preemption, if one of them is one."""
    kept = second if second.preempted and not first.preempted else first
    return replace(
        kept,
        askers=(*first.askers, *second.askers),
        leaving=tuple(dict.fromkeys((*first.leaving, *second.leaving))),
        preempted=tuple(dict.fromkeys((*first.preempted, *second.preempted))),
    )


def _begin(state: JobState, phase: RoundRunning, wanted: WantedDrain, now_s: float) -> Decision:
    number = phase.drains + 1
    ids = tuple(each for each in state.assignments if each not in phase.succeeded)
    drain = Drain(
        number=number,
        kind=wanted.kind,
        askers=wanted.askers,
        reason=wanted.reason,
        begun_s=now_s,
        ids=PersistentSet(ids),
        leaving=PersistentSet(wanted.leaving),
        until_s=wanted.until_s,
        obstacle=wanted.obstacle,
    )
    begun = DrainBegun(
        round_number=state.round_number,
        drain=number,
        limit_s=wanted.limit_s,
        kind=wanted.kind,
        is_asked=bool(wanted.askers),
        is_join=drain.is_join,
    )
    return replace(state, phase=replace(phase, drain=drain, drains=number)), (Send(ids=ids, message=begun),)


def _withdraw_from(state: JobState, ids: tuple[str, ...], drain: int, reason: str) -> Send:
    return Send(ids=ids, message=DrainWithdrawn(round_number=state.round_number, drain=drain, reason=reason))


def _end(state: JobState, phase: RoundRunning, drain: Drain, answer: Answer, reason: str) -> Decision:
    """End a drain: waiting ranks continue. A stop that waits for its end is not begun here."""
    withdrawal = _withdraw_from(state, _list_live(phase, drain), drain.number, reason)
    state = replace(state, phase=replace(phase, drain=None))
    return state, (*_answer(drain.askers, answer), withdrawal)


def _resume(state: JobState, phase: RoundRunning, asker: Asker, now_s: float) -> Decision:
    drain = phase.drain
    if drain is None or drain.kind != Layout.PAUSE:
        return state, _refuse((asker,), "the job is not paused", is_unchanged=True)
    ranks, took_s = _count_ranks(state), now_s - drain.begun_s
    line = f"the pause has ended after {took_s:.1f} s: {_tell_all(ranks, 'goes', 'go')} on"
    overtaken = Answer(outcome=AskOutcome.REFUSED, line="the job is resumed instead (muster resume)")
    state, ended = _end(state, phase, drain, overtaken, "muster resume")
    done = Answer(outcome=AskOutcome.DONE, line=line, step=drain.step, ranks=ranks, took_s=took_s)
    return state, (*ended, *_answer((asker,), done), Notify(text=f"muster resume: {line}"))


# -- answers to people -----------------------------------------------------------------------------------------------


def _answer(askers: Iterable[Asker], answer: Answer) -> tuple[Action, ...]:
    return tuple(Send(ids=(each.id,), message=RequestAnswer(request=each.request, answer=answer)) for each in askers)


def _refuse(askers: Iterable[Asker], line: str, *, is_unchanged: bool = False) -> tuple[Action, ...]:
    return _answer(askers, Answer(outcome=AskOutcome.REFUSED, line=line, is_unchanged=is_unchanged))


def _refuse_late(drain: Drain, askers: Iterable[Asker]) -> tuple[Action, ...]:
    """Refuse because the current checkpoint is already late, and nothing says when it ends."""
    return _refuse(askers, f"not all ranks have saved at step {drain.step}: {_describe_late_ranks(drain)}")


def _count_ranks(state: JobState) -> int:
    return sum(member.nproc for each in state.assignments if (member := state.members.get(each)) is not None)


def _list_late_ranks(drain: Drain) -> tuple[LateRank, ...]:
    found = (rank for ranks in drain.done_by.values() for rank in ranks)
    return tuple(sorted(found, key=lambda rank: rank.global_rank))[:LATE_LIMIT]


def _describe_late_ranks(drain: Drain) -> str:
    return describe_late(_list_late_ranks(drain)) or "a node's workers have ended"


def describe_late(late: Iterable[LateRank]) -> str:
    """Name ranks that are late, with their last steps: "rank 3 is at step 7 since 31 s"."""
    found = list(late)
    texts = [_describe_late_rank(each) for each in found[:_NAMED_LATE]]
    more = f" and {len(found) - _NAMED_LATE} more ranks" if len(found) > _NAMED_LATE else ""
    return ", ".join(texts) + more


def _describe_late_rank(rank: LateRank) -> str:
    if rank.step is None:
        return f"rank {rank.global_rank} has reported no step"
    since = "" if rank.silent_s is None else f" since {rank.silent_s:.0f} s"
    return f"rank {rank.global_rank} is at step {rank.step}{since}"


def _on_drain_done(state: JobState, sender: str, message: DrainDone, now_s: float) -> Decision:
    """Record what a member's workers have done, and answer once all members have reported."""
    phase = expect(state.phase, RoundRunning)
    drain = phase.drain
    if drain is None or message.drain != drain.number or sender not in drain.ids:
        return state, ()
    drain = replace(drain, done_by=drain.done_by.with_item(sender, message.late))
    return _judge_done(replace(state, phase=replace(phase, drain=drain)), now_s)


def _judge_done(state: JobState, now_s: float) -> Decision:
    phase = state.phase
    if not isinstance(phase, RoundRunning) or phase.drain is None:
        return state, ()
    drain, late = phase.drain, _list_late_ranks(phase.drain)
    if not drain.askers and drain.kind != Layout.JOIN:
        return state, ()
    if any(each not in drain.done_by for each in _list_live(phase, drain)) and not (late and drain.step is None):
        return state, ()
    if drain.kind == Layout.JOIN:
        if not _list_live(phase, drain):
            return state, ()  # the job has ended before the step
        return break_round(state, BreakKind.MEMBERSHIP, _describe_change(state, drain), now_s, is_join=True)
    took_s = now_s - drain.begun_s
    if drain.step is None:
        line = f"no step was agreed on in {took_s:.1f} s: {describe_late(late) or 'the nodes were too slow'}"
        return _end(state, phase, drain, Answer(outcome=AskOutcome.LATE, line=line, late=late), line)
    ranks = _count_ranks(state)
    if drain.kind == Layout.PAUSE and not late:
        line = f"{_tell_all(ranks, 'waits', 'wait')} at step {drain.step}, after {took_s:.1f} s; {COLLECTIVES_LINE}"
        answer = Answer(outcome=AskOutcome.DONE, line=line, step=drain.step, ranks=ranks, took_s=took_s)
        state = replace(state, phase=replace(phase, drain=replace(drain, askers=())))
        return state, (*_answer(drain.askers, answer), Notify(text=f"{drain.reason}: {line}"))
    what = ("have not stopped", "have not saved", "do not wait")[drain.kind]
    line = f"after {took_s:.1f} s some ranks {what} at step {drain.step}: {_describe_late_ranks(drain)}"
    answer = Answer(outcome=AskOutcome.LATE, line=line, step=drain.step, ranks=ranks, took_s=took_s, late=late)
    if drain.kind == Layout.PAUSE:
        return _end(state, phase, drain, replace(answer, line=f"{line}; the pause is withdrawn"), line)
    queued = drain.queued
    if drain.kind == Layout.CHECKPOINT:
        answer = replace(answer, line=f"{line}; they may still save")
    waits = () if queued is None else queued.askers
    if queued is not None and waits:  # preemptions have their own limit
        queued = replace(queued, askers=(), leaving=queued.preempted) if queued.preempted else None
    state = replace(state, phase=replace(phase, drain=replace(drain, askers=(), queued=queued)))
    return state, (*_answer(drain.askers, answer), *_refuse(waits, line))


def ask_for_stacks(state: JobState, now_s: float) -> Decision:
    """Have the stacks of all ranks collected and printed, because the job hangs."""
    phase = state.phase
    if not isinstance(phase, RoundRunning):
        return state, ()
    return _want_stacks(state, phase, Asker(id="", request=HANG, kind=AskKind.STACKS), now_s)


def _want_stacks(state: JobState, phase: RoundRunning, asker: Asker, now_s: float) -> Decision:
    number = 1 + max((each.number for each in phase.wanted_stacks), default=0)
    # Even members whose workers have ended: others may wait for them.
    ids = tuple(each for each in state.assignments if each in state.members)
    if all(each in phase.succeeded for each in ids):
        return state, _refuse((asker,), "all workers have ended")
    wanted = WantedStacks(number=number, asker=asker, begun_s=now_s, ids=PersistentSet(ids))
    state = replace(state, phase=replace(phase, wanted_stacks=(*phase.wanted_stacks, wanted)))
    return state, (Send(ids=ids, message=StacksWanted(round_number=state.round_number, number=number)),)


def _on_stacks_taken(state: JobState, sender: str, message: StacksTaken, now_s: float) -> Decision:
    """Add a member's stacks, and answer with the last ones."""
    phase, number = expect(state.phase, RoundRunning), message.number
    wanted = next((each for each in phase.wanted_stacks if each.number == number and sender in each.ids), None)
    if wanted is None:
        return state, ()
    others = tuple(each for each in phase.wanted_stacks if each.number != number)
    wanted = replace(
        wanted,
        ids=wanted.ids.without(sender),
        stacks=(*wanted.stacks, *message.stacks),
        missing=wanted.missing + message.missing,
    )
    if wanted.ids:
        return replace(state, phase=replace(phase, wanted_stacks=(*others, wanted))), ()
    from muster.agent.diagnosis.hangs import describe_hang, list_progress, load_judge
    from muster.agent.diagnosis.report_text import format_stacks

    state = replace(state, phase=replace(phase, wanted_stacks=others))
    stacks = tuple(sorted(wanted.stacks, key=lambda stack: stack.global_rank))
    if not wanted.asker.id and wanted.asker.request == STANDSTILL:
        return _tell_standstill(state, replace(phase, wanted_stacks=others), stacks, now_s)
    if not wanted.asker.id:
        if not phase.has_reported_hang:
            return state, ()
        idle = tuple(failure for failures in phase.idle.values() for failure in failures)
        ranks = load_judge().find_cause(stacks).named
        return state, (
            *(Notify(text=line, kind=NoticeKind.HANG, ranks=ranks) for line in describe_hang(idle, stacks)),
            *(Notify(text=line, kind=NoticeKind.STACK) for line in format_stacks(stacks, missing=wanted.missing)),
        )
    found = "".join(f"{line}; " for line in load_judge().describe_ranks(stacks))
    progress = list_progress(stacks)
    steps = [each.step if each.step is not None else each.optimizer_steps for each in progress]
    stacks = tuple(replace(stack, view=None, progress=None) for stack in stacks if stack.text)
    count, took_s = len(stacks), now_s - wanted.begun_s
    asked = f"{count + wanted.missing} rank{'' if count + wanted.missing == 1 else 's'}"
    none = f"; {wanted.missing} gave none: not Python, stopped, or just started" if wanted.missing else ""
    answer = Answer(
        outcome=AskOutcome.LATE if wanted.missing else AskOutcome.DONE,
        line=f"{found}the stacks of {count} of {asked}, in {took_s:.1f} s{none}",
        step=min((step for step in steps if step is not None), default=None),
        ranks=count,
        took_s=took_s,
        stacks=stacks,
        progress=progress,
    )
    return state, _answer((wanted.asker,), answer)


def _on_stood_still(state: JobState, sender: str, message: StoodStill, now_s: float) -> Decision:
    """Handle that workers of a member stand still, or continue.

    Long before that counts as a hang, a line reports it, and nothing is stopped.

    Members report it at intervals that double. Once all of them have, the ranks are looked at as if a person had asked.
    The line follows only if none has moved, and either a rank is seen to block the others, or they have done steps or
    collectives before. A program that waits for orders on its own has done none.
    """
    phase = expect(state.phase, RoundRunning)
    if sender in phase.succeeded:
        return state, ()
    if message.for_s <= 0.0:
        told = (MOVES,) if phase.has_told_still else ()
        phase = replace(phase, still=phase.still.without(sender), still_asked_s=0.0, has_told_still=False)
        return replace(state, phase=phase), told
    phase = replace(phase, still=phase.still.with_item(sender, now_s - message.for_s))
    state = replace(state, phase=phase)
    for_s = _find_still_s(state, phase, now_s)
    if for_s is None or for_s < 2 * phase.still_asked_s or phase.has_reported_hang or phase.drain is not None:
        return state, ()
    phase = replace(phase, still_asked_s=for_s)
    return _want_stacks(
        replace(state, phase=phase), phase, Asker(id="", request=STANDSTILL, kind=AskKind.STACKS), now_s
    )


def _find_still_s(state: JobState, phase: RoundRunning, now_s: float) -> float | None:
    """Return how long all members have stood still; None if one does not."""
    if not phase.still or len(phase.still) + len(phase.succeeded) < len(state.assignments):
        return None
    return now_s - max(phase.still.values())


def _tell_standstill(state: JobState, phase: RoundRunning, stacks: tuple[Stack, ...], now_s: float) -> Decision:
    """Print what the ranks of a job that stands still wait for, unless one has moved, or nothing is seen.

    Args:
        state: the job's.
        phase: the phase without these stacks.
        stacks: those of all ranks.
        now_s: now.
    """
    from muster.agent.diagnosis.hangs import load_judge

    judge, for_s = load_judge(), _find_still_s(state, phase, now_s)
    text = None if for_s is None or phase.has_reported_hang else judge.describe_standstill(stacks, for_s)
    if text is None:
        return replace(state, phase=phase), ()
    told = Notify(text=text, kind=NoticeKind.STILL, ranks=judge.find_cause(stacks).named)
    return replace(state, phase=replace(phase, has_told_still=True)), (told,)


# -- the agreement ----------------------------------------------------------------------------------------------------


def _on_drain_reported(state: JobState, sender: str, message: DrainReported, now_s: float) -> Decision:
    """Record a member's report, and decide the drain if it was the last one."""
    phase = expect(state.phase, RoundRunning)
    drain = phase.drain
    if drain is None or message.drain != drain.number or sender not in drain.ids or drain.step is not None:
        return state, ()
    drain = replace(drain, reports=drain.reports.with_item(sender, message.report))
    return _decide_drain(replace(state, phase=replace(phase, drain=drain)), now_s)


def on_workers_ended(state: JobState, phase: RoundRunning, drained_rank: int | None, now_s: float) -> Decision:
    """Handle that all workers of a member have ended during a drain, so that they delay nothing.

    Args:
        state: before the event.
        phase: with the event applied.
        drained_rank: the member's rank that ended last, if any of its ranks has stopped at the step.
        now_s: now.
    """
    drain = phase.drain
    if drain is None:
        return replace(state, phase=phase), ()
    if drained_rank is not None:
        drain = replace(drain, last_rank=drained_rank)
    state = replace(state, phase=replace(phase, drain=drain))
    if drain.step is None:
        return _decide_drain(state, now_s)
    if drain.last_rank is None:
        return _judge_done(state, now_s)
    if len(phase.succeeded) < len(state.assignments):
        return state, ()
    took_s, ranks = now_s - drain.begun_s, _count_ranks(state)
    notify = Notify(text=describe_end(drain.step, took_s, drain.last_rank))
    told = f"{_tell_all(ranks, 'has', 'have')} stopped at step {drain.step} and ended, after {took_s:.1f} s"
    told += _describe_checkpoint(state, drain.step)
    answer = Answer(outcome=AskOutcome.DONE, line=told, step=drain.step, ranks=ranks, took_s=took_s)
    answers = _answer(drain.askers, answer)
    if phase.loss_wait_until_s is not None or not has_enough_members(state, drain):
        return state, (*answers, notify)
    reason, is_leave = _describe_change(state, drain), bool(drain.leaving)
    state, broken = break_round(
        state, BreakKind.DRAINED, reason, now_s, is_join=drain.is_join and not is_leave, is_leave=is_leave
    )
    return state, (*answers, notify, *broken)


def _describe_change(state: JobState, drain: Drain) -> str:
    """Return which nodes leave or join after the step: "node 1 (host-b) leaves after step 41: the job continues"."""
    if not drain.leaving:
        return f"{drain.reason} after step {drain.step}: the job continues"
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
        return _withdraw(state, phase, drain, refusal, now_s)
    if any(each not in drain.reports and each not in phase.succeeded for each in drain.ids):
        return state, ()
    if not _list_live(phase, drain):
        return replace(state, phase=replace(phase, drain=None)), ()
    reports = [report for each, report in drain.reports.items() if each not in phase.succeeded]
    step = choose_step(reports)
    if step is None:
        return _withdraw(state, phase, drain, _explain_no_step(reports, drain.kind), now_s)
    committed = DrainCommitted(round_number=state.round_number, drain=drain.number, step=step)
    commit = Send(ids=tuple(state.assignments), message=committed)
    line = describe_commit(drain.reason, step, reports, now_s - drain.begun_s, drain.kind)
    return replace(state, phase=replace(phase, drain=replace(drain, step=step))), (commit, Notify(text=line))


def _explain_no_step(reports: Iterable[DrainReport], kind: int) -> str:
    return NO_COMMON_STEP if any(each.ranks for each in reports) else f"no rank calls {Layout.ASKING_FUNCTIONS[kind]}"


def _withdraw(state: JobState, phase: RoundRunning, drain: Drain, reason: str, now_s: float) -> Decision:
    if drain.is_join and drain.kind == Layout.STOP and phase.drains < Layout.MAX_DRAIN:
        limit_s = max(0.0, drain.until_s - now_s)
        wanted = WantedDrain(kind=Layout.JOIN, reason=drain.reason, limit_s=limit_s, until_s=drain.until_s)
        return _begin(state, phase, replace(wanted, obstacle=reason), now_s)
    if drain.is_join:
        return _break_for_join(state, drain, drain.obstacle or reason, now_s)
    withdrawal = _withdraw_from(state, _list_live(phase, drain), drain.number, reason)
    if drain.kind == Layout.STOP:
        told: Action = Notify(text=f"{drain.reason}, but {reason}: no common last step")
    else:
        told = Notify(text=f"{drain.reason}: refused, because {reason}")
    return replace(state, phase=replace(phase, drain=None)), (withdrawal, told, *_refuse(drain.askers, reason))


def _list_live(phase: RoundRunning, drain: Drain) -> tuple[str, ...]:
    return tuple(each for each in drain.ids if each not in phase.succeeded)


def describe_commit(
    reason: str, step: int, reports: Iterable[DrainReport], took_s: float, kind: int = Layout.STOP
) -> str:
    """Return the line about a committed drain: why, the step, how long the agreement took, and which rank is behind."""
    last = min((rank for report in reports for rank in report.ranks), key=lambda rank: rank.asked, default=None)
    behind = "" if last is None else f"; rank {last.global_rank} is the last, at step {last.asked}"
    verb = Layout.VERBS[Layout.KINDS[kind]]
    return f"{reason}: all ranks {verb} at step {step}, agreed in {took_s * 1000:.0f} ms{behind}"


def _tell_all(ranks: int, one: str, more: str) -> str:
    return f"the rank {one}" if ranks == 1 else f"all {ranks} ranks {more}"


def _describe_checkpoint(state: JobState, step: int) -> str:
    """Name the job's last checkpoint for the job that is to go on from there. "": it has none."""
    kept = state.checkpoint
    if kept is None or not kept.path:
        return ""
    return (
        f"; checkpoint: {kept.path}"
        if kept.step == step
        else f"; the last checkpoint, of step {kept.step}: {kept.path}"
    )


def describe_end(step: int, took_s: float, last_rank: int) -> str:
    """Return the line about a drain that has ended: the step, its total duration, and which rank was the last."""
    line = f"all ranks have stopped at step {step} and ended, {took_s:.1f} s after the drain began"
    return f"{line}; rank {last_rank} was the last"


def choose_step(reports: Iterable[DrainReport]) -> int | None:
    """Return the smallest step at or above every ceiling that every asking rank will ask about; None if there is none.

    A rank asks about its last step plus multiples of its stride, so all ranks meet where these congruences do.
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
    return step if step <= Layout.MAX_STEP else None


def _merge(remainder: int, modulus: int, other_remainder: int, other_modulus: int) -> tuple[int, int] | None:
    """Merge two congruences into one (the Chinese remainder theorem); None if no number satisfies both."""
    common = gcd(modulus, other_modulus)
    if (other_remainder - remainder) % common:
        return None
    factor = other_modulus // common
    times = (other_remainder - remainder) // common * pow(modulus // common, -1, factor) % factor
    product = modulus * factor
    return (remainder + times * modulus) % product, product


def _on_saved(state: JobState, sender: str, message: Saved, now_s: float) -> Decision:
    """Count a member's report. With the last one the checkpoint is complete."""
    assignment = state.assignments[sender]
    counted = tuple(each for each in state.saving if each.round_number == state.round_number)
    others = tuple(each for each in counted if each.step != message.step)
    saving = next((each for each in counted if each.step == message.step), None) or Saving(
        round_number=state.round_number, step=message.step, path_rank=assignment.group_rank
    )
    saving = replace(saving, ids=saving.ids.with_item(sender))
    if message.path and (not saving.path or assignment.group_rank < saving.path_rank):
        saving = replace(saving, path=message.path, path_rank=assignment.group_rank)
    if len(saving.ids) < len(state.assignments):
        return replace(state, saving=(*others, saving)[-SAVING_LIMIT:]), ()
    state = replace(state, saving=tuple(each for each in others if each.step > message.step))
    state, ended = _end_checkpoint(state, saving, now_s)
    if not saving.path:
        return state, ended
    number = 1 if state.checkpoint is None else state.checkpoint.number + 1
    checkpoint = Checkpoint(number=number, step=saving.step, path=saving.path)
    state = update_recovery(replace(state, checkpoint=checkpoint))
    return state, (*ended, Send(ids=tuple(state.members), message=RecoveryChanged(recovery=state.recovery)))


def _end_checkpoint(state: JobState, saving: Saving, now_s: float) -> Decision:
    """Answer once all ranks have saved the step of a drain, and begin the stop that waits for this."""
    phase = state.phase
    if not isinstance(phase, RoundRunning) or phase.drain is None:
        return state, ()
    drain = phase.drain
    if drain.kind != Layout.CHECKPOINT or drain.step != saving.step:
        return state, ()
    ranks, took_s = _count_ranks(state), now_s - drain.begun_s
    where = f": {saving.path}" if saving.path else ""
    line = f"{_tell_all(ranks, 'saved', 'saved')} at step {saving.step} in {took_s:.1f} s{where}"
    answer = Answer(outcome=AskOutcome.DONE, line=line, step=saving.step, ranks=ranks, took_s=took_s)
    state, ended = _end(state, phase, drain, answer, "all ranks have saved")
    ended = (*ended, Notify(text=f"{drain.reason}: {line}"))
    if drain.queued is None or not isinstance(state.phase, RoundRunning):
        return state, ended
    state, begun = _begin(state, state.phase, drain.queued, now_s)
    return state, (*ended, *begun)
