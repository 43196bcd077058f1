"""Flavour `job`: one batch/v1 Indexed Job per role and a headless Service. Needs nothing installed in the cluster."""

from typing import Any

from muster.schedulers.kubernetes.labels import (
    JOB_INDEX_LABEL,
    KUEUE_EQUAL,
    KUEUE_MINIMUM,
    KUEUE_PRIORITY,
    KUEUE_QUEUE,
    LABEL_INSTANCE,
)
from muster.schedulers.kubernetes.manifests.inputs import AppInputs, RoleInputs
from muster.schedulers.kubernetes.manifests.pod import DISRUPTION_RULE, EXIT_RULE, build_labels, build_pod_template
from muster.schedulers.kubernetes.names import RolePlace


def build_jobs(plan: AppInputs) -> list[dict[str, Any]]:
    """One Job per role, the first of which owns everything else once it exists."""
    return [_build_job(plan, role) for role in plan.roles]


def _build_job(plan: AppInputs, role: RoleInputs) -> dict[str, Any]:
    options = plan.options
    spec = build_job_spec(plan, role)
    if options.ttl_s is not None:
        spec["ttlSecondsAfterFinished"] = options.ttl_s
    if options.suspend:
        spec["suspend"] = True
    place = RolePlace(flavor="job")
    metadata = {
        "name": place.pod_prefix(plan.name, role.label),
        "labels": {**build_labels(plan, role), **build_queue_labels(plan)},
        "annotations": _build_kueue_annotations(plan, role),
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": prune(metadata), "spec": spec}


def build_job_spec(plan: AppInputs, role: RoleInputs) -> dict[str, Any]:
    """The spec of a role's Job, also inside a JobSet.

    A fixed number of nodes counts failures per index as well, so that a pod can read from its annotation which
    incarnation it is. An elastic job must not: a failed index would outrank successPolicy, and a job whose survivors
    succeeded would read Failed. No agent exits 0 before the whole job is over, hence succeededCount 1; without it
    pods that were never scheduled would keep the job open.

    Source: measured on Kubernetes 1.36.
    """
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": role.max_nodes,
        "parallelism": role.max_nodes,
        "podReplacementPolicy": "Failed",
        "backoffLimit": _backoff_limit(role),
    }
    if role.is_agent:
        spec["podFailurePolicy"] = {"rules": [DISRUPTION_RULE, EXIT_RULE]}
        if role.elastic:
            spec["successPolicy"] = {"rules": [{"succeededCount": 1}]}
        else:
            spec["backoffLimitPerIndex"] = role.role.max_retries
            spec["maxFailedIndexes"] = 0
    spec["template"] = build_pod_template(plan, role, index_label=JOB_INDEX_LABEL)
    return spec


def _backoff_limit(role: RoleInputs) -> int:
    retries: int = role.role.max_retries
    return retries + role.max_nodes - role.min_nodes if role.elastic else retries


def build_service(plan: AppInputs) -> dict[str, Any]:
    """The headless Service that gives every pod a name, ready or not: rendezvous comes before readiness."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": plan.name, "labels": build_labels(plan)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL_INSTANCE: plan.name},
        },
    }


def build_queue_labels(plan: AppInputs) -> dict[str, str]:
    """Kueue's labels, if Kueue is to admit the app."""
    options = plan.options
    if options.resolved_gang != "kueue":
        return {}
    priority = {KUEUE_PRIORITY: options.priority_class} if options.priority_class else {}
    return {KUEUE_QUEUE: str(options.queue), **priority}


def _build_kueue_annotations(plan: AppInputs, role: RoleInputs) -> dict[str, str]:
    if plan.options.resolved_gang != "kueue" or not role.elastic:
        return {}
    return {KUEUE_MINIMUM: str(role.min_nodes), KUEUE_EQUAL: "true"}


def prune(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata without empty mappings."""
    return {key: value for key, value in metadata.items() if value not in ({}, None)}
