"""Decides which faulty nodes are remembered, which are the last choice, and which leave. Pure.

A node is suspected at once if one of its devices or links has failed, a check of it has found an error, or a rank has
said so itself. Otherwise it is suspected if it is the first to fail twice without progress in between, and no other
node has failed in the same way. The same exception at the same place again does not count, unless it is an error of a
device. A suspected node is the last to get an assignment, for a time that doubles with each
failure. What is remembered is in the recovery record. With a new leader this time begins anew.
"""

import re
from typing import TypeAlias

from muster._shared.causes import CRASH, DATA, DEVICE, PREEMPTION, TIME_LIMIT, USAGE, name_class
from muster._shared.records import replace
from muster._shared.reports import Failure, format_duration
from muster.agent.rendezvous.consensus.actions import Notify
from muster.agent.rendezvous.consensus.members import MemberRecord
from muster.agent.rendezvous.consensus.state import JobState, describe_member
from muster.agent.rendezvous.restarts import MOST_FAULTS, NodeFault, Restarts
from muster.agent.rendezvous.verdicts import Verdict

Judgement: TypeAlias = tuple[JobState, tuple[Notify, ...]]

SUSPECTED_S = 600.0
"""How long the first failure counts against a node."""
_MOST_SUSPECTED_S = 4 * 3600.0
_OF_THE_PROGRAM = (USAGE, DATA, PREEMPTION, TIME_LIMIT)
"""Classes that say nothing about the node."""
_SUSPECTED_FROM = 2


def choose_leaving(state: JobState, root: Failure | None, verdict: Verdict) -> tuple[MemberRecord, str] | None:
    """Return the member that leaves because of a failure, and what replaces it; None if ranks restart in place."""
    if root is None or not verdict.is_elsewhere or root.round != state.round_number:
        return None
    member = _find_member(state, root)
    if member is None or member.is_leaving:
        return None
    suspected = list_suspected(state)
    gone = sum(1 for each in state.assignments if each not in state.members or state.members[each].is_leaving)
    spares = [
        each
        for each in state.members.values()
        if each.id not in state.assignments
        and each.id not in state.importing
        and each.id not in suspected
        and not each.is_leaving
    ]
    if len(spares) > gone:
        return member, "a spare node takes its place"
    if not verdict.is_wanted:
        return None
    if len(state.assignments) - gone > state.rules.min_nodes:
        return member, "the job goes on without it"
    return (member, "its scheduler is to start another") if state.rules.is_managed else None


def _find_member(state: JobState, root: Failure) -> MemberRecord | None:
    found = (state.members.get(each.id) for each in state.assignments.values() if each.group_rank == root.node)
    return next(found, None)


def judge_certain(state: JobState, root: Failure | None, now_s: float) -> Judgement:
    """Record the node of a failure which itself says that the node is at fault."""
    return _record_fault(state, root, now_s) if root is not None and _is_certain(root) else (state, ())


def judge_node(state: JobState, ordered: tuple[Failure, ...], now_s: float) -> Judgement:
    """Record the node that has failed first. `ordered` has all failures of the round, the root cause first."""
    root = ordered[0]
    if root.requested_verdict or root.cause in ("", *_OF_THE_PROGRAM) or _is_certain(root):
        return state, ()
    if any(each.node != root.node and not each.collateral for each in ordered):
        return state, ()  # the program's fault
    is_again = root.cause == CRASH and (root.exit_code or 128) < 128 and state.restarts.repeats > 1
    if is_again and not re.search("CUDA|HIP", root.exception or ""):
        return state, ()  # also the program's
    return _record_fault(state, root, now_s)


def _is_certain(root: Failure) -> bool:
    return root.cause == DEVICE or root.requested_verdict == "elsewhere" or bool(root.check)


def _record_fault(state: JobState, root: Failure, now_s: float) -> Judgement:
    member = _find_member(state, root)
    if member is None or len(state.members if _is_certain(root) else state.assignments) < 2:
        return state, ()
    on_machine = sum(1 for each in state.members.values() if each.machine == member.machine)
    known = next((each for each in state.restarts.faults if each.matches(member.machine, member.index)), None)
    count = 1 if known is None else known.count + 1
    fault = NodeFault(
        machine=member.machine,
        node_index=member.index if member.index is not None else root.node,
        host=member.machine_name or member.host,
        cause=root.cause,
        count=count,
        is_shared=on_machine > 1 and bool(member.machine),
        is_suspected=_is_certain(root) or count >= _SUSPECTED_FROM,
    )
    faults = (*(each for each in state.restarts.faults if each is not known), fault)[-MOST_FAULTS:]
    state = replace(state, restarts=replace(state.restarts, faults=faults))
    if not fault.is_suspected:
        return state, ()
    for_s = _find_duration_s(fault)
    state = replace(state, suspected_until_s=state.suspected_until_s.with_item(_name(fault), now_s + for_s))
    cordon = f"; kubectl cordon {member.machine_name} keeps new pods off it" if member.machine_name else ""
    line = f"{describe_member(state, member)} is suspected: {describe_fault(fault)}; other nodes go before it for "
    return state, (Notify(text=f"{line}{format_duration(for_s)}{cordon}"),)


def describe_fault(fault: NodeFault) -> str:
    """Describe why a node is suspected: "it failed first in 2 attempts (device or link)"."""
    times = f" in {fault.count} attempts" if fault.count > 1 else ""
    return f"it failed first{times} ({name_class(fault.cause)})"


def list_suspected_nodes(restarts: Restarts) -> tuple[str, ...]:
    """Name the suspected nodes, for the report."""
    return tuple(
        f"node {each.node_index} ({each.host}): {describe_fault(each)}" for each in restarts.faults if each.is_suspected
    )


def _find_duration_s(fault: NodeFault) -> float:
    return min(SUSPECTED_S * float(2 ** min(fault.count - 1, 10)), _MOST_SUSPECTED_S)


def _name(fault: NodeFault) -> str:
    return f"{fault.machine} {fault.node_index if fault.is_shared or not fault.machine else ''}"


def find_fault(state: JobState, member: MemberRecord) -> NodeFault | None:
    """Return why a member is suspected; None if it is not."""
    found = (each for each in state.restarts.faults if each.is_suspected and _name(each) in state.suspected_until_s)
    return next((each for each in found if each.matches(member.machine, member.index)), None)


def list_suspected(state: JobState) -> frozenset[str]:
    """Return the ids of the members that are the last choice."""
    if not state.restarts.faults:
        return frozenset()
    return frozenset(each.id for each in state.members.values() if find_fault(state, each) is not None)


def renew_suspicions(state: JobState, now_s: float) -> JobState:
    """End suspicions that have lasted long enough. Those that another leader has recorded begin to count."""
    until_s = state.suspected_until_s
    kept = []
    for fault in state.restarts.faults:
        name = _name(fault)
        if fault.is_suspected and name not in until_s:
            until_s = until_s.with_item(name, now_s + _find_duration_s(fault))
        is_over = fault.is_suspected and now_s >= until_s[name]
        kept.append(replace(fault, is_suspected=False) if is_over else fault)
        until_s = until_s.without(name) if is_over else until_s
    return replace(state, suspected_until_s=until_s, restarts=replace(state.restarts, faults=tuple(kept)))
