"""Decides which snapshot in memory a round continues, and when all ranks are known to have a newer one. Pure.

The base of a round is chosen from what the members report when they join and when their workers have stopped. It is
never chosen from what the leader has confirmed, which is always older.

A snapshot is confirmed in two steps, because each rank overwrites what it does not need. A node first keeps the newest
snapshot that its ranks have, and reports it. The snapshot is confirmed only when all nodes keep the same one. Ranks
that save often are at different steps when their nodes look. Then the leader sets a mark ahead of all. Each rank keeps
the first snapshot at or above the mark, which is the same for all ranks, because they save at the same steps.

Copies for the neighbours are of the confirmed snapshot, the same on all nodes. Until all neighbours have it, each node
keeps the one before it, of which they all had copies, and no newer one is confirmed. A lost node takes its own part and
the copy of another one's part with it, so what is left must be of one generation at any time.
"""

from collections.abc import Iterable, Mapping

from muster._shared.records import replace
from muster.agent.rendezvous.consensus.actions import RecoveryChanged, Send
from muster.agent.rendezvous.consensus.members import MemberRecord, RankAssignment
from muster.agent.rendezvous.consensus.state import Decision, JobState, Keeping, RoundRunning, update_recovery
from muster.agent.rendezvous.interface import (
    CopySnapshot,
    KeepSnapshot,
    SnapshotCopied,
    SnapshotFound,
    SnapshotKept,
    SnapshotSought,
)
from muster.agent.rendezvous.round_messages import build_source, find_leader_host
from muster.agent.round import Generation, Holding, Source, choose_base, find_lineage
from muster.agent.runtime.persistent import PersistentMap, PersistentSet

LEAD_LIMIT = 1 << 20


def find_snapshot(
    members: Iterable[MemberRecord], assignments: tuple[RankAssignment, ...], known: Generation | None
) -> tuple[Generation | None, Mapping[str, tuple[str, int]]]:
    """Return the generation that a round continues.

    For members without their part of it, also return which member has the part, and whose it was.
    """
    everyone = list(members)
    base = choose_base((holding for member in everyone for holding in member.holdings), len(assignments), known)
    if base is None:
        return None, {}
    by_id = {member.id: member for member in everyone}
    holders: dict[int, tuple[str, Holding]] = {}
    for member in everyone:
        for holding in member.holdings:
            if holding.generation.key == base.key and (holding.group_rank not in holders or not holding.is_copy):
                holders[holding.group_rank] = (member.id, holding)
    sources: dict[str, tuple[str, int]] = {}
    for assignment in assignments:
        nproc, rank = by_id[assignment.id].nproc, assignment.group_rank
        if base.size == len(assignments):
            needed = holders.get(rank)
        else:
            needed = None
        if needed is None and base.is_replicated:
            needed = next((each for each in holders.values() if each[1].nproc == nproc), None)
            own = [each for each in by_id[assignment.id].holdings if each.generation.key == base.key]
            needed = None if own else needed
        if needed is None or needed[1].nproc != nproc:
            continue
        mine = any(
            each.generation.key == base.key and each.group_rank == needed[1].group_rank
            for each in by_id[assignment.id].holdings
        )
        if not mine:
            sources[assignment.id] = (needed[0], needed[1].group_rank)
    return base, sources


def decide_snapshots(state: JobState, sender: str, message: SnapshotKept | SnapshotCopied | SnapshotSought) -> Decision:
    """Return what follows if a member keeps a snapshot, or its neighbour has one."""
    if isinstance(message, SnapshotSought):
        source = _find_holder(state, sender, message.rank)
        found = SnapshotFound(round_number=message.round_number, rank=message.rank, source=source)
        return state, (Send(ids=(sender,), message=found),)
    phase = state.running
    keeping = phase.keeping or Keeping()
    if isinstance(message, SnapshotKept):
        return _on_kept(state, phase, keeping, sender, message)
    if keeping.copying != (message.lineage, message.step):
        return state, ()
    keeping = replace(
        keeping,
        copied=keeping.copied.with_item(sender),
        no_copies=keeping.no_copies or message.has_failed,
    )
    if not keeping.no_copies and len(keeping.copied) < len(state.assignments):
        return _keep(state, phase, keeping), ()
    done = CopySnapshot(
        round_number=state.round_number,
        lineage=message.lineage,
        step=message.step,
        is_done=True,
        is_over=keeping.no_copies,
    )
    keeping = replace(keeping, copying=None, copied=PersistentSet())
    return _keep(state, phase, keeping), (Send(ids=tuple(state.assignments), message=done),)


def _find_holder(state: JobState, sender: str, rank: int) -> Source | None:
    """Return the member with what a rank has saved of the base: its own node, or the one that has a copy."""
    for member in state.members.values():
        for holding in member.holdings:
            first = holding.first_rank
            is_base = state.base is not None and holding.generation.key == state.base.key
            if is_base and first <= rank < first + holding.nproc and member.id != sender:
                return build_source(member, holding.group_rank, find_leader_host(state.members.values()))
    return None


def _on_kept(state: JobState, phase: RoundRunning, keeping: Keeping, sender: str, message: SnapshotKept) -> Decision:
    if message.step < keeping.mark:
        return state, ()  # sent before the mark
    lead = min(LEAD_LIMIT, max(keeping.lead, 1 + message.advance // 4))  # messages take less than 0.25 s
    keeping = replace(
        keeping,
        kept=keeping.kept.with_item(sender, message.step),
        lead=lead,
        is_split=keeping.is_split or message.is_split,
    )
    if len(keeping.kept) < len(state.assignments):
        return _keep(state, phase, keeping), ()
    steps = set(keeping.kept.values())
    if len(steps) > 1 or keeping.is_split:
        mark = max(steps) + lead
        keeping = replace(keeping, kept=PersistentMap(), is_split=False, mark=mark, lead=min(LEAD_LIMIT, 2 * lead))
        told = KeepSnapshot(round_number=state.round_number, step=mark)
        return _keep(state, phase, keeping), (Send(ids=tuple(state.assignments), message=told),)
    snapshot = Generation(
        lineage=find_lineage(state.round_number, state.quorum_rounds[-1].leader_id),
        step=message.step,
        size=len(state.assignments),
        is_replicated=message.is_replicated,
    )
    keeping = replace(keeping, kept=PersistentMap(), mark=message.step + 1, lead=1)
    state = update_recovery(replace(_keep(state, phase, keeping), snapshot=snapshot))
    state, copy = _begin_copy(state)
    return state, (Send(ids=tuple(state.assignments), message=RecoveryChanged(recovery=state.recovery)), *copy)


def _begin_copy(state: JobState) -> Decision:
    """Have the snapshot that was just confirmed sent to the neighbours. No other is confirmed until all have it."""
    phase = state.running
    keeping, snapshot = phase.keeping, state.snapshot
    is_alone = len(state.assignments) == 1 or not state.rules.copies_snapshots
    if keeping is None or snapshot is None or is_alone or keeping.no_copies:
        return state, ()
    state = _keep(state, phase, replace(keeping, copying=snapshot.key, copied=PersistentSet()))
    told = CopySnapshot(round_number=state.round_number, lineage=snapshot.lineage, step=snapshot.step)
    return state, (Send(ids=tuple(state.assignments), message=told),)


def _keep(state: JobState, phase: RoundRunning, keeping: Keeping) -> JobState:
    return replace(state, phase=replace(phase, keeping=keeping))
