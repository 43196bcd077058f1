"""Forming rounds: when, and with which members; and ending the job. Pure."""

from muster._shared.fields import Shared
from muster._shared.records import assert_never, replace
from muster._shared.reports import FinalFailure
from muster.agent.diagnosis.root_cause import build_report
from muster.agent.rendezvous.consensus.actions import CheckLease, FormRound, JobEnd, Notify, Send
from muster.agent.rendezvous.consensus.events import LeaseChecked
from muster.agent.rendezvous.consensus.members import MemberRecord
from muster.agent.rendezvous.consensus.quorum import QuorumRound, may_form_round
from muster.agent.rendezvous.consensus.rank_assignment import assign_ranks, list_node_indices
from muster.agent.rendezvous.consensus.state import (
    FOREVER,
    Decision,
    Ending,
    Forming,
    JobState,
    RoundFailures,
    RoundRunning,
)
from muster.agent.rendezvous.consensus.waits import LEASE_RETRY_S
from muster.agent.rendezvous.interface import RendezvousFailed
from muster.agent.runtime.persistent import PersistentMap, PersistentSet


def form_or_end(state: JobState, now_s: float) -> Decision:
    """Form a round or end the job when the state allows it."""
    match state.phase:
        case Forming() as phase:
            if phase.stopping:
                return state, ()
            if phase.final is not None:
                return _end_after_failure(state, phase, phase.final, now_s)
            return _propose_round(state, phase) if _can_form(state, phase, now_s) else (state, ())
        case RoundRunning() as phase:
            is_done = phase.loss_wait_until_s is None and len(phase.succeeded) == len(state.assignments)
            return _end_after_success(state, phase, now_s) if is_done else (state, ())
        case Ending():
            return state, ()
        case _:
            assert_never(state.phase)


def _choose_members(state: JobState, phase: Forming) -> list[MemberRecord]:
    """The members that may get an assignment, the leader's node always among them.

    A job that has run before continues without new members that still import, if enough others are ready.
    """
    ready = [member for member in state.members.values() if not member.is_leaving]
    if not state.importing or not phase.skips_last_call or state.importing_in_round:
        return ready
    prepared = [
        member
        for member in ready
        if member.id not in state.importing or any(member.id in each.connected for each in state.quorum_rounds)
    ]
    is_enough = len(prepared) >= state.rules.min_nodes and any(member.is_leader for member in prepared)
    return prepared if is_enough else ready


def _can_form(state: JobState, phase: Forming, now_s: float) -> bool:
    if now_s < max(state.fence_until_s, phase.lease_retry_s) or not _is_due(state, phase, len(state.members), now_s):
        return False
    # Checking each member comes last: for most events, and for all but the last of many joins, it is too early.
    ready = _choose_members(state, phase)
    if not any(member.is_leader for member in ready) or not _is_due(state, phase, len(ready), now_s):
        return False
    return _has_quorum(state, len(ready))


def _has_quorum(state: JobState, count: int) -> bool:
    """True when no other node can continue the job; `count` members would be in the next round."""
    quorum_rounds = state.quorum_rounds
    if _must_find_last_round(state, count):
        if not quorum_rounds:
            return False
        # The members may have been left behind. Then this leader's old process, or that of another node that has come
        # back, may have formed rounds with nodes that are not here.
        quorum_rounds = tuple(replace(each, claimed=frozenset()) for each in quorum_rounds)
    return may_form_round(quorum_rounds, state.rules.min_nodes)


def _must_find_last_round(state: JobState, count: int) -> bool:
    """True when `count` members must show that the last round they know is the job's last; see `JobState`."""
    return state.must_find_last_round and not state.has_formed_round and count < state.rules.max_nodes


def _is_due(state: JobState, phase: Forming, count: int, now_s: float) -> bool:
    rules = state.rules
    if count < rules.min_nodes or count >= rules.max_nodes:
        return count >= rules.min_nodes
    if now_s < state.rejoin_wait_until_s and any(each.has_missing() for each in state.quorum_rounds):
        return False
    if phase.skips_last_call:
        return True
    return now_s >= state.last_join_s + rules.last_call_s and now_s >= state.announcement_wait_until_s


def _propose_round(state: JobState, phase: Forming) -> Decision:
    """Assign the ranks of the next round, and ask whether the leader's own workers would have a lease in it."""
    last_round = state.quorum_rounds[-1] if state.quorum_rounds else None
    assignments = assign_ranks(_choose_members(state, phase), last_round, state.rules.max_nodes)
    round_number = max(state.round_number, state.highest_known_round) + 1
    attempt = state.attempt + (1 if phase.is_new_attempt else 0)
    leader = next(each for each in assignments if state.members[each.id].is_leader)
    quorum_round = QuorumRound(
        round_number=round_number,
        leader_id=leader.id,
        size=len(assignments),
        leader_group_rank=leader.group_rank,
        is_own=True,
        node_indices=list_node_indices(assignments),
        connected=PersistentMap({each.id: each.group_rank for each in assignments}),
    )
    first, last = state.members[assignments[0].id], state.members[assignments[-1].id]
    world_size = assignments[-1].rank_offset + last.nproc
    form = FormRound(
        round_number=round_number,
        attempt=attempt,
        restarts_left=state.rules.max_restarts - attempt,
        world_size=world_size,
        master_port=first.port,
        use_agent_store=first.can_host_store and world_size > 1,
        assignments=assignments,
        quorum_rounds=(*(replace(earlier, is_late=False) for earlier in state.quorum_rounds), quorum_round),
        startup_signature=state.startup_signature,
    )
    return replace(state, phase=replace(phase, proposed=form)), (CheckLease(quorum_rounds=form.quorum_rounds),)


