"""The flavours: what runs the pods.

`job` has one batch/v1 Indexed Job per role and a headless Service. The cluster needs nothing installed. `jobset`
(jobset.x-k8s.io/v1alpha2) has one object for all roles. If one fails, the others are stopped.

Without Kueue, a PodGroup lets the pods of flavour `job` start together: Kubernetes' own, or Volcano's. Volcano finds a
pod's PodGroup by the annotation in all its releases, and reads the fields that we write in those since 0.4. It orders
jobs by the PodGroup's priority class, and not by the pods'.

Source: volcano-sh/volcano, pkg/scheduler/api/job_info.go and pkg/scheduler/cache/cache.go, read at v0.4.2 to v1.15.1.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

from muster.schedulers.kubernetes import kube
from muster.schedulers.kubernetes.manifests import pod
from muster.schedulers.kubernetes.manifests.inputs import AppInputs, RoleInputs

_NO_LIMIT: Final = 1_000_000
"""Pods of a role whose policy gives no limit that may be lost."""
_VOLCANO_ANNOTATION: Final = "scheduling.k8s.io/group-name"


def build_jobs(inputs: AppInputs) -> list[dict[str, Any]]:
    """Return one Job per role."""
    return [_build_job(inputs, role) for role in inputs.roles]


def _build_job(inputs: AppInputs, role: RoleInputs) -> dict[str, Any]:
    spec = {**_build_job_spec(inputs, role), **_build_life(inputs)}
    metadata = {
        "name": kube.build_job_name(inputs.name, role.label, "job"),
        "labels": {**pod.build_labels(inputs, role), **_build_queue_labels(inputs)},
        "annotations": {
            **_build_kueue_annotations(inputs, role),
            **({} if role.policy.critical else {kube.EXTRA_ANNOTATION: "true"}),
        },
    }
    return kube.build_document(kube.JOB, metadata, spec=spec)


def _build_job_spec(inputs: AppInputs, role: RoleInputs) -> dict[str, Any]:
    """Return the spec of a role's Job, also inside a JobSet.

    A job of a fixed number of nodes counts failures per index as well, so that a pod can read from its annotation how
    often it was replaced. An elastic job must not: a failed index outranks successPolicy, and a job whose other nodes
    succeeded would be Failed. No agent exits 0 before the whole job has ended, hence succeededCount 1. Without it, pods
    that were never scheduled would keep the job open.

    Source: measured on Kubernetes 1.36.
    """
    retries = (role.policy.max_restarts or _NO_LIMIT) if role.is_restarted else role.role.max_retries
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": role.max_nodes,
        "parallelism": role.max_nodes,
        "podReplacementPolicy": "Failed",
        "backoffLimit": retries + (role.max_nodes - role.min_nodes if role.elastic else 0),
    }
    if inputs.options.deadline_s is not None:
        spec["activeDeadlineSeconds"] = inputs.options.deadline_s  # a JobSet has none of its own
    if role.runs_agent:
        spec["podFailurePolicy"] = {"rules": [pod.DISRUPTION_RULE, pod.PREEMPTED_RULE, pod.EXIT_RULE]}
        if role.elastic:
            spec["successPolicy"] = {"rules": [{"succeededCount": 1}]}
        else:
            spec["backoffLimitPerIndex"] = retries
            spec["maxFailedIndexes"] = 0
    elif role.is_restarted:
        spec["podFailurePolicy"] = {"rules": [pod.DISRUPTION_RULE, pod.FINAL_RULE]}
    spec["template"] = pod.build_pod_template(inputs, role)
    return spec


def _build_life(inputs: AppInputs) -> dict[str, Any]:
    """Return when an object begins, and when it is deleted."""
    options = inputs.options
    ttl = {} if options.ttl_s is None else {"ttlSecondsAfterFinished": options.ttl_s}
    return {**ttl, "suspend": True} if options.suspend else ttl


def build_jobset(inputs: AppInputs) -> dict[str, Any]:
    """Return the JobSet. Our pods set restartPolicy Never: its webhook's default is OnFailure."""
    restarts = max((role.role.max_retries for role in inputs.roles if _restarts_app(role)), default=0)
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "subdomain": inputs.name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "failurePolicy": {"maxRestarts": restarts},
        "replicatedJobs": [_build_replicated_job(inputs, role) for role in inputs.roles],
        **_build_life(inputs),
    }
    metadata = {"name": inputs.name, "labels": {**pod.build_labels(inputs), **_build_queue_labels(inputs)}}
    return kube.build_document(kube.JOBSET, metadata, spec=spec)


