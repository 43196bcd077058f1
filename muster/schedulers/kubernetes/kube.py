"""The words of Kubernetes: names of objects, labels and annotations by which they are found again, kinds, and patterns.

The patterns refuse offline what the API server would refuse later. Each is for `fullmatch`.
Source: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and labels/, and validation.go of
k8s.io/apimachinery.
"""

import getpass
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from muster._shared.contract import Env
from muster.schedulers.naming import build_role_labels

LABEL_NAME: Final = "app.kubernetes.io/name"
LABEL_INSTANCE: Final = "app.kubernetes.io/instance"
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "muster"

LABEL_SUBMITTER: Final = "muster.torchx/submitter"
"""The user name of the account that submitted, for people and for accounting."""

JOB_INDEX_LABEL: Final = "batch.kubernetes.io/job-completion-index"

INDEX_DRAINS: Final = "batch.kubernetes.io/job-index-ignored-failure-count"
INDEX_FAILURES: Final = ("batch.kubernetes.io/job-index-failure-count", INDEX_DRAINS)
"""Annotations of a pod: how many earlier pods of its index have failed, and how many were disrupted."""

APPDEF_ANNOTATION: Final = "muster.torchx/appdef"
WORKSPACE_KEY: Final = "muster.kubernetes_workspace"
"""In `Role.metadata`: the key of the role's packed workspace in its Secret."""

CANCEL_ANNOTATION: Final = "muster.torchx/cancelled"
"""Its value is the command that ended the app."""
BY_CANCEL: Final = "torchx cancel"
BY_STOP: Final = "muster stop"
FAILED_ANNOTATION: Final = re.compile(r"muster\.torchx/(?:.+\.)?failed")
"""The annotation in which agents say why their job has failed (`-cfg events=true`). It may contain the role's name."""
EXTRA_ANNOTATION: Final = "muster.torchx/not-critical"
"""Of a Job: "true", its role may fail without the app."""
SERVED_ANNOTATION: Final = "muster.torchx/ended-with"
"""Of a Job that was stopped because the role that it serves has ended: the label of that role."""
SUBMITTED_ANNOTATION: Final = "muster.torchx/submitted"
"""On the record of an app that was cancelled in its queue: when the app was created."""
SUBMISSION_ANNOTATION: Final = "muster.torchx/submission"
"""A random value on every object of one submission, by which a repeated request recognises its own objects."""

KUEUE_QUEUE: Final = "kueue.x-k8s.io/queue-name"
KUEUE_PRIORITY: Final = "kueue.x-k8s.io/priority-class"
KUEUE_MINIMUM: Final = "kueue.x-k8s.io/job-min-parallelism"
KUEUE_EQUAL: Final = "kueue.x-k8s.io/job-completions-equal-parallelism"
KUEUE_ELASTIC: Final = "kueue.x-k8s.io/elastic-job"
"""Kueue lets the Job change its parallelism while it runs. With `KUEUE_MINIMUM` it refuses that."""

_OWN_LABELS: Final = (LABEL_NAME, LABEL_INSTANCE, LABEL_COMPONENT, LABEL_MANAGED_BY, KUEUE_QUEUE, KUEUE_PRIORITY)
_CONTROLLER_LABELS: Final = ("controller-uid", "job-name")
_CONTROLLER_DOMAINS: Final = ("batch.kubernetes.io", "jobset.sigs.k8s.io", "volcano.sh")


def is_reserved(key: str) -> bool:
    """Return whether a label is set by muster, or by the controller of a Job or JobSet, or by Volcano."""
    return key in _OWN_LABELS + _CONTROLLER_LABELS or key.partition("/")[0] in _CONTROLLER_DOMAINS


def read_role(item: Mapping[str, Any]) -> str:
    """Return the label of the role that an object belongs to, or "" for one that all roles share."""
    return str((item["metadata"].get("labels") or {}).get(LABEL_COMPONENT, ""))


def find_submitter() -> str:
    """Return the user name of this process as a label value, or "" if its user has no name."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # no entry in the container's passwd
        return ""
    return re.sub(r"[^-.\w]", "-", name, flags=re.ASCII)[:63].strip("-._")


NAME_LIMIT: Final = 63
"""Characters of a DNS label: names of Services and hosts, values of labels."""

ROLE_LIMIT: Final = 20
CONTAINER: Final = "main"
INDEX_VARIABLE: Final = "MUSTER_POD_INDEX"
"""Environment variable with the index that the pod's controller assigned."""

NAMESPACE_VARIABLE: Final = Env.POD_NAMESPACE
"""Environment variable with the pod's namespace."""

ACCOUNT_DIR: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where Kubernetes mounts the token of the pod's service account."""

_INFIX: Final = {"job": "", "jobset": "-0"}
"""Between the role and the node's index, by flavour."""

_RANDOM_LENGTH: Final = len("-x7k2p")
"""Number of characters that the Job controller appends to the index."""


def build_job_name(app: str, label: str, flavor: str) -> str:
    """Return the name of a role's Job: of its pods' names, what comes before their index."""
    return f"{app}-{label}{_INFIX[flavor]}"


def build_secret_name(app: str) -> str:
    """Return the Secret with the tokens of the agent roles and secret variables."""
    return f"{app}-secret"


def build_token_key(label: str) -> str:
    """Return the key of a role's token in the Secret. Keys of variables contain a dot, labels never do."""
    return f"token-{label}"


def build_variable_key(label: str, name: str) -> str:
    """Return the key of a role's variable in the Secret."""
    return f"{label}.{name}"


def build_config_map_name(app: str) -> str:
    """Return the ConfigMap with the agent."""
    return f"{app}-bundle"


def build_workspace_name(app: str) -> str:
    """Return the Secret with the packed workspaces."""
    return f"{app}-workspace"


def label_roles(names: Sequence[str]) -> list[str]:
    """Return one DNS label per role, of at most `ROLE_LIMIT` characters, different for different names."""
    labels = build_role_labels(names, limit=ROLE_LIMIT)
    return [labels[name] for name in names]


def compute_app_limit(labels: Sequence[str], flavor: str, nodes: int) -> int:
    """Return how many characters the app's name may have, so that every pod's host name and every label fits."""
    return NAME_LIMIT - 1 - max(map(len, labels)) - len(_INFIX[flavor]) - 1 - len(str(nodes)) - _RANDOM_LENGTH


OBJECT_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""Name of most objects: a DNS subdomain."""

NAMESPACE_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""Name of a namespace: a DNS label."""

LABEL_KEY: Final = re.compile(
    r"((?=[^/]{1,253}/)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?",
    re.ASCII,
)
LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)

DEVICE_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)
"""Name of a device: DOMAIN/RESOURCE."""

CACHE_PLACE: Final = re.compile(rf"{OBJECT_NAME.pattern}|/[^:\0]+", re.ASCII)
"""A claim, or a folder of the nodes."""
QUANTITY: Final = re.compile(r"[1-9]\d*(\.\d+)?(Ki|Mi|Gi|Ti|k|M|G|T)?", re.ASCII)
"""A size."""


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
POD_GROUPS: Final = [Kind(api_version=each, kind="PodGroup") for found in POD_GROUP_VERSIONS.values() for each in found]


def build_document(kind: Kind, metadata: Mapping[str, Any], **content: Any) -> dict[str, Any]:
    """Return an object of a kind. Metadata that is empty or None is left out."""
    given = {key: value for key, value in metadata.items() if value not in ({}, None)}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": given, **content}


def parse_kind(document: Mapping[str, Any]) -> Kind:
    """Return the kind of a document."""
    return Kind(api_version=document["apiVersion"], kind=document["kind"])
