"""What Slurm's states and reasons mean for an app."""

import time
from collections.abc import Sequence
from typing import Final

from torchx.specs import AppState

from muster._shared.records import replace
from muster.schedulers.adapter import Code, Reason
from muster.schedulers.slurm.client import NodeSize, Partition, QueueEntry, ResourceRequest
from muster.schedulers.wording.words import ENDS

_NAMES: Final = {
    AppState.PENDING: "PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT RESV_DEL_HOLD",
    AppState.RUNNING: "RUNNING COMPLETING SIGNALING STAGE_OUT RESIZING SUSPENDED STOPPED",
    AppState.SUCCEEDED: "COMPLETED",
    AppState.CANCELLED: "CANCELLED",
    AppState.FAILED: "BOOT_FAIL DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT",
}
STATES: Final = {name: state for state, names in _NAMES.items() for name in names.split()}
"""The states of a job. An app may go on in another job."""
SIZES: Final = ("Resources", "PartitionNodeLimit", "PartitionConfig")
"""Reasons that are clearer with what the job asks for."""
_NOT_KNOWN: Final = ResourceRequest()


def explain_size(nodes: int, partitions: Sequence[Partition], *, job: str = "", word: str = "") -> Reason | None:
    """Return that a job asks for more nodes than each of its partitions has or gives one job. None: it does not.

    Args:
        nodes: that it asks for.
        partitions: any of them will do.
        job: its id, if it waits.
        word: Slurm's reason, if it waits.
    """
    found = []
    for each in partitions:
        if nodes > each.nodes:
            found.append(Reason(code=Code.PARTITION_HAS, what=each.name, count=each.nodes))
        elif each.most_nodes is not None and nodes > each.most_nodes:
            found.append(Reason(code=Code.PARTITION_GIVES, what=each.name, count=each.most_nodes))
        else:
            return None
    return Reason(code=Code.TOO_MANY_NODES, job=job, word=word, total=nodes, causes=tuple(found)) if found else None


def explain_refusal(error: str, names: str, options: Sequence[str], sizes: Sequence[NodeSize]) -> str:
    """Say what of a job this cluster does not have. "": what sbatch says is all that is known.

    Args:
        error: of sbatch.
        names: of the partitions, which commas separate. "": the default one.
        options: those that ask for CPUs and memory.
        sizes: of the nodes.
    """
    known = {each.name: f"{each.name} (default)" if each.is_default else each.name for each in sizes}
    wanted = names.split(",") if names else [each.name for each in sizes if each.is_default]
    if "invalid partition" in error.lower():
        missing = " or ".join(repr(each) for each in wanted if each not in known)
        has = f"; it has {', '.join(known.values())}" if known else ""
        return f"this cluster has no partition {missing}{has}" if missing else ""
    found = [each for each in sizes if each.name in wanted]
    if "Requested node configuration is not available" not in error or not options or not found:
        return ""
    most = f"at most {max(each.cpus for each in found)} CPUs and {max(each.memory_mb for each in found)} MB"
    where = " and ".join(dict.fromkeys(each.name for each in found))
    return f"{error}: the job asks for {' '.join(options)} on each node; the nodes of {where} have {most}"


def explain_wait(entry: QueueEntry, wanted: ResourceRequest = _NOT_KNOWN) -> Reason:
    """Return why a job waits, and until when.

    Args:
        entry: the job.
        wanted: what it asks for.
    """
    is_known = entry.start_s is not None and entry.start_s >= time.time() and "held" not in entry.reason.lower()
    job, name, at_s = entry.job_id, entry.reason, entry.start_s if is_known else None
    too_many = explain_size(wanted.nodes, wanted.partitions, job=job, word=name)
    if too_many is not None:
        return replace(too_many, at_s=at_s)
    if name == "Resources" and wanted.nodes and len(wanted.partitions) == 1:
        (only,) = wanted.partitions
        code = Code.WAITS_FOR_NODES
        return Reason(code=code, job=job, word=name, count=wanted.nodes, total=only.nodes, what=only.name, at_s=at_s)
    if name == "PartitionConfig" and wanted.nodes:
        names = " and ".join(each.name for each in wanted.partitions)
        code = Code.PARTITION_CANNOT_GIVE
        return Reason(code=code, job=job, word=name, what=names, count=wanted.nodes, lacks=wanted.per_node, at_s=at_s)
    return Reason(code=Code.SLURM_WAITS, job=job, word=name, what=name, at_s=at_s)


def explain_end(entry: QueueEntry) -> Reason | None:
    """Return why Slurm has ended a job. None: its exit code alone says it."""
    is_by_slurm = entry.state in ENDS
    return Reason(code=Code.SLURM_ENDED, job=entry.job_id, word=entry.state) if is_by_slurm else None