def _build_replicated_job(inputs: AppInputs, role: RoleInputs) -> dict[str, Any]:
    spec = _build_job_spec(inputs, role)
    if _restarts_app(role):
        spec["backoffLimit"] = 0  # the JobSet restarts the app
    template = {"metadata": {"labels": pod.build_labels(inputs, role)}, "spec": spec}
    return {"name": role.label, "replicas": 1, "template": template}


def _restarts_app(role: RoleInputs) -> bool:
    """Return whether a role without our agent, which restarts its own workers, has RetryPolicy.APPLICATION."""
    return not role.runs_agent and str(role.role.retry_policy.value) == "APPLICATION"


def build_service(inputs: AppInputs) -> dict[str, Any]:
    """Return the headless Service that gives every pod a host name, ready or not: rendezvous comes before readiness."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {kube.LABEL_INSTANCE: inputs.name}}
    return kube.build_document(kube.SERVICE, {"name": inputs.name, "labels": pod.build_labels(inputs)}, spec=spec)


def _build_queue_labels(inputs: AppInputs) -> dict[str, str]:
    """Build Kueue's labels, if Kueue admits the app."""
    options = inputs.options
    if options.resolved_gang != "kueue":
        return {}
    priority = {kube.KUEUE_PRIORITY: options.priority_class} if options.priority_class else {}
    return {kube.KUEUE_QUEUE: str(options.queue), **priority}


def _build_kueue_annotations(inputs: AppInputs, role: RoleInputs) -> dict[str, str]:
    if inputs.options.resolved_gang != "kueue" or not role.elastic:
        return {}
    if inputs.options.kueue_elastic == "partial":
        return {kube.KUEUE_MINIMUM: str(role.min_nodes), kube.KUEUE_EQUAL: "true"}
    return {kube.KUEUE_ELASTIC: "true"}


# -- gangs -------------------------------------------------------------------------------------------------------------


def find_native_version(kube_version: tuple[int, int]) -> str | None:
    """Return the version of the native PodGroup in a Kubernetes version. Return None before 1.36."""
    newest, oldest = kube.POD_GROUP_VERSIONS[kube.NATIVE_GROUP]
    if kube_version >= (1, 37):
        return newest
    return oldest if kube_version >= (1, 36) else None


def add_pod_group(documents: Sequence[Mapping[str, Any]], version: str, inputs: AppInputs) -> list[dict[str, Any]]:
    """Copy of the documents, with a PodGroup before the first Job and all Jobs' pods in it.

    Args:
        documents: of flavour `job`.
        version: one of `POD_GROUP_VERSIONS`.
        inputs: of the app. Volcano's PodGroup has the queue and the priority class of the options.
    """
    changed = [copy.deepcopy(dict(document)) for document in documents]
    jobs = [document for document in changed if document["kind"] == "Job"]
    labels = {key: value for key, value in jobs[0]["metadata"]["labels"].items() if key != kube.LABEL_COMPONENT}
    name = labels[kube.LABEL_INSTANCE]
    native = version.startswith(kube.NATIVE_GROUP)
    for job in jobs:
        _add_to_group(job["spec"]["template"], name, native=native)
    spec: dict[str, Any] = {"schedulingPolicy": {"gang": {"minCount": inputs.minimum}}}
    if not native:
        given = {"queue": inputs.options.queue, "priorityClassName": inputs.options.priority_class}
        spec = {"minMember": inputs.minimum, **{key: value for key, value in given.items() if value}}
    metadata = {"name": name, "namespace": jobs[0]["metadata"].get("namespace"), "labels": labels}
    group = kube.build_document(kube.Kind(api_version=version, kind="PodGroup"), metadata, spec=spec)
    first = changed.index(jobs[0])
    return [*changed[:first], group, *changed[first:]]


def _add_to_group(template: dict[str, Any], name: str, *, native: bool) -> None:
    if native:
        template["spec"]["schedulingGroup"] = {"podGroupName": name}
        return
    template["spec"]["schedulerName"] = "volcano"
    template["metadata"].setdefault("annotations", {})[_VOLCANO_ANNOTATION] = name
