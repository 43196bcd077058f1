"""The job as its leader sees it: a pure function `advance(state, event, now_s) -> (state, outputs)`.

No sockets, no clocks, no randomness: the leader feeds what it learns and sends what comes out. A round goes

    FORMING --(enough members, all stopped, allowed by quorum)--> RUNNING --(loss, join, failure)--> FORMING ...
                                                                     |--(all done)--> ENDING
    FORMING --(final failure and all stopped)--> ENDING

A join and a loss make a new round; only a worker's failure makes a new attempt and uses the budget, which belongs to
the job. What is kept of every member is in ledgers, so that no event costs more because there are many.

The words are in `terms`, the arithmetic of quorums in `quorum`, root cause and report in `verdict`. The module is long
because the whole agreement stands in one place.
"""

import math
from collections.abc import Callable
from enum import Enum
from typing import Any

from muster.agent.records import record, replace
from muster.agent.rendezvous import BreakKind
from muster.agent.rendezvous.ledger import Ledger, Roll
from muster.agent.rendezvous.quorum import Base, build_base, may_form
from muster.agent.rendezvous.seating import assign_seats, keep_indices
from muster.agent.rendezvous.terms import (
    Break,
    Carry,
    Confirmed,
    End,
    Event,
    Failed,
    Form,
    GiveUp,
    Idle,
    Joined,
    Left,
    Lost,
    Output,
    Peer,
    Rules,
    SawEnd,
    Seat,
    Settle,
    Stopped,
    Succeeded,
    Tell,
    Tick,
)
from muster.agent.rendezvous.verdict import Seen, build_report, choose_root, describe_failure, find_signature
from muster.agent.report import Failure, Stack

FOREVER = math.inf


class Phase(Enum):
    """Where the job stands."""

    FORMING = "forming"
    """No round, or one whose members are stopping."""
    RUNNING = "running"
    ENDING = "ending"


@record
class State:
    """All the leader knows. `start_state` makes the first one."""

    rules: Rules
    since_s: float
    """When this forming began; the join timeout counts from here."""
    phase: Phase = Phase.FORMING
    members: Ledger[str, Peer] = Ledger()
    joins: int = 0
    round: int = 0
    floor: int = 0
    """The highest round any member knew: numbers only go up, for everybody."""
    attempt: int = 0
    early: str | None = None
    """Signature of the start-up failure that ended the attempt before this one."""
    in_office: bool = False
    """True once this leader has formed a round itself."""
    bases: tuple[Base, ...] = ()
    """The last formed round, preceded by those it has not yet replaced for all of its members."""
    seats: Ledger[str, Seat] = Ledger()
    """Of the current round; empty before the first."""
    unconfirmed: Roll[str] = Roll()
    pending: Roll[str] = Roll()
    """Members whose workers must still stop before a round can be formed."""
    done: Roll[str] = Roll()
    """Members whose workers of this round all ended well, also those that vanished afterwards."""
    failures: tuple[Seen, ...] = ()
    stacks: tuple[Stack, ...] = ()
    idle: Ledger[str, tuple[Failure, ...]] = Ledger()
    """Members without a sign of life, and what they will be blamed for if it is all of them."""
    failed_by: Roll[str] = Roll()
    excused_until_s: float = -FOREVER
    """A loss until then explains the round's first failure."""
    charged: bool = False
    """The next round is a new attempt."""
    final: str | None = None
    """Why the job has failed for good."""
    reform: bool = False
    """The next round need not wait for a last call."""
    fence_until_s: float = -FOREVER
    quiet_until_s: float = -FOREVER
    gather_until_s: float = -FOREVER
    last_join_s: float = -FOREVER
    batch_since_s: float | None = None
    """First join that the running round does not hold."""
    blame_until_s: float | None = None
    """When a failure that spends the last attempt becomes final, unless a loss explains it."""
    end_until_s: float = FOREVER
    """When the job's success need not wait any longer for members that vanished after theirs."""
    verdict: End | None = None
    """How the job ended, for those who come late."""


Step = tuple[State, tuple[Output, ...]]


def start_state(rules: Rules, now_s: float, *, takeover: bool) -> State:
    """A leader's first state: empty for the named leader, gathering for a candidate."""
    if takeover:
        # Workers of the node whose end made way for this takeover die within the fence as everywhere.
        fence_s, gather_s = now_s + rules.fence_s, now_s + rules.gather_s
        return State(rules=rules, since_s=now_s, reform=True, fence_until_s=fence_s, gather_until_s=gather_s)
    return State(rules=rules, since_s=now_s, quiet_until_s=now_s + rules.quiet_s)


