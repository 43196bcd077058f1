"""Gang scheduling for flavour `job` without Kueue: a PodGroup, Kubernetes' own or Volcano's.

Volcano finds a pod's PodGroup by the annotation in all its releases, and reads the fields that we write in those since
0.4. It orders jobs by the PodGroup's priority class, and not by the pods'.

Source: volcano-sh/volcano, pkg/scheduler/api/job_info.go and pkg/scheduler/cache/cache.go, read at v0.4.2 to v1.15.1.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

from muster.schedulers.kubernetes.kinds import NATIVE_GROUP, POD_GROUP_VERSIONS, Kind, build_document
from muster.schedulers.kubernetes.labels import LABEL_COMPONENT, LABEL_INSTANCE
from muster.schedulers.kubernetes.manifests.inputs import AppInputs

_VOLCANO_ANNOTATION: Final = "scheduling.k8s.io/group-name"


def find_native_version(kube_version: tuple[int, int]) -> str | None:
    """Return the version of the native PodGroup in a Kubernetes version. Return None before 1.36."""
    newest, oldest = POD_GROUP_VERSIONS[NATIVE_GROUP]
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
    labels = {key: value for key, value in jobs[0]["metadata"]["labels"].items() if key != LABEL_COMPONENT}
    name = labels[LABEL_INSTANCE]
    native = version.startswith(NATIVE_GROUP)
    for job in jobs:
        _add_to_group(job["spec"]["template"], name, native=native)
    spec: dict[str, Any] = {"schedulingPolicy": {"gang": {"minCount": inputs.minimum}}}
    if not native:
        given = {"queue": inputs.options.queue, "priorityClassName": inputs.options.priority_class}
        spec = {"minMember": inputs.minimum, **{key: value for key, value in given.items() if value}}
    metadata = {"name": name, "namespace": jobs[0]["metadata"].get("namespace"), "labels": labels}
    group = build_document(Kind(api_version=version, kind="PodGroup"), metadata, spec=spec)
    first = changed.index(jobs[0])
    return [*changed[:first], group, *changed[first:]]


def _add_to_group(template: dict[str, Any], name: str, *, native: bool) -> None:
    if native:
        template["spec"]["schedulingGroup"] = {"podGroupName": name}
        return
    template["spec"]["schedulerName"] = "volcano"
    template["metadata"].setdefault("annotations", {})[_VOLCANO_ANNOTATION] = name
