"""Slurm's own names of reasons and states, in plain words."""

from typing import Final

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


def explain_reason(name: str, job: str) -> str:
    """Return why a job waits, with Slurm's name of the reason, for which people search."""
    if not name:
        return "Slurm has not looked at it yet"
    word = name.partition(",")[0].strip("()")
    words = REASONS.get(word) or next((each for start, each in _PREFIXES.items() if word.startswith(start)), "")
    return f"{words.replace('JOBID', job)} ({name})" if words else name