def advance(state: State, event: Event, now_s: float) -> Step:
    """Take in one event. Events of members that are not there, and of old rounds, change nothing."""
    state, outputs = _HANDLERS[type(event)](state, event, now_s)
    state, more = _form_or_end(state, now_s)
    return state, outputs + more


def next_due_s(state: State, now_s: float) -> float:
    """When the leader must send a `Tick` at the latest; infinity when nothing is due."""
    if state.phase is Phase.ENDING or state.pending:
        return FOREVER
    if state.phase is Phase.RUNNING:
        blame_s = FOREVER if state.blame_until_s is None else state.blame_until_s
        dues = [blame_s, state.end_until_s, _batch_due_s(state) if blame_s == FOREVER else FOREVER]
    else:
        dues = [state.since_s + state.rules.join_timeout_s, state.last_join_s + state.rules.last_call_s]
        dues += [state.fence_until_s, state.quiet_until_s, state.gather_until_s]
    return min((due for due in dues if due > now_s), default=FOREVER)


# -- members come and go ------------------------------------------------------------------------------------------


def _on_joined(state: State, event: Joined, now_s: float) -> Step:
    peer = replace(event.peer, order=state.joins)
    if state.phase is Phase.ENDING and state.verdict is not None:
        return state, (replace(state.verdict, ids=(peer.id,)),)
    state = replace(
        state,
        members=state.members.with_item(peer.id, peer),
        joins=state.joins + 1,
        floor=max(state.floor, peer.carry.round),
        last_join_s=now_s,
        bases=tuple(_hold(base, peer) for base in state.bases),
    )
    state = _adopt(state, peer.carry, now_s)
    state = replace(state, bases=tuple(_count_claimed(base, peer) for base in state.bases))
    if state.phase is Phase.RUNNING and not state.done and state.batch_since_s is None and _has_room(state):
        state = replace(state, batch_since_s=now_s)
    return state, ()


def _has_room(state: State) -> bool:
    return len(state.seats) < state.rules.max_nodes


def _batch_due_s(state: State) -> float:
    if state.batch_since_s is None:
        return FOREVER
    return min(state.last_join_s + state.rules.batch_s, state.batch_since_s + state.rules.batch_limit_s)


def _hold(base: Base, peer: Peer) -> Base:
    """Count a member, and the ends it observed, for a base that it was part of."""
    for carried in peer.carry.bases:
        if carried["number"] == base.number:
            held = base.held if carried["rank"] is None else base.held.with_item(peer.id, carried["rank"])
            return replace(base, held=held, ended=base.ended.union(carried["ended"]))
    return base


def _count_claimed(base: Base, newcomer: Peer) -> Base:
    """A node index claimed by a new process: the scheduler started it because the old one had ended."""
    if newcomer.index is None or newcomer.id in base.held:
        return base
    rank = base.find_rank(newcomer.index)
    if rank is None or rank in base.claimed or rank in base.held.values():
        return base
    return replace(base, claimed=base.claimed | {rank})


def _adopt(state: State, carry: Carry, now_s: float) -> State:
    """Take over round number, attempt and bases from a member that knows a later round than this leader."""
    if carry.round < state.round:
        return state
    attempt = max(state.attempt, carry.attempt)
    if carry.round == state.round:
        return state if state.in_office else replace(state, attempt=attempt, early=state.early or carry.early)
    if state.in_office:
        return replace(state, attempt=attempt)  # two leaders met: no used attempt is forgotten
    bases = []
    for data in carry.bases:
        base = build_base(data, "")
        base = replace(base, held=Ledger())
        for member in state.members.values():
            base = _hold(base, member)
        for member in state.members.values():
            base = _count_claimed(base, member)
        bases.append(base)
    return replace(
        state,
        round=carry.round,
        attempt=carry.attempt,
        early=carry.early,
        bases=tuple(bases),
        reform=True,
        gather_until_s=max(state.gather_until_s, now_s + state.rules.gather_s),
    )


def _on_lost(state: State, event: Lost, now_s: float) -> Step:
    peer = state.members.get(event.id)
    if peer is None:
        return state, ()
    state = replace(
        state,
        members=state.members.without(event.id),
        bases=tuple(replace(base, held=base.held.without(event.id)) for base in state.bases),
        unconfirmed=state.unconfirmed.without(event.id),
    )
    if state.phase is Phase.FORMING and event.id in state.pending:
        state = replace(state, pending=state.pending.without(event.id), fence_until_s=now_s + state.rules.fence_s)
        return _forgive(state, event.id, now_s), ()
    if state.phase is not Phase.RUNNING or event.id not in state.seats or event.id in state.done:
        return state, ()
    state = replace(state, fence_until_s=now_s + state.rules.fence_s)
    return _break_for_loss(state, event.id, f"{_name(state, peer)} was lost: {event.reason}", now_s)


