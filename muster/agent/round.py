"""One agreed membership as one node needs it: rendezvous passes it to workers, logs and reports."""

from muster.agent.runtime.records import record


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
