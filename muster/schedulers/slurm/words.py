"""Slurm's states and reasons in plain words."""

import time
from collections.abc import Sequence
from typing import Final

from torchx.specs import AppState

from muster.schedulers.slurm.client import NodeSize, Partition, QueueEntry, Wish

STATES: Final = {
    "PENDING": AppState.PENDING,
    "CONFIGURING": AppState.PENDING,
    "REQUEUED": AppState.PENDING,
    "REQUEUE_HOLD": AppState.PENDING,
    "REQUEUE_FED": AppState.PENDING,
    "SPECIAL_EXIT": AppState.PENDING,
    "RESV_DEL_HOLD": AppState.PENDING,
    "RUNNING": AppState.RUNNING,
    "COMPLETING": AppState.RUNNING,
    "SIGNALING": AppState.RUNNING,
    "STAGE_OUT": AppState.RUNNING,
    "RESIZING": AppState.RUNNING,
    "SUSPENDED": AppState.RUNNING,
    "STOPPED": AppState.RUNNING,
    "COMPLETED": AppState.SUCCEEDED,
    "CANCELLED": AppState.CANCELLED,
    "BOOT_FAIL": AppState.FAILED,
    "DEADLINE": AppState.FAILED,
    "FAILED": AppState.FAILED,
    "NODE_FAIL": AppState.FAILED,
    "OUT_OF_MEMORY": AppState.FAILED,
    "PREEMPTED": AppState.FAILED,
    "REVOKED": AppState.FAILED,
    "TIMEOUT": AppState.FAILED,
}
"""The states of a job. An app may go on in another job."""

REASONS: Final = {
    "Priority": "jobs with a higher priority are before it",
    "Resources": "it waits for free nodes",
    "Dependency": "it waits for the end of another job",
    "DependencyNeverSatisfied": "the job that it waits for can no longer end as required",
    "BeginTime": "its time to begin has not come",
    "JobHeldUser": "a user holds it: scontrol release JOBID lets it go on",
    "job requeued in held state": "a user holds it: scontrol release JOBID lets it go on",
    "JobHeldAdmin": "an administrator holds it",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Reservation": "it waits for its reservation",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition starts no jobs",
    "PartitionNodeLimit": "it asks for more nodes than its partition gives one job",
    "PartitionTimeLimit": "it asks for more time than its partition gives one job",
    "PartitionConfig": "its partition cannot give what it asks for",
    "BadConstraints": "no node has what it asks for",
    "NodeDown": "a node that it needs is down",
    "Licenses": "it waits for a license",
    "AssocGrpGRES": "its account uses as many GPUs as it may",
    "AssocMaxJobsLimit": "its account runs as many jobs as it may",
    "QOSMaxJobsPerUserLimit": "you run as many jobs as its quality of service allows",
    "QOSMaxNodePerUserLimit": "you use as many nodes as its quality of service allows",
    "QOSMaxGRESPerUser": "you use as many GPUs as its quality of service allows",
    "QOSGrpNodeLimit": "its quality of service has all the nodes that it may",
    "QOSMaxWallDurationPerJobLimit": "it asks for more time than its quality of service allows",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its quality of service is not valid",
    "launch failed requeued held": "it could not be started, and is held: scontrol release JOBID tries again",
    "RaisedSignal": "a signal ended it",
    "NonZeroExitCode": "its script exited with a code other than 0",
    "TimeLimit": "its time limit is over",
    "NodeFail": "a node was lost",
}
SIZES: Final = ("Resources", "PartitionNodeLimit", "PartitionConfig")
"""Reasons that are clearer with what the job asks for."""
_NOT_KNOWN: Final = Wish()
_PREFIXES: Final = {
    "QOS": "a limit of its quality of service is reached",
    "Assoc": "a limit of its account is reached",
    "ReqNodeNotAvail": REASONS["ReqNodeNotAvail"],
    "MaxMem": "it asks for more memory than one job may",
}
ENDS: Final = {
    "BOOT_FAIL": "a node did not boot",
    "CANCELLED": "a person or a program cancelled it with scancel",
    "DEADLINE": "it could not end before its deadline",
    "NODE_FAIL": "a node that the job needs was lost",
    "OUT_OF_MEMORY": "it needed more memory than it had",
    "PREEMPTED": "another job took its nodes",
    "REVOKED": "another cluster runs it",
    "TIMEOUT": "its time limit is over",
}


