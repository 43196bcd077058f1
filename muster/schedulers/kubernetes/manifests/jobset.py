"""Flavour `jobset` (jobset.x-k8s.io/v1alpha2): one object for all roles; what still runs is stopped when one fails."""

from typing import Any, Final

from muster.schedulers.kubernetes.manifests.inputs import AppInputs, RoleInputs
from muster.schedulers.kubernetes.manifests.job import build_job_spec, build_queue_labels, prune
from muster.schedulers.kubernetes.manifests.pod import build_labels

API_VERSION: Final = "jobset.x-k8s.io/v1alpha2"


def build_jobset(plan: AppInputs) -> dict[str, Any]:
    """The JobSet. Its webhook would default restartPolicy of the pods to OnFailure; ours say Never."""
    options = plan.options
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "subdomain": plan.name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "failurePolicy": {"maxRestarts": _count_restarts(plan)},
        "replicatedJobs": [_build_replicated_job(plan, role) for role in plan.roles],
    }
    if options.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = options.ttl_s
    if options.suspend:
        spec["suspend"] = True
    metadata = prune({"name": plan.name, "labels": {**build_labels(plan), **build_queue_labels(plan)}})
    return {"apiVersion": API_VERSION, "kind": "JobSet", "metadata": metadata, "spec": spec}


def _build_replicated_job(plan: AppInputs, role: RoleInputs) -> dict[str, Any]:
    spec = build_job_spec(plan, role)
    if _restarts_app(role):
        spec["backoffLimit"] = 0  # a lost replica restarts the whole app: the JobSet counts, not the Job
    template = {"metadata": {"labels": build_labels(plan, role)}, "spec": spec}
    return {"name": role.label, "replicas": 1, "template": template}


def _restarts_app(role: RoleInputs) -> bool:
    """RetryPolicy.APPLICATION of a role that our agent does not heal."""
    return not role.is_agent and str(role.role.retry_policy.value) == "APPLICATION"


def _count_restarts(plan: AppInputs) -> int:
    return max((role.role.max_retries for role in plan.roles if _restarts_app(role)), default=0)