def _on_saw_end(state: State, event: SawEnd, _now_s: float) -> Step:
    seat = state.seats.get(event.id)
    if seat is None or event.id in state.members or not state.bases:
        return state, ()
    # Seats are those of the last base; what an older one calls this member is not known any more, and not needed:
    # its process end can only make a takeover easier, never a wrong one possible.
    last = state.bases[-1]
    if last.number == state.round:
        last = replace(last, ended=last.ended | {seat.group_rank})
    return replace(state, bases=(*state.bases[:-1], last)), ()


def _forgive(state: State, lost_id: str, now_s: float) -> State:
    """A failure right before a loss was caused by it (a peer's connection broke): it costs no attempt."""
    explained = now_s <= state.excused_until_s and lost_id not in state.failed_by
    if not (state.charged and explained):
        return state
    return replace(state, charged=False, early=None, failures=(), stacks=())


def _break_for_loss(state: State, lost_id: str, reason: str, now_s: float) -> Step:
    if lost_id in state.failed_by:
        return _break_for_failure(replace(state, blame_until_s=None), now_s)
    state = replace(state, failures=(), failed_by=Roll(), blame_until_s=None, reform=True)
    return _break(state, BreakKind.MEMBERSHIP, reason, now_s)


def _on_left(state: State, event: Left, now_s: float) -> Step:
    peer = state.members.get(event.id)
    if peer is None:
        return state, ()
    state = replace(state, members=state.members.with_item(event.id, replace(peer, leaving=True)))
    if state.phase is not Phase.RUNNING or event.id not in state.seats or event.id in state.done:
        return state, ()
    # It stays pending until its connection closes: only then are its workers gone.
    return _break_for_loss(state, event.id, f"{_name(state, peer)} left: {event.reason}", now_s)


# -- a round's life -----------------------------------------------------------------------------------------------


def _on_confirmed(state: State, event: Confirmed, _now_s: float) -> Step:
    if event.round != state.round or event.id not in state.unconfirmed:
        return state, ()
    state = replace(state, unconfirmed=state.unconfirmed.without(event.id))
    whole = state.bases and len(state.bases[-1].held) == state.bases[-1].size
    if state.unconfirmed or not whole:
        return state, ()
    return replace(state, bases=state.bases[-1:]), (Settle(number=state.round),)


def _on_failed(state: State, event: Failed, now_s: float) -> Step:
    if event.round != state.round or event.id not in state.seats or state.phase is Phase.ENDING:
        return state, ()
    if state.phase is Phase.FORMING and not (state.charged or state.final):
        return state, ()  # The round was broken for another reason: this is collateral.
    first = not state.failures
    state = replace(
        state,
        failures=state.failures + _date(event.failures, now_s),
        failed_by=state.failed_by.with_one(event.id),
        excused_until_s=now_s + event.excuse_s + state.rules.batch_limit_s if first else state.excused_until_s,
    )
    if state.phase is Phase.FORMING or state.blame_until_s is not None:
        return state, ()
    if _why_final(state) is None or len(state.seats) == 1:
        return _break_for_failure(state, now_s)
    return replace(state, blame_until_s=now_s + event.excuse_s + state.rules.blame_s), ()


def _on_idle(state: State, event: Idle, now_s: float) -> Step:
    """A node may wait for another; a job hangs when every node that still works does nothing."""
    if event.round != state.round or event.id not in state.seats or state.phase is not Phase.RUNNING:
        return state, ()
    if event.id in state.done:
        return state, ()
    idle = state.idle.with_item(event.id, event.failures) if event.failures else state.idle.without(event.id)
    return _judge_idle(replace(state, idle=idle), now_s)


def _judge_idle(state: State, now_s: float) -> Step:
    outputs: tuple[Output, ...] = ()
    if not state.idle or len(state.idle) + len(state.done) < len(state.seats):  # nobody is both
        return state, outputs
    for member_id in state.seats:
        if member_id not in state.idle:
            continue
        failed = Failed(id=member_id, round=state.round, failures=state.idle[member_id])
        state, more = _on_failed(state, failed, now_s)
        outputs += more
    return state, outputs


