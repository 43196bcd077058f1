"""Kinds of Kubernetes objects: their API versions and paths, for builders and readers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of object."""

    api_version: str
    kind: str
    namespaced: bool = True

    @property
    def plural(self) -> str:
        """The name in paths: "jobs". That of every kind of ours ends with "s"."""
        return f"{self.kind.lower()}s"

    @property
    def resource(self) -> str:
        """What kubectl and RBAC call it: "secrets", "jobs.batch"."""
        group, slash, _ = self.api_version.partition("/")
        return f"{self.plural}.{group}" if slash else self.plural

    def build_path(self, namespace: str, name: str = "") -> str:
        """Return the path of the collection, or of one object."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        scope = f"/namespaces/{namespace}" if self.namespaced else ""
        return f"{root}{scope}/{self.plural}" + (f"/{name}" if name else "")


POD: Final = Kind(api_version="v1", kind="Pod")
SERVICE: Final = Kind(api_version="v1", kind="Service")
CONFIG_MAP: Final = Kind(api_version="v1", kind="ConfigMap")
SECRET: Final = Kind(api_version="v1", kind="Secret")
EVENT: Final = Kind(api_version="v1", kind="Event")
JOB: Final = Kind(api_version="batch/v1", kind="Job")
JOBSET: Final = Kind(api_version="jobset.x-k8s.io/v1alpha2", kind="JobSet")

PARENT_KINDS: Final = ("Job", "JobSet")
"""The kinds whose objects own all other objects of a request."""

NATIVE_GROUP: Final = "scheduling.k8s.io"
VOLCANO_GROUP: Final = "scheduling.volcano.sh"
VOLCANO_POD_GROUP_VERSION: Final = f"{VOLCANO_GROUP}/v1beta1"
VOLCANO_QUEUE: Final = Kind(api_version=VOLCANO_POD_GROUP_VERSION, kind="Queue", namespaced=False)
POD_GROUP_VERSIONS: Final = {
    NATIVE_GROUP: ("scheduling.k8s.io/v1beta1", "scheduling.k8s.io/v1alpha2"),
    VOLCANO_GROUP: (VOLCANO_POD_GROUP_VERSION,),
}
"""API group -> its versions with a PodGroup that we support, the preferred first."""


def build_document(kind: Kind, metadata: Mapping[str, Any], **content: Any) -> dict[str, Any]:
    """Return an object of a kind. Metadata that is empty or None is left out."""
    given = {key: value for key, value in metadata.items() if value not in ({}, None)}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": given, **content}


def parse_kind(document: Mapping[str, Any]) -> Kind:
    """Return the kind of a document."""
    return Kind(api_version=document["apiVersion"], kind=document["kind"])