def on_lease_checked(state: JobState, event: LeaseChecked, now_s: float) -> Decision:
    """Form the proposed round if the leader's own workers have a lease in it, else try again soon."""
    phase = state.phase
    if not isinstance(phase, Forming) or phase.proposed is None:
        return state, ()
    form = phase.proposed
    if not event.is_held:
        return replace(state, phase=replace(phase, proposed=None, lease_retry_s=now_s + LEASE_RETRY_S)), ()
    connected = form.quorum_rounds[-1].connected
    importing = {*state.importing, *state.importing_in_round}
    state = replace(
        state,
        phase=RoundRunning(),
        round_number=form.round_number,
        attempt=form.attempt,
        has_formed_round=True,
        quorum_rounds=form.quorum_rounds,
        assignments=PersistentMap({each.id: each for each in form.assignments}),
        importing=PersistentSet(importing.difference(connected)),
        importing_in_round=PersistentSet(importing.intersection(connected)),
        unacknowledged=PersistentSet(connected),
        failures=RoundFailures(),
    )
    return state, (form, *_notify_spares(state))


def _notify_spares(state: JobState) -> tuple[Notify, ...]:
    spares = len(state.members) - len(state.assignments)
    if spares <= 0 or len(state.assignments) < state.rules.max_nodes:
        return ()
    what = "1 node" if spares == 1 else f"{spares} nodes"
    wait = "it waits as a spare" if spares == 1 else "they wait as spares"
    return (Notify(text=f"{what} more than --nnodes allows ({state.rules.max_nodes}): {wait}"),)


def _end_after_success(state: JobState, phase: RoundRunning, now_s: float) -> Decision:
    """End the job, but wait for members that were lost after they succeeded: they may continue with another leader."""
    if may_form_round(state.quorum_rounds, state.rules.min_nodes) or now_s >= phase.end_wait_until_s:
        return _end_job(state, None)
    if phase.end_wait_until_s < FOREVER:
        return state, ()
    end_wait_until_s = now_s + state.rules.join_timeout_s
    return replace(state, phase=replace(phase, end_wait_until_s=end_wait_until_s)), ()


def _end_after_failure(state: JobState, phase: Forming, final: FinalFailure, now_s: float) -> Decision:
    """End the job, but wait for unreachable members: they may not know that it failed, and continue."""
    if may_form_round(state.quorum_rounds, state.rules.min_nodes) or now_s >= phase.end_wait_until_s:
        return _end_job(state, final)
    if phase.end_wait_until_s < FOREVER or now_s < state.rejoin_wait_until_s:
        return state, ()
    limit_s = state.rules.join_timeout_s
    line = f"{final.describe()}; most nodes are unreachable and may continue: waiting {limit_s:g} s for them"
    return replace(state, phase=replace(phase, end_wait_until_s=now_s + limit_s)), (Notify(text=line),)


def _end_job(state: JobState, final: FinalFailure | None) -> Decision:
    """End the job; `final` says why it failed, None that it succeeded."""
    present = [member_id for member_id in state.assignments if member_id in state.members]
    report = None
    if final is not None:
        report = build_report(
            state.rules.run_id,
            final,
            state.attempt,
            state.rules.max_restarts,
            state.failures.seen,
            state.failures.stacks,
        )
    drain = state.phase.drain if isinstance(state.phase, RoundRunning) else None
    is_drained = drain is not None and drain.last_rank is not None
    # A leader that took over only to end the job has formed no round.
    printer_id = next(iter(present or state.members), None) if report is not None else None
    end = JobEnd(
        succeeded=final is None and not is_drained,
        report=None if report is None else Shared(report),
        printer_id=printer_id,
        is_drained=is_drained,
    )
    told = Send(ids=tuple(state.members), message=end)
    return replace(state, phase=Ending(job_end=replace(end, printer_id=None))), (told,)


def fail_rendezvous(state: JobState) -> Decision:
    """Give up: no round was formed within the join timeout."""
    rules, count = state.rules, len(state.members)
    if count >= rules.min_nodes and _must_find_last_round(state, count):
        known = state.quorum_rounds[-1:]
        lack = f"they do not prove that round {known[0].round_number} was the last" if known else "none knew a round"
        why = (
            f"this node was started again and the job may continue on nodes that it cannot reach: {count} of "
            f"{rules.max_nodes} nodes joined, and {lack},"
        )
    elif count >= rules.min_nodes:
        missing = sum(each.count_missing() for each in state.quorum_rounds[-1:])
        nodes = "1 node" if missing == 1 else f"{missing} nodes"
        verb = "is" if missing == 1 else "are"
        why = f"{nodes} of round {state.round_number} {verb} unreachable and may still be running; no round was formed"
    else:
        why = f"only {count} of at least {rules.min_nodes} nodes joined"
    failed = RendezvousFailed(reason=f"{why} within {rules.join_timeout_s:g} s")
    return replace(state, phase=Ending(job_end=None)), (Send(ids=tuple(state.members), message=failed),)
