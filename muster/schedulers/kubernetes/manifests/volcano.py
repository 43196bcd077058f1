"""Flavour `volcano` (batch.volcano.sh/v1alpha1): Volcano's own Job, for clusters that schedule everything with it.

Every role is one task, for any number of nodes. The exception is an elastic role: Volcano starts any `minAvailable`
pods of a task, and without node 0 the job has no leader. So node 0 is a separate task with minAvailable 1, and the
other nodes are another. Volcano counts each task from 0; the agent of the other nodes adds 1 (`Env.NODE_INDEX`).

When the leader's task has completed, the job completes: pods of an elastic role that were never scheduled would keep it
open. No policy can say less: of Volcano's actions CompleteJob, TerminateJob and AbortJob end the whole job, RestartTask
and RestartPod start again, and `minSuccess` counts the pods of all tasks together. So an elastic role must be the only
one that runs the agent.
"""

from typing import Any, Final

from muster._shared.contract import NEVER_RETRY, ExitCode
from muster.schedulers.kubernetes.kinds import VOLCANO_JOB
from muster.schedulers.kubernetes.labels import TASK_INDEX_LABEL
from muster.schedulers.kubernetes.manifests.inputs import AppInputs, RoleInputs
from muster.schedulers.kubernetes.manifests.job import prune
from muster.schedulers.kubernetes.manifests.pod import build_labels, build_pod_template
from muster.schedulers.kubernetes.names import LEADER_TASK

_SERVICE_ARGS: Final = (
    "--publish-not-ready-addresses=true",
    "--disable-network-policy=true",
    "--inject-hosts-env=false",  # otherwise two variables per task in every pod; last, since unknown before 1.16
)


def build_volcano_job(inputs: AppInputs) -> dict[str, Any]:
    """The Volcano Job; its svc plugin creates the headless Service."""
    options = inputs.options
    tasks = [task for role in inputs.roles for task in _build_tasks(inputs, role)]
    spec: dict[str, Any] = {
        "schedulerName": "volcano",
        "minAvailable": inputs.minimum,
        "maxRetry": max(role.role.max_retries for role in inputs.roles),
        "plugins": {"svc": list(_SERVICE_ARGS), "env": []},
        "tasks": tasks,
    }
    if options.queue:
        spec["queue"] = options.queue
    if options.priority_class:
        spec["priorityClassName"] = options.priority_class
    if options.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = options.ttl_s
    metadata = prune({"name": inputs.name, "labels": build_labels(inputs)})
    return {"apiVersion": VOLCANO_JOB.api_version, "kind": VOLCANO_JOB.kind, "metadata": metadata, "spec": spec}


def _build_tasks(inputs: AppInputs, role: RoleInputs) -> list[dict[str, Any]]:
    if role.label != inputs.naming.elastic_role:
        return [_build_task(inputs, role, name=role.label, replicas=role.max_nodes, minimum=role.min_nodes)]
    leader = _build_task(inputs, role, name=LEADER_TASK, replicas=1, minimum=1)
    leader["policies"].append({"event": "TaskCompleted", "action": "CompleteJob"})
    rest = _build_task(
        inputs, role, name=role.label, replicas=role.max_nodes - 1, minimum=role.min_nodes - 1, first_index=1
    )
    return [leader, rest]


def _build_task(
    inputs: AppInputs, role: RoleInputs, *, name: str, replicas: int, minimum: int, first_index: int = 0
) -> dict[str, Any]:
    return {
        "name": name,
        "replicas": replicas,
        "minAvailable": minimum,
        "maxRetry": max(1, role.role.max_retries),
        "policies": _build_policies(role),
        "template": build_pod_template(inputs, role, index_label=TASK_INDEX_LABEL, first_index=first_index),
    }


def _build_policies(role: RoleInputs) -> list[dict[str, Any]]:
    """What a failed pod means for the job. No policy for PodEvicted: Volcano replaces a drained pod anyway.

    Agents that were preempted (143) are started again even without retries. With retries, each start again counts
    against `maxRetry`: Volcano has no rule that ignores an exit code.
    """
    restart = "RestartPod" if role.runs_agent or role.role.retry_policy.value != "APPLICATION" else "RestartJob"
    policies: list[dict[str, Any]] = []
    if role.runs_agent:
        policies += [{"exitCode": code, "action": "TerminateJob"} for code in NEVER_RETRY]
        policies.append({"exitCode": int(ExitCode.TERMINATED), "action": "RestartPod"})
    policies.append({"event": "PodFailed", "action": restart if role.role.max_retries else "TerminateJob"})
    return policies
