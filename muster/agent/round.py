"""One agreed membership as one node needs it, which rendezvous passes to workers, logs and reports."""

import zlib
from typing import Annotated

from muster._shared.fields import JSON, SPARSE, Count, Limit, Name, Step
from muster._shared.layouts import StatusPageLayout
from muster._shared.records import record

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
class PartMemory:
    """What a feature remembers of the job. All nodes know it; it outlives rounds and leaders."""

    feature: Name
    content: Annotated[str, Limit(most=512), JSON]
    """A record of the feature."""
    step: Step | None = None
    """The step at which the workers of a round continue by it."""


PartMemories = Annotated[tuple[PartMemory, ...], Limit(most=4), SPARSE]


@record
class PartShare:
    """What a feature's part on one node must know of a round, and no other node's."""

    feature: Name
    content: Annotated[str, Limit(most=2048), JSON]
    """A record of the feature."""


PartShares = Annotated[tuple[PartShare, ...], Limit(most=4), SPARSE]


@record
class PartOffer:
    """What a node has for the next round, for a feature."""

    feature: Name
    content: Annotated[str, Limit(most=6144), JSON]
    """A record of the feature."""


PartOffers = Annotated[tuple[PartOffer, ...], Limit(most=2), SPARSE]


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
    """Names the round, also across leaders: a later one has a greater lineage. 0: the nodes cannot agree on one."""
    memories: tuple[PartMemory, ...] = ()
    """What features remember of the job."""
    shares: tuple[PartShare, ...] = ()
    """What their parts on this node must know of the round."""
    repeats: int = 0
    """How often attempts have failed because of the last one's cause, without progress in between."""

    @property
    def continued_step(self) -> int | None:
        """The step at which the workers continue, by what a feature remembers; None if no feature says one."""
        return max((each.step for each in self.memories if each.step is not None), default=None)


def find_lineage(round_number: int, leader_id: str) -> int:
    """Return the lineage of a round. Two leaders that use the same number have different lineages."""
    return (round_number % (1 << 32)) << 20 | zlib.crc32(leader_id.encode()) >> 12
