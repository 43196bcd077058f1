"""Flavour `volcano` (batch.volcano.sh/v1alpha1): Volcano's own Job, for clusters that schedule everything with it.

Every role is one task, however many nodes. The exception is an elastic job: Volcano starts any `minAvailable` pods of
a task, in no order, and without node 0 nobody leads; so node 0 is a task of its own with minAvailable 1, and the rest
another. Volcano counts each task from 0 and Kubernetes cannot add, so in the rest the agent does (`Env.NODE_INDEX`).
"""

from typing import Any, Final

from muster._contract import NEVER_RETRY
from muster.schedulers.kubernetes.labels import TASK_INDEX_LABEL
from muster.schedulers.kubernetes.manifests.inputs import AppInputs, RoleInputs
from muster.schedulers.kubernetes.manifests.job import prune
from muster.schedulers.kubernetes.manifests.pod import build_labels, build_pod_template
from muster.schedulers.kubernetes.names import LEAD

API_VERSION: Final = "batch.volcano.sh/v1alpha1"

_SERVICE_ARGS: Final = (
    "--publish-not-ready-addresses=true",
    "--disable-network-policy=true",
    "--inject-hosts-env=false",  # two variables per task in every pod otherwise; last: unknown before 1.16
)


def build_volcano_job(plan: AppInputs) -> dict[str, Any]:
    """The Volcano Job; its svc plugin makes the headless Service."""
    options = plan.options
    tasks = [task for role in plan.roles for task in _build_tasks(plan, role)]
    spec: dict[str, Any] = {
        "schedulerName": "volcano",
        "minAvailable": plan.minimum,
        "maxRetry": max(role.role.max_retries for role in plan.roles),
        "plugins": {"svc": list(_SERVICE_ARGS), "env": []},
        "tasks": tasks,
    }
    if options.queue:
        spec["queue"] = options.queue
    if options.priority_class:
        spec["priorityClassName"] = options.priority_class
    if options.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = options.ttl_s
    metadata = prune({"name": plan.name, "labels": build_labels(plan)})
    return {"apiVersion": API_VERSION, "kind": "Job", "metadata": metadata, "spec": spec}


def _build_tasks(plan: AppInputs, role: RoleInputs) -> list[dict[str, Any]]:
    if role.label != plan.place.lead:
        return [_build_task(plan, role, name=role.label, replicas=role.max_nodes, minimum=role.min_nodes)]
    lead = _build_task(plan, role, name=LEAD, replicas=1, minimum=1)
    lead["policies"].append({"event": "TaskCompleted", "action": "CompleteJob"})
    rest = _build_task(
        plan, role, name=role.label, replicas=role.max_nodes - 1, minimum=role.min_nodes - 1, first_index=1
    )
    return [lead, rest]


def _build_task(
    plan: AppInputs, role: RoleInputs, *, name: str, replicas: int, minimum: int, first_index: int = 0
) -> dict[str, Any]:
    return {
        "name": name,
        "replicas": replicas,
        "minAvailable": minimum,
        "maxRetry": max(1, role.role.max_retries),
        "policies": _build_policies(role),
        "template": build_pod_template(plan, role, index_label=TASK_INDEX_LABEL, first_index=first_index),
    }


def _build_policies(role: RoleInputs) -> list[dict[str, Any]]:
    """What becomes of the job when a pod ends badly. No policy for PodEvicted: a drained pod is simply made again."""
    restart = "RestartPod" if role.is_agent or role.role.retry_policy.value != "APPLICATION" else "RestartJob"
    policies: list[dict[str, Any]] = []
    if role.is_agent:
        policies += [{"exitCode": code, "action": "TerminateJob"} for code in NEVER_RETRY]
    policies.append({"event": "PodFailed", "action": restart if role.role.max_retries else "TerminateJob"})
    return policies
