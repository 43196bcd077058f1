"""Flavour `jobset` (jobset.x-k8s.io/v1alpha2): one object for all roles. If one fails, the others are stopped."""

from typing import Any

from muster.schedulers.kubernetes.kinds import JOBSET, build_document
from muster.schedulers.kubernetes.manifests.inputs import AppInputs, RoleInputs
from muster.schedulers.kubernetes.manifests.job import build_job_spec, build_queue_labels
from muster.schedulers.kubernetes.manifests.pod import build_labels


def build_jobset(inputs: AppInputs) -> dict[str, Any]:
    """Return the JobSet. Our pods set restartPolicy Never: its webhook's default is OnFailure."""
    options = inputs.options
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "subdomain": inputs.name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "failurePolicy": {"maxRestarts": _count_restarts(inputs)},
        "replicatedJobs": [_build_replicated_job(inputs, role) for role in inputs.roles],
    }
    if options.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = options.ttl_s
    if options.suspend:
        spec["suspend"] = True
    metadata = {"name": inputs.name, "labels": {**build_labels(inputs), **build_queue_labels(inputs)}}
    return build_document(JOBSET, metadata, spec=spec)


def _build_replicated_job(inputs: AppInputs, role: RoleInputs) -> dict[str, Any]:
    spec = build_job_spec(inputs, role)
    if _restarts_app(role):
        spec["backoffLimit"] = 0  # the JobSet restarts the app
    template = {"metadata": {"labels": build_labels(inputs, role)}, "spec": spec}
    return {"name": role.label, "replicas": 1, "template": template}


def _restarts_app(role: RoleInputs) -> bool:
    """Return whether a role without our agent, which restarts its own workers, has RetryPolicy.APPLICATION."""
    return not role.runs_agent and str(role.role.retry_policy.value) == "APPLICATION"


def _count_restarts(inputs: AppInputs) -> int:
    return max((role.role.max_retries for role in inputs.roles if _restarts_app(role)), default=0)
