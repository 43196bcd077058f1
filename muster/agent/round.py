"""One agreed membership as one node needs it: rendezvous passes it to workers, logs and reports."""

from typing import Annotated

from muster._shared.contract import StatusPageLayout
from muster._shared.fields import Count, Limit, Step
from muster._shared.records import record

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
