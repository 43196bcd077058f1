"""The half at the leader: which snapshot in memory a round continues, and when all ranks have a newer one. Pure.

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

from muster._shared.records import NO_ITEMS, record, replace
from muster.agent.features.snapshots.messages import (
    FEATURE,
    REPORTS,
    CopiesEnded,
    CopySnapshot,
    Generation,
    Holding,
    Holdings,
    KeepSnapshot,
    Order,
    Share,
    SnapshotCopied,
    SnapshotFound,
    SnapshotKept,
    SnapshotSought,
    Source,
    pack,
    unpack,
)
from muster.agent.rendezvous.consensus.halves import PartDecision, PartJob, Plan
from muster.agent.round import PartMemory, find_lineage
from muster.agent.runtime.persistent import PersistentMap, PersistentSet

LEAD_LIMIT = 1 << 20

Held = Mapping[str, tuple[Holding, ...]]
"""What each member holds, by its id."""


@record
class RoundSnapshots:
    """How far the members of a round have proceeded with their snapshots."""

    base: Generation | None = None
    """The snapshot that the round continues."""
    held: Held = NO_ITEMS
    """What the members had of it when the round formed."""
    kept: PersistentMap[str, int] = PersistentMap()
    """The step that all ranks of a member keep until all members do."""
    is_split: bool = False
    """Whether the ranks of a member keep different ones."""
    mark: int = 0
    """The first snapshot at or above this step is kept."""
    lead: int = 1
    """How far a mark is ahead of what was saved when the mark is set."""
    copying: tuple[int, int] | None = None
    """The generation that the members send to their neighbours."""
    copied: PersistentSet[str] = PersistentSet()
    """Members whose neighbours have it."""
    no_copies: bool = False
    """Whether a neighbour could not take one."""


# -- what the seam calls ----------------------------------------------------------------------------------------------


def plan(job: PartJob, before: object, remembered: PartMemory | None, offers: Mapping[str, str]) -> Plan:
    """See `consensus.halves.LeaderHalf`. Nothing of the last round counts but what the members have."""
    del before
    held = {member_id: unpack(Holdings, content).holdings for member_id, content in offers.items()}
    known = None if remembered is None else unpack(Generation, remembered.content)
    base, sources = find_snapshot(job, held, known)
    if base is None:
        return Plan()
    neighbours = _find_neighbours(job)
    shares = {
        member_id: Share(
            source=_build_source(job, *sources[member_id]) if member_id in sources else None,
            neighbour=neighbours.get(member_id),
        )
        for member_id in job.assignments
    }
    return Plan(
        memory=_remember(base),
        shares={member_id: pack(share) for member_id, share in shares.items()},
        state=RoundSnapshots(base=base, held=held),
    )


def decide(job: PartJob, state: object, sender: str, content: str) -> PartDecision:
    """See `consensus.halves.LeaderHalf`."""
    known = state if isinstance(state, RoundSnapshots) else RoundSnapshots()
    report = REPORTS.parse(content) if job.is_running else None
    match report:
        case SnapshotKept():
            return _on_kept(job, known, sender, report)
        case SnapshotCopied():
            return _on_copied(job, known, sender, report)
        case SnapshotSought():
            found = SnapshotFound(rank=report.rank, source=_find_holder(job, known, sender, report.rank))
            return PartDecision(state=known, orders=(_order((sender,), found),))
        case None:
            return PartDecision(state=known)


def choose_newer(known: PartMemory, other: PartMemory) -> PartMemory:
    """See `consensus.halves.LeaderHalf`."""
    return max(known, other, key=lambda each: unpack(Generation, each.content).key)


# -- which snapshot a round continues ---------------------------------------------------------------------------------


def find_snapshot(
    job: PartJob, held: Held, known: Generation | None
) -> tuple[Generation | None, Mapping[str, tuple[str, int]]]:
    """Return the generation that the next round continues.

    For members without their part of it, also return which member has the part, and whose it was.
    """
    base = choose_base((holding for each in held.values() for holding in each), len(job.assignments), known)
    if base is None:
        return None, {}
    holders: dict[int, tuple[str, Holding]] = {}
    for member_id, holdings in held.items():
        for holding in holdings:
            if holding.generation.key == base.key and (holding.group_rank not in holders or not holding.is_copy):
                holders[holding.group_rank] = (member_id, holding)
    sources: dict[str, tuple[str, int]] = {}
    for assignment in job.assignments.values():
        nproc, rank = job.members[assignment.id].nproc, assignment.group_rank
        own = [each for each in held.get(assignment.id, ()) if each.generation.key == base.key]
        needed = holders.get(rank) if base.size == len(job.assignments) else None
        if needed is None and base.is_replicated and not own:
            needed = next((each for each in holders.values() if each[1].nproc == nproc), None)
        if needed is None or needed[1].nproc != nproc:
            continue
        if not any(each.group_rank == needed[1].group_rank for each in own):
            sources[assignment.id] = (needed[0], needed[1].group_rank)
    return base, sources


def choose_base(holdings: Iterable[Holding], size: int, known: Generation | None = None) -> Generation | None:
    """Choose the newest generation of which nodes hold every part, in their own memory or as a copy.

    If a generation is replicated, any part serves all ranks. There are two exceptions. A node that is present may have
    saved other generations in that round but not this one; then an older one may be complete. Or the next round may
    have as many nodes, and an older one be complete: the missing parts have the ranks' random numbers and loaders.

    Args:
        holdings: those of all nodes that may take part.
        size: how many nodes the next round has.
        known: the newest generation that all ranks of the last round had. If that round continued it without a part, a
            returning node with an older one does not take the job back.
    """
    parts: dict[tuple[int, int], set[int]] = {}
    owners: dict[int, set[int]] = {}
    found: dict[tuple[int, int], Generation] = {}
    for holding in holdings:
        generation = holding.generation
        found[generation.key] = generation
        parts.setdefault(generation.key, set()).add(holding.group_rank)
        if not holding.is_copy:
            owners.setdefault(generation.lineage, set()).add(holding.group_rank)
    usable: Generation | None = None
    for key in sorted(parts, reverse=True):
        generation = found[key]
        is_settled = known is not None and known.is_partial and known.key == key
        if len(parts[key]) == generation.size:
            return usable if usable is not None and (usable.size != size or is_settled) else generation
        if generation.is_replicated and usable is None and (is_settled or owners.get(key[0], set()) <= parts[key]):
            usable = replace(generation, is_partial=True)
        if is_settled:
            break
    return usable


def _find_neighbours(job: PartJob) -> dict[str, Source]:
    """Return which node gets copies of each member's part: the one with the next ranks."""
    ordered = sorted(job.assignments.values(), key=lambda each: each.group_rank)
    if len(ordered) == 1:
        return {}
    return {
        each.id: _build_source(job, following.id, following.group_rank)
        for each, following in zip(ordered, [*ordered[1:], ordered[0]], strict=True)
    }