def _date(failures: tuple[Failure, ...], now_s: float) -> tuple[Seen, ...]:
    return tuple(Seen(when_s=now_s - failure.age_s, failure=failure) for failure in failures)


def _why_final(state: State) -> str | None:
    """One line when the failures seen end the job, None when another attempt is due."""
    root = choose_root(state.failures)
    signature = find_signature(root)
    if signature is not None and signature == state.early:
        return f"{describe_failure(root)}; it failed the same way right after the start twice in a row: not retried"
    if state.attempt >= state.rules.max_restarts:
        used = (
            f"all {state.rules.max_restarts} restarts are used" if state.rules.max_restarts else "no restarts allowed"
        )
        return f"{describe_failure(root)}; {used}"
    return None


def _break_for_failure(state: State, now_s: float) -> Step:
    final = _why_final(state)
    root = choose_root(state.failures)
    state = replace(state, blame_until_s=None)
    if final is not None:
        return _break(replace(state, final=final), BreakKind.FINAL, final, now_s)
    state = replace(state, charged=True, reform=True, early=find_signature(root))
    return _break(state, BreakKind.FAILURE, describe_failure(root), now_s)


def _break(state: State, kind: BreakKind, reason: str, now_s: float) -> Step:
    ids = tuple(member_id for member_id in state.seats if member_id in state.members)
    output = Break(
        ids=ids,
        number=state.round,
        kind=kind,
        reason=reason,
        want_stacks=kind in (BreakKind.FAILURE, BreakKind.FINAL),
        next_attempt=state.attempt + (1 if state.charged else 0),
        early=state.early,
    )
    state = replace(state, phase=Phase.FORMING, pending=Roll(ids), since_s=now_s, batch_since_s=None)
    return state, (output,)


def _on_succeeded(state: State, event: Succeeded, _now_s: float) -> Step:
    if event.round == state.round and state.phase is Phase.RUNNING and event.id in state.seats:
        # The others may have waited for just this: who is still idle after another timeout says so again.
        return replace(state, idle=Ledger(), done=state.done.with_one(event.id), batch_since_s=None), ()
    return state, ()


def _on_stopped(state: State, event: Stopped, now_s: float) -> Step:
    peer = state.members.get(event.id)
    if peer is None or event.round != state.round:
        return state, ()
    if state.phase is Phase.RUNNING and event.id in state.seats and event.id not in state.done:
        # It was fenced without losing its connection: its round is over for everybody.
        reform = replace(state, failures=(), failed_by=Roll(), blame_until_s=None, reform=True)
        state, outputs = _break(reform, BreakKind.MEMBERSHIP, f"{_name(state, peer)} had to stop its workers", now_s)
        state, more = _on_stopped(state, event, now_s)
        return state, outputs + more
    if event.id not in state.pending:
        return state, ()
    keep = state.charged or state.final is not None
    return replace(
        state,
        members=state.members.with_item(event.id, replace(peer, port=event.port)),
        pending=state.pending.without(event.id),
        failures=state.failures + _date(event.failures, now_s) if keep else state.failures,
        stacks=state.stacks + event.stacks,
    ), ()


def _on_tick(state: State, _event: Tick, now_s: float) -> Step:
    if state.phase is Phase.RUNNING and state.blame_until_s is not None and now_s >= state.blame_until_s:
        return _break_for_failure(state, now_s)
    if state.phase is Phase.RUNNING and state.blame_until_s is None and now_s >= _batch_due_s(state):
        fresh = [_name(state, peer) for peer in state.members.values() if peer.id not in state.seats]
        if not fresh:
            return replace(state, batch_since_s=None), ()
        joined = ", ".join(fresh[:3]) + (f" and {len(fresh) - 3} more" if len(fresh) > 3 else "")
        return _break(replace(state, reform=True), BreakKind.MEMBERSHIP, f"{joined} joined", now_s)
    if state.phase is Phase.FORMING and not state.pending and now_s >= state.since_s + state.rules.join_timeout_s:
        return _give_up(state)
    return state, ()


def _give_up(state: State) -> Step:
    rules, count = state.rules, len(state.members)
    if count >= rules.min_nodes:
        missing = sum(base.missing() for base in state.bases[-1:])
        why = f"{missing} nodes of round {state.round} cannot be heard and may still be running"
    else:
        why = f"only {count} of at least {rules.min_nodes} nodes were there"
    return replace(state, phase=Phase.ENDING), (GiveUp(reason=f"{why} within {rules.join_timeout_s:g} s"),)


# -- what follows -------------------------------------------------------------------------------------------------


