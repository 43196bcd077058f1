"""When a round can be formed, who is in it, and how the job ends. Pure."""

from muster.agent.diagnosis.root_cause import build_report
from muster.agent.rendezvous.consensus.actions import EndJob, FailRendezvous, FormRound, Notify
from muster.agent.rendezvous.consensus.members import MemberRecord
from muster.agent.rendezvous.consensus.persistent import PersistentMap, PersistentSet
from muster.agent.rendezvous.consensus.quorum import QuorumBase, may_form
from muster.agent.rendezvous.consensus.rank_assignment import assign_ranks, keep_indices
from muster.agent.rendezvous.consensus.state import FOREVER, Decision, JobPhase, JobState
from muster.agent.runtime.records import replace


def form_or_end(state: JobState, now_s: float) -> Decision:
    """What the state allows by now: a round, the end of the job, or nothing."""
    if state.phase is JobPhase.RUNNING and state.blame_until_s is None and len(state.done) == len(state.seats):
        return _end_well(state, now_s)
    if state.phase is not JobPhase.FORMING or state.pending:
        return state, ()
    if state.final is not None:
        return _end_badly(state, now_s)
    return _form(state) if _is_time(state, now_s) else (state, ())


def _choose(state: JobState) -> list[MemberRecord]:
    """Who may get a seat. Of a job that ran not those who still import, if it can go on without them.

    They have no part in any earlier round; the leader, and with it its node, is in every one.
    """
    ready = [peer for peer in state.members.values() if not peer.leaving]
    if not state.importing or not state.reform or state.importing_seated:
        return ready
    prompt = [
        peer for peer in ready if peer.id not in state.importing or any(peer.id in base.held for base in state.bases)
    ]
    can_do = len(prompt) >= state.rules.min_nodes and any(peer.is_leader for peer in prompt)
    return prompt if can_do else ready


def _is_time(state: JobState, now_s: float) -> bool:
    if state.doubtful or now_s < state.fence_until_s or not _is_due(state, len(state.members), now_s):
        return False
    # Only now look at each: most events, and all but the last of those joins that come together, find it too early.
    ready = _choose(state)
    if not any(peer.is_leader for peer in ready) or not _is_due(state, len(ready), now_s):
        return False
    return may_form(state.bases, state.rules.min_nodes)


def _is_due(state: JobState, count: int, now_s: float) -> bool:
    rules = state.rules
    if count < rules.min_nodes or count >= rules.max_nodes:
        return count >= rules.min_nodes
    if now_s < state.gather_until_s and any(base.is_missing_some() for base in state.bases):
        return False
    if state.reform:
        return True
    return now_s >= state.last_join_s + rules.last_call_s and now_s >= state.quiet_until_s


def _form(state: JobState) -> Decision:
    seats = assign_ranks(_choose(state), state.bases[-1] if state.bases else None, state.rules.max_nodes)
    number, attempt = max(state.round, state.floor) + 1, state.attempt + (1 if state.charged else 0)
    leader = next(seat for seat in seats if state.members[seat.id].is_leader)
    base = QuorumBase(
        number=number,
        by=leader.id,
        size=len(seats),
        leader=leader.group_rank,
        own=True,
        indices=keep_indices(seats),
        held=PersistentMap({seat.id: seat.group_rank for seat in seats}),
    )
    importing = {*state.importing, *state.importing_seated}
    state = replace(
        state,
        phase=JobPhase.RUNNING,
        round=number,
        attempt=attempt,
        in_office=True,
        bases=(*(replace(earlier, late=False) for earlier in state.bases), base),
        seats=PersistentMap({seat.id: seat for seat in seats}),
        importing=PersistentSet(importing.difference(base.held)),
        importing_seated=PersistentSet(importing.intersection(base.held)),
        unconfirmed=PersistentSet(base.held),
        done=PersistentSet(),
        failures=(),
        stacks=(),
        failed_by=PersistentSet(),
        idle=PersistentMap(),
        charged=False,
        reform=False,
        batch_since_s=None,
        blame_until_s=None,
        end_until_s=FOREVER,
    )
    last = state.members[seats[-1].id]
    form = FormRound(
        number=number,
        attempt=attempt,
        restarts_left=state.rules.max_restarts - attempt,
        world_size=seats[-1].rank_offset + last.nproc,
        master_port=state.members[seats[0].id].port,
        seats=seats,
        bases=state.bases,
        early=state.early,
    )
    return state, (form, *_notify_spares(state))


def _notify_spares(state: JobState) -> tuple[Notify, ...]:
    spares = len(state.members) - len(state.seats)
    if spares <= 0 or len(state.seats) < state.rules.max_nodes:
        return ()
    word = "spare" if spares == 1 else "spares"
    return (Notify(text=f"{spares} more than --nnodes allows ({state.rules.max_nodes}): waiting as {word}"),)


def _end_well(state: JobState, now_s: float) -> Decision:
    """All are done, but those who vanished since may go on without this leader, and will come back to hear of it."""
    if may_form(state.bases, state.rules.min_nodes) or now_s >= state.end_until_s:
        return _end(state, succeeded=True)
    if state.end_until_s < FOREVER:
        return state, ()
    return replace(state, end_until_s=now_s + state.rules.join_timeout_s), ()


def _end_badly(state: JobState, now_s: float) -> Decision:
    """As `_end_well`: those who cannot be heard may not know that the job has failed, go on, and call here."""
    if may_form(state.bases, state.rules.min_nodes) or now_s >= state.end_until_s:
        return _end(state, succeeded=False)
    if state.end_until_s < FOREVER or now_s < state.gather_until_s:
        return state, ()
    limit_s = state.rules.join_timeout_s
    line = f"{state.final}; most nodes cannot be heard and may go on: waiting {limit_s:g} s for them"
    return replace(state, end_until_s=now_s + limit_s), (Notify(text=line),)


def _end(state: JobState, *, succeeded: bool) -> Decision:
    present = [seat_id for seat_id in state.seats if seat_id in state.members]
    report = None
    if not succeeded:
        report = build_report(
            state.rules.run_id,
            state.final or "",
            state.attempt,
            state.rules.max_restarts,
            state.failures,
            state.stacks,
        )
    verdict = EndJob(ids=(), succeeded=succeeded, report=report, printer=None)
    # Who took over only to end the job has no round of its own.
    printer = next(iter(present or state.members), None) if report is not None else None
    end = replace(verdict, ids=tuple(state.members), printer=printer)
    return replace(state, phase=JobPhase.ENDING, verdict=verdict), (end,)


def fail_rendezvous(state: JobState) -> Decision:
    """The join timeout has passed."""
    rules, count = state.rules, len(state.members)
    if count >= rules.min_nodes:
        missing = sum(base.missing() for base in state.bases[-1:])
        why = f"{missing} nodes of round {state.round} cannot be heard and may still be running"
    else:
        why = f"only {count} of at least {rules.min_nodes} nodes were there"
    return replace(state, phase=JobPhase.ENDING), (FailRendezvous(reason=f"{why} within {rules.join_timeout_s:g} s"),)
