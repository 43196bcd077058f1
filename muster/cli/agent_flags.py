"""What the command of a role's agents says of its ranks, of their lines and of where they are kept."""

from torchx.specs import Role

from muster._shared.contract import Env
from muster.schedulers.agent_command import find_agent_flag, list_agent_flags


def count_ranks(role: Role) -> int | None:
    """Count the ranks that a role has at most. None: only its nodes know how many processes they start.

    Args:
        role: of an app; it runs agents.
    """
    processes = find_agent_flag(role.args, "nproc-per-node") or role.env.get("PET_NPROC_PER_NODE", "1")
    if processes == "gpu" and role.resource.gpu > 0:
        processes = str(role.resource.gpu)
    if not processes.isdecimal():
        return None
    nodes = (find_agent_flag(role.args, "nnodes") or role.env.get("PET_NNODES", "1")).rpartition(":")[2]
    most: int = max(role.num_replicas, int(nodes) if nodes.isdecimal() else 1)
    return most * int(processes)


def has_tee(role: Role) -> bool:
    """Return whether the lines of ranks are in the output of their node with a prefix, because of `--tee` or `-t`."""
    values = [
        flag.value
        for flag in list_agent_flags(role.args)
        if (len(flag.spelling) > 1 and flag.matches("tee")) or role.args[flag.begin].startswith("-t")
    ]
    return [role.env.get("PET_TEE", ""), *values][-1] not in ("", "0")


def describe_keeping(role: Role) -> str:
    """Say where the files of a role's agents may still be, or how to keep those of the next job."""
    folder = role.env.get(Env.LOG_DIR)
    if folder:
        return f"if {folder} ({Env.LOG_DIR}) is on a volume, they are still there"
    return f"to keep them next time, add `--env {Env.LOG_DIR}=FOLDER`, on a volume"
