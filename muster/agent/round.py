"""One agreed membership as one node needs it: rendezvous passes it to workers, logs and reports."""

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
    """Counts the job's, also over its incarnations: of two, the one with the higher number is the later."""
    step: Step
    path: CheckpointPath
    """As the lowest rank that named one has named it."""

    def describe(self) -> str:
        """Step and path, for a line on the console."""
        return f"step {self.step}, {self.path}"


@record
class Generation:
    """A snapshot of the whole job: all ranks have saved it at one step."""

    lineage: Count
    """Names the round in which it was saved; that of a later round is greater."""
    step: Step
    size: Size
    """How many nodes that round had."""
    is_replicated: bool = False
    """The tensors are the same on all ranks."""
    is_partial: Annotated[bool, SPARSE] = False
    """A round has continued it although a part is lost: no later one goes back to an older generation for that part."""

    @property
    def key(self) -> tuple[int, int]:
        """Lineage and step, which name it."""
        return self.lineage, self.step


@record
class Holding:
    """What a node has in memory of a generation: the whole of one node of its round."""

    generation: Generation
    group_rank: GroupRank
    """Of the node whose ranks have saved it."""
    first_rank: Count
    """Their lowest global rank then."""
    nproc: Processes
    is_copy: bool = False
    """It was sent by that node: this one is its neighbour."""


Holdings = Annotated[tuple[Holding, ...], Limit(most=64), SPARSE]


@record
class Source:
    """The node that has what another one lacks of the generation that a round continues."""

    host: Host
    port: Port
    group_rank: GroupRank
    """Of the node of the earlier round whose part it is."""


@record
class Round:
    """One agreed membership, as one node needs it."""

    number: int
    """Counts up until the job ends, also across leaders."""
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
    """TORCHELASTIC_USE_AGENT_STORE: an agent hosts the store, and all workers are its clients."""
    hosts_store: bool = False
    """This agent must host it; False also behind those of torch's handlers that do so themselves."""
    node_index: int = 0
    """The index this node joined with (--node-rank), which decides the order of ranks."""
    checkpoint: Checkpoint | None = None
    """From which the workers can resume."""
    lineage: int = 0
    """Of the snapshots that are saved in it; 0: none can be, for the nodes cannot agree on one."""
    snapshot: Generation | None = None
    """The one that all ranks continue."""
    source: Source | None = None
    """Where this node's part of it is, if this node has none."""
    neighbour: Source | None = None
    """The node that gets copies of this one's snapshots; None: no node does."""
    repeats: int = 0
    """How often attempts have failed of the cause that ended the last one, with no progress between."""


def find_lineage(round_number: int, leader_id: str) -> int:
    """Return the lineage of a round: of two leaders that use the same number, each has another."""
    return (round_number % (1 << 32)) << 20 | zlib.crc32(leader_id.encode()) >> 12


def choose_base(holdings: Iterable[Holding], size: int, known: Generation | None = None) -> Generation | None:
    """Choose the newest generation of which every part is held by a node, in its own memory or as a copy.

    Of a replicated one any part serves all ranks. It is not enough, though, if a node that is here has saved others in
    that round and not this one: an older one may then be complete. Nor if the next round has as many nodes, and an
    older one is complete: the ranks' random numbers and loaders are in the missing parts.

    Args:
        holdings: of all nodes that may take part.
        size: how many nodes the next round has.
        known: the newest that all ranks of the last round had. If that round continued it without a part, a node that
            comes back with an older one does not take the job back.
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