def _form_or_end(state: State, now_s: float) -> Step:
    if state.phase is Phase.RUNNING and state.blame_until_s is None and len(state.done) == len(state.seats):
        return _end_well(state, now_s)
    if state.phase is not Phase.FORMING or state.pending:
        return state, ()
    if state.final is not None:
        return _end(state, succeeded=False)
    return _form(state) if _is_time(state, now_s) else (state, ())


def _is_time(state: State, now_s: float) -> bool:
    if now_s < state.fence_until_s or not _is_due(state, len(state.members), now_s):
        return False
    # Only now look at each: most events, and all but the last of those joins that come together, find it too early.
    ready = [peer for peer in state.members.values() if not peer.leaving]
    if not any(peer.is_leader for peer in ready) or not _is_due(state, len(ready), now_s):
        return False
    return may_form(state.bases, state.rules.min_nodes, in_office=state.in_office)


def _is_due(state: State, count: int, now_s: float) -> bool:
    rules = state.rules
    if count < rules.min_nodes or count >= rules.max_nodes:
        return count >= rules.min_nodes
    if now_s < state.gather_until_s and any(base.is_missing_some() for base in state.bases):
        return False
    if state.reform:
        return True
    return now_s >= state.last_join_s + rules.last_call_s and now_s >= state.quiet_until_s


def _form(state: State) -> Step:
    seats = assign_seats(state.members.values(), state.bases[-1] if state.bases else None, state.rules.max_nodes)
    number, attempt = max(state.round, state.floor) + 1, state.attempt + (1 if state.charged else 0)
    leader = next(seat.group_rank for seat in seats if state.members[seat.id].is_leader)
    base = Base(
        number=number,
        size=len(seats),
        leader=leader,
        indices=keep_indices(seats),
        held=Ledger({seat.id: seat.group_rank for seat in seats}),
    )
    state = replace(
        state,
        phase=Phase.RUNNING,
        round=number,
        attempt=attempt,
        in_office=True,
        bases=(*state.bases, base),
        seats=Ledger({seat.id: seat for seat in seats}),
        unconfirmed=Roll(base.held),
        done=Roll(),
        failures=(),
        stacks=(),
        failed_by=Roll(),
        idle=Ledger(),
        charged=False,
        reform=False,
        batch_since_s=None,
        blame_until_s=None,
        end_until_s=FOREVER,
    )
    last = state.members[seats[-1].id]
    form = Form(
        number=number,
        attempt=attempt,
        restarts_left=state.rules.max_restarts - attempt,
        world_size=seats[-1].rank_offset + last.nproc,
        master_port=state.members[seats[0].id].port,
        seats=seats,
        bases=state.bases,
        early=state.early,
    )
    return state, (form, *_tell_spares(state))


def _tell_spares(state: State) -> tuple[Tell, ...]:
    spares = len(state.members) - len(state.seats)
    if spares <= 0:
        return ()
    word = "spare" if spares == 1 else "spares"
    return (Tell(text=f"{spares} more than --nnodes allows ({state.rules.max_nodes}): waiting as {word}"),)


def _end_well(state: State, now_s: float) -> Step:
    """All are done, but those who vanished since may go on without this leader, and will come back to hear of it."""
    if may_form(state.bases, state.rules.min_nodes, in_office=True) or now_s >= state.end_until_s:
        return _end(state, succeeded=True)
    if state.end_until_s < FOREVER:
        return state, ()
    return replace(state, end_until_s=now_s + state.rules.join_timeout_s), ()


def _end(state: State, *, succeeded: bool) -> Step:
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
    verdict = End(ids=(), succeeded=succeeded, report=report, printer=None)
    end = replace(verdict, ids=tuple(state.members), printer=present[0] if present and report is not None else None)
    return replace(state, phase=Phase.ENDING, verdict=verdict), (end,)


def _name(state: State, peer: Peer) -> str:
    """How people know a node: "node 1 (host-b)"."""
    seat = state.seats.get(peer.id)
    number = peer.index if peer.index is not None else seat.group_rank if seat else None
    return f"a new node ({peer.host})" if number is None else f"node {number} ({peer.host})"


_HANDLERS: dict[type, Callable[[State, Any, float], Step]] = {
    Joined: _on_joined,
    Lost: _on_lost,
    SawEnd: _on_saw_end,
    Left: _on_left,
    Confirmed: _on_confirmed,
    Failed: _on_failed,
    Idle: _on_idle,
    Succeeded: _on_succeeded,
    Stopped: _on_stopped,
    Tick: _on_tick,
}
