"""One agreed membership as one node needs it, which rendezvous passes to workers, logs and reports."""

import zlib
from collections.abc import Iterable
from typing import Annotated

from muster._shared.contract import StatusPageLayout
from muster._shared.fields import SPARSE, Count, GroupRank, Host, Limit, Port, Processes, Size, Step
from muster._shared.records import record, replace

CheckpointPath = Annotated[str, Limit(most=StatusPageLayout.PATH_BYTES)]


@record
class Checkpoint:
    """A checkpoint that all ranks of the job have saved at one step."""

    number: Count
    """Counts the job's checkpoints, also over its incarnations: the one with the higher number is the later."""
    step: Step
    path: CheckpointPath
    """The path, as given by the lowest rank that named one."""

    def describe(self) -> str:
        """Return step and path, for a line on the console."""
        return f"step {self.step}, {self.path}"


@record
class Generation:
    """A snapshot of the whole job, which all ranks have saved at one step."""

    lineage: Count
    """Names the round in which it was saved; a later round has a greater lineage."""
    step: Step
    size: Size
    """How many nodes that round had."""
    is_replicated: bool = False
    """Whether the tensors are the same on all ranks."""
    is_partial: Annotated[bool, SPARSE] = False
    """Whether a round has continued it although a part is lost; no later round returns to an older generation for that
    part."""

    @property
    def key(self) -> tuple[int, int]:
        """Lineage and step, which together name it."""
        return self.lineage, self.step


@record
class Holding:
    """What a node has in memory of a generation: all that one node of its round saved."""

    generation: Generation
    group_rank: GroupRank
    """Group rank of the node whose ranks have saved it."""
    first_rank: Count
    """The lowest global rank of that node then."""
    nproc: Processes
    is_copy: bool = False
    """Whether that node has sent it, because this node is its neighbour."""


Holdings = Annotated[tuple[Holding, ...], Limit(most=64), SPARSE]


@record
class Source:
    """The node that has what another one lacks of the generation that a round continues."""

    host: Host
    port: Port
    group_rank: GroupRank
    """Group rank, in the earlier round, of the node whose part it is."""


@record
class Round:
    """One agreed membership, as one node needs it."""

    number: int
    """The round's number, which grows until the job ends, also across leaders."""
    attempt: int
    """How often workers were restarted because one failed: TORCHELASTIC_RESTART_COUNT."""
    restarts_left: int
    """What remains of the job's budget."""
    group_rank: int
    group_world_size: int
    rank_offset: int
    """Global rank of this node's local rank 0."""
    world_size: int
    role_rank_offset: int
    role_world_size: int
    master_addr: str
    master_port: int
    use_agent_store: bool = False
    """TORCHELASTIC_USE_AGENT_STORE: whether an agent hosts the store, and all workers are its clients."""
    hosts_store: bool = False
    """Whether this agent must host the store; False also for torch's handlers that host it themselves."""
    node_index: int = 0
    """The index this node joined with (--node-rank), which decides the order of ranks.

    Without one, it is the group rank.
    """
    checkpoint: Checkpoint | None = None
    """The checkpoint from which the workers can resume."""
    lineage: int = 0
    """Lineage of the snapshots that are saved in it. 0 means that none can be, because the nodes cannot agree on one.
    """
    snapshot: Generation | None = None
    """The snapshot that all ranks continue."""
    source: Source | None = None
    """Where this node's part of the snapshot is, if this node has none."""
    neighbour: Source | None = None
    """The node that gets copies of this one's snapshots; None if no node does."""
    repeats: int = 0
    """How often attempts have failed because of the last one's cause, without progress in between."""


def find_lineage(round_number: int, leader_id: str) -> int:
    """Return the lineage of a round. Two leaders that use the same number have different lineages."""
    return (round_number % (1 << 32)) << 20 | zlib.crc32(leader_id.encode()) >> 12


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