def _build_source(job: PartJob, holder_id: str, group_rank: int) -> Source:
    host, port = job.find_address(holder_id)
    return Source(host=host, port=port, group_rank=group_rank)


def _find_holder(job: PartJob, known: RoundSnapshots, sender: str, rank: int) -> Source | None:
    """Return the member with what a rank has saved of the base: its own node, or the one that has a copy."""
    for member_id, holdings in known.held.items():
        for holding in holdings:
            first = holding.first_rank
            is_base = known.base is not None and holding.generation.key == known.base.key
            is_its = first <= rank < first + holding.nproc
            if is_base and is_its and member_id != sender and member_id in job.members:
                return _build_source(job, member_id, holding.group_rank)
    return None


def _remember(generation: Generation) -> PartMemory:
    return PartMemory(feature=FEATURE, content=pack(generation), step=generation.step)


def _order(ids: Iterable[str], order: Order) -> tuple[tuple[str, ...], str]:
    return tuple(ids), pack(order)


# -- when all ranks have a newer one ----------------------------------------------------------------------------------


def _on_kept(job: PartJob, known: RoundSnapshots, sender: str, message: SnapshotKept) -> PartDecision:
    if message.step < known.mark:
        return PartDecision(state=known)  # sent before the mark
    lead = min(LEAD_LIMIT, max(known.lead, 1 + message.advance // 4))  # messages take less than 0.25 s
    known = replace(
        known,
        kept=known.kept.with_item(sender, message.step),
        lead=lead,
        is_split=known.is_split or message.is_split,
    )
    if len(known.kept) < len(job.assignments):
        return PartDecision(state=known)
    steps = set(known.kept.values())
    if len(steps) > 1 or known.is_split:
        mark = max(steps) + lead
        known = replace(known, kept=PersistentMap(), is_split=False, mark=mark, lead=min(LEAD_LIMIT, 2 * lead))
        return PartDecision(state=known, orders=(_order(job.assignments, KeepSnapshot(step=mark)),))
    snapshot = Generation(
        lineage=find_lineage(job.round_number, job.leader_id),
        step=message.step,
        size=len(job.assignments),
        is_replicated=message.is_replicated,
    )
    known = replace(known, kept=PersistentMap(), mark=message.step + 1, lead=1)
    neighbours = {} if known.no_copies else _find_neighbours(job)
    if neighbours:  # no other is confirmed until all have it
        known = replace(known, copying=snapshot.key, copied=PersistentSet())
    copies = tuple(
        _order((member_id,), CopySnapshot(lineage=snapshot.lineage, step=snapshot.step, neighbour=neighbour))
        for member_id, neighbour in neighbours.items()
    )
    return PartDecision(state=known, memory=_remember(snapshot), orders=copies)


def _on_copied(job: PartJob, known: RoundSnapshots, sender: str, message: SnapshotCopied) -> PartDecision:
    if known.copying != (message.lineage, message.step):
        return PartDecision(state=known)
    known = replace(known, copied=known.copied.with_item(sender), no_copies=known.no_copies or message.has_failed)
    if not known.no_copies and len(known.copied) < len(job.assignments):
        return PartDecision(state=known)
    known = replace(known, copying=None, copied=PersistentSet())
    return PartDecision(state=known, orders=(_order(job.assignments, CopiesEnded(is_over=known.no_copies)),))
