"""What stands in front of a worker's line on the console."""

from muster.agent.rendezvous.interface import Round


def build_prefix(*, role: str, local_rank: int, round: Round, template: str | None = None) -> bytes:  # noqa: A002
    """The prefix of one worker in one round.

    `[role0]:` (role and local rank) as torchrun has it; with more than one node `[role0|n1.r3]:`, node (its group
    rank) and global rank added. The number after the role stays the local rank in both.

    Args:
        role: the role's name.
        local_rank: the worker's rank on this node.
        round: the membership the worker was started for.
        template: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE. Knows torch's `${role_name}`, `${rank}` (global) and
            `${local_rank}`, and `${global_rank}`, `${node}`, `${node_index}`, `${world_size}`, `${nodes}`,
            `${attempt}`, `${round}`. Unknown names stay as they are, as with torchrun.
    """
    global_rank = round.rank_offset + local_rank
    if template:
        return _fill(template, role=role, local_rank=local_rank, global_rank=global_rank, round=round)
    if round.group_world_size > 1:
        return f"[{role}{local_rank}|n{round.group_rank}.r{global_rank}]:".encode()
    return f"[{role}{local_rank}]:".encode()


def _fill(template: str, *, role: str, local_rank: int, global_rank: int, round: Round) -> bytes:  # noqa: A002
    from string import Template

    return (
        Template(template)
        .safe_substitute(
            role_name=role,
            rank=global_rank,
            local_rank=local_rank,
            global_rank=global_rank,
            node=round.group_rank,
            node_index=round.node_index,
            world_size=round.world_size,
            nodes=round.group_world_size,
            attempt=round.attempt,
            round=round.number,
        )
        .encode("utf-8", "surrogateescape")
    )
