"""Gang scheduling for flavour `job` where Kueue is not: a PodGroup, Kubernetes' own or Volcano's."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

NATIVE_GROUP: Final = "scheduling.k8s.io"
VOLCANO_GROUP: Final = "scheduling.volcano.sh"
VOLCANO_VERSION: Final = "scheduling.volcano.sh/v1beta1"
NATIVE_VERSIONS: Final = ("scheduling.k8s.io/v1beta1", "scheduling.k8s.io/v1alpha2")
"""Those with a PodGroup we know, the preferred first."""

_VOLCANO_ANNOTATION: Final = "scheduling.k8s.io/group-name"


def native_version(kube_version: tuple[int, int]) -> str | None:
    """The version of the native PodGroup in a release of Kubernetes; None before 1.36."""
    if kube_version >= (1, 37):
        return NATIVE_VERSIONS[0]
    return NATIVE_VERSIONS[1] if kube_version >= (1, 36) else None


def add_pod_group(
    documents: Sequence[Mapping[str, Any]], *, api_version: str, minimum: int, queue: str | None = None
) -> list[dict[str, Any]]:
    """Copies of the documents with a PodGroup before the first Job and every Job's pods in it.

    Args:
        documents: of flavour `job`.
        api_version: one of `NATIVE_VERSIONS`, or `VOLCANO_VERSION`.
        minimum: pods that start together or not at all.
        queue: Volcano's; ignored by nobody, since Kubernetes' own has no queues and the options refuse one.
    """
    changed = [copy.deepcopy(dict(document)) for document in documents]
    jobs = [document for document in changed if document["kind"] == "Job"]
    labels = {key: value for key, value in jobs[0]["metadata"]["labels"].items() if not key.endswith("/component")}
    name = labels["app.kubernetes.io/instance"]
    native = api_version.startswith(NATIVE_GROUP)
    for job in jobs:
        _join(job["spec"]["template"], name, native=native)
    spec: dict[str, Any] = {"schedulingPolicy": {"gang": {"minCount": minimum}}}
    if not native:
        spec = {"minMember": minimum, **({"queue": queue} if queue else {})}
    place = {key: jobs[0]["metadata"][key] for key in ("namespace",) if key in jobs[0]["metadata"]}
    metadata = {"name": name, **place, "labels": labels}
    group = {"apiVersion": api_version, "kind": "PodGroup", "metadata": metadata, "spec": spec}
    first = changed.index(jobs[0])
    return [*changed[:first], group, *changed[first:]]


def _join(template: dict[str, Any], name: str, *, native: bool) -> None:
    if native:
        template["spec"]["schedulingGroup"] = {"podGroupName": name}
        return
    template["spec"]["schedulerName"] = "volcano"
    template["metadata"].setdefault("annotations", {})[_VOLCANO_ANNOTATION] = name