def explain_reason(reason: str) -> str:
    """Return Slurm's reason for which a job waits, with the word that people search for."""
    word = reason.partition(",")[0].strip("()")
    words = REASONS.get(word) or next((each for start, each in _PREFIXES.items() if word.startswith(start)), "")
    return f"{words} ({reason})" if words else reason


def explain_size(nodes: int, partitions: Sequence[Partition]) -> str:
    """Say that a job asks for more nodes than each of its partitions has or gives one job. "": it does not."""
    found = []
    for each in partitions:
        if nodes > each.nodes:
            found.append(f"partition {each.name} has {each.nodes}")
        elif each.most_nodes is not None and nodes > each.most_nodes:
            found.append(f"partition {each.name} gives one job at most {each.most_nodes}")
        else:
            return ""
    return f"asks for {nodes} nodes, and {' and '.join(found)}" if found else ""


def explain_refusal(error: str, names: str, asked: Sequence[str], sizes: Sequence[NodeSize]) -> str:
    """Say what of a job this cluster does not have. "": what sbatch says is all that is known.

    Args:
        error: of sbatch.
        names: of the partitions, which commas separate. "": the default one.
        asked: the options that ask for CPUs and memory.
        sizes: of the nodes.
    """
    known = {each.name: f"{each.name} (default)" if each.is_default else each.name for each in sizes}
    wanted = names.split(",") if names else [each.name for each in sizes if each.is_default]
    if "invalid partition" in error.lower():
        missing = " or ".join(repr(each) for each in wanted if each not in known)
        has = f"; it has {', '.join(known.values())}" if known else ""
        return f"this cluster has no partition {missing}{has}" if missing else ""
    found = [each for each in sizes if each.name in wanted]
    if "Requested node configuration is not available" not in error or not asked or not found:
        return ""
    most = f"at most {max(each.cpus for each in found)} CPUs and {max(each.memory_mb for each in found)} MB"
    where = " and ".join(dict.fromkeys(each.name for each in found))
    return f"{error}: the job asks for {' '.join(asked)} on each node; the nodes of {where} have {most}"


def explain_wait(entry: QueueEntry, wish: Wish = _NOT_KNOWN) -> str:
    """Return why a job waits, and until when.

    Args:
        entry: the job.
        wish: what it asks for.
    """
    nodes, partitions = wish.nodes, wish.partitions
    too_many = explain_size(nodes, partitions)
    if too_many:
        why = f"it {too_many} ({entry.reason})"
    elif entry.reason == "Resources" and nodes and len(partitions) == 1:
        (only,) = partitions
        why = f"it waits until {nodes} of the {only.nodes} nodes of partition {only.name} are free ({entry.reason})"
    elif entry.reason == "PartitionConfig" and nodes:
        names = " and ".join(each.name for each in partitions)
        where = f"partition {names}" if names else "its partition"
        why = (
            f"{where} cannot give what it asks for ({_describe_wish(wish)}), and it does not start unless that changes"
        )
        why += f" ({entry.reason})"
    else:
        why = explain_reason(entry.reason) if entry.reason else "Slurm has not looked at it yet"
    text = f"job {entry.job_id} waits: {why.replace('JOBID', entry.job_id)}"
    if entry.start_s is None or entry.start_s < time.time() or "held" in entry.reason.lower():
        return text
    return f"{text}; starts about {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(entry.start_s))}"


def _describe_wish(wish: Wish) -> str:
    *most, last = wish.per_node or ("",)
    per_node = f"{', '.join(most)} and {last}" if most else last
    if wish.nodes == 1:
        return f"1 node with {per_node}" if per_node else "1 node"
    return f"{wish.nodes} nodes, each with {per_node}" if per_node else f"{wish.nodes} nodes"


def explain_end(entry: QueueEntry) -> str:
    """Return why a job has ended, as Slurm says it. "": its exit code alone."""
    words = ENDS.get(entry.state, "")
    return f"Slurm ended job {entry.job_id}: {words} ({entry.state})" if words else ""
