"""Calls the halves that features have at the leader, for what the nodes must agree on. Pure, as they are.

`halves` has their functions. What a half knows is lost with the leader, and a half decides what of it outlives a round.
What it remembers is in the recovery record, so other leaders that have the feature know it.

An exception in a half is the half's: a line says so, and the feature has no half until the next round.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

from muster._shared.records import replace
from muster.agent.features import load_half
from muster.agent.rendezvous.consensus.actions import Action, Notify, RecoveryChanged, Send
from muster.agent.rendezvous.consensus.failures import break_round
from muster.agent.rendezvous.consensus.halves import LeaderHalf, PartDecision, PartJob, Plan
from muster.agent.rendezvous.consensus.state import Decision, Forming, JobState, RoundRunning, update_recovery
from muster.agent.rendezvous.interface import BreakKind, NoticeKind, PartOrder, PartReport
from muster.agent.round import PartMemory

T = TypeVar("T")
_FAILED = "failed"
"""What is known in a round of a feature whose half has failed."""


def plan_parts(
    job: PartJob, known: Mapping[str, object], memories: Iterable[PartMemory]
) -> tuple[Mapping[str, Plan], tuple[Notify, ...]]:
    """Plan a round for each feature that knows or remembers something, or for which a node has something."""
    remembered = {memory.feature: memory for memory in memories}
    offers: dict[str, dict[str, str]] = {name: {} for name in (*known, *remembered)}
    for member in job.members.values():
        for offer in member.offers:
            offers.setdefault(offer.feature, {})[member.id] = offer.content
    plans: dict[str, Plan] = {}
    notices: list[Notify] = []
    for name, contents in sorted(offers.items()):
        half: LeaderHalf | None = load_half(name, "leader")
        if half is not None:
            before = None if known.get(name) is _FAILED else known.get(name)
            plan, notice = _call(name, partial(half.plan, job, before, remembered.get(name), contents))
            plans[name] = Plan(state=_FAILED) if plan is None else plan
            notices += notice
    return plans, tuple(notices)


def decide_part(state: JobState, sender: str, report: PartReport, now_s: float) -> Decision:
    """Pass a report to the feature's half. A report to a feature that this leader does not have changes nothing."""
    name = report.feature
    half: LeaderHalf | None = load_half(name, "leader")
    known = state.parts.get(name)
    if half is None or known is _FAILED:
        return state, ()
    job = PartJob(
        round_number=state.round_number,
        leader_id=state.quorum_rounds[-1].leader_id if state.quorum_rounds else state.rules.run_id,
        now_s=now_s,
        is_running=isinstance(state.phase, RoundRunning),
        members=state.members,
        assignments=state.assignments,
    )
    decision, notices = _call(name, partial(half.decide, job, known, sender, report.content))
    state = replace(state, parts={**state.parts, name: _FAILED if decision is None else decision.state})
    return (state, notices) if decision is None else _carry_out(state, name, decision, now_s)


def _carry_out(state: JobState, name: str, decision: PartDecision, now_s: float) -> Decision:
    actions: list[Action] = [Notify(text=line, kind=NoticeKind.FINDING, feature=name) for line in decision.lines]
    if decision.memory is not None:
        others = (memory for memory in state.memories if memory.feature != name)
        state = update_recovery(replace(state, memories=(*others, decision.memory)))
        actions.append(Send(ids=tuple(state.assignments), message=RecoveryChanged(recovery=state.recovery)))
    for ids, content in decision.orders:
        order = PartOrder(round_number=state.round_number, feature=name, content=content)
        actions.append(Send(ids=ids, message=order))
    final, phase = decision.final, state.phase
    if final is None:
        return state, tuple(actions)
    if isinstance(phase, Forming):
        return replace(state, phase=replace(phase, final=phase.final or final)), tuple(actions)
    state, broken = break_round(state, BreakKind.FINAL, final.describe(), now_s, final)
    return state, (*actions, *broken)


def _call(name: str, call: Callable[[], T]) -> tuple[T | None, tuple[Notify, ...]]:
    try:
        return call(), ()
    except Exception as error:  # noqa: BLE001  # whatever it is, the job goes on
        why = f"{type(error).__name__}: {error}"
        return None, (Notify(text=f"the feature {name} has failed at the leader ({why}); the job goes on without it"),)
