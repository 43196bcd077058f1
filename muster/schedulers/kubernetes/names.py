"""Names of objects, pods, containers and variables, checked against Kubernetes' limits before anything is sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from muster._shared.contract import Env
from muster.schedulers.errors import SchedulerError
from muster.schedulers.naming import build_role_labels

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

LEADER_TASK: Final = "lead"
"""Volcano: the task of node 0 of an elastic role."""

_INFIX: Final = {"job": "", "jobset": "-0", "volcano": ""}
"""Between the role and the node's index."""

_RANDOM_LENGTH: Final = {"job": 6, "jobset": 6, "volcano": 0}
"""Number of characters that a controller appends to the index, as in `-x7k2p`."""


@dataclass(frozen=True, kw_only=True)
class PodNaming:
    """How one flavour names the pods of a role."""

    flavor: str
    elastic_role: str = ""
    """Volcano: label of the elastic role, whose node 0 is a separate task; "" without one."""

    def build_pod_prefix(self, app: str, label: str) -> str:
        """A pod's name up to its index. With flavour `job`: the Job's name."""
        return f"{app}-{label}{_INFIX[self.flavor]}"

    def build_rank0_host(self, app: str, label: str) -> str:
        """The host name of a role's replica 0, for the app's pods."""
        task = LEADER_TASK if label == self.elastic_role else label
        return f"{self.build_pod_prefix(app, task)}-0.{app}"


def build_secret_name(app: str) -> str:
    """The Secret with the tokens of the agent roles and secret variables."""
    return f"{app}-secret"


def build_token_key(label: str) -> str:
    """Key of a role's token in the Secret. Keys of variables contain a dot, labels never do."""
    return f"token-{label}"


def build_config_map_name(app: str) -> str:
    """The ConfigMap with the agent."""
    return f"{app}-bundle"


def build_workspace_name(app: str) -> str:
    """The Secret with the packed workspaces."""
    return f"{app}-workspace"


def label_roles(names: Sequence[str]) -> list[str]:
    """One DNS label per role, of at most `ROLE_LIMIT` characters, all different.

    Raises:
        SchedulerError: two roles have the same name.
    """
    try:
        labels = build_role_labels(names, limit=ROLE_LIMIT)
    except ValueError as error:
        raise SchedulerError(str(error)) from error
    return [labels[name] for name in names]


def compute_app_limit(labels: Sequence[str], flavor: str, nodes: int) -> int:
    """How many characters the app's name may have, so that every pod's host name and every label fits."""
    longest = max(len(label) for label in (*labels, LEADER_TASK))
    return NAME_LIMIT - 1 - longest - len(_INFIX[flavor]) - 1 - len(str(nodes)) - _RANDOM_LENGTH[flavor]


def check_names(app: str, roles: Sequence[tuple[str, str, int]], naming: PodNaming) -> None:
    """Refuses an app whose pods' names would be too long or would clash.

    Args:
        app: the app's unique name.
        roles: (name, label, number of replicas) of each.
        naming: the flavour's.

    Raises:
        SchedulerError: with the name, its length and the limit.
    """
    for name, label, nodes in roles:
        if naming.elastic_role and label == LEADER_TASK:
            raise SchedulerError(f"role name {name!r} is reserved: flavor=volcano uses it for node 0 of an elastic job")
        limit = compute_app_limit([label], naming.flavor, nodes)
        if len(app) > limit:
            raise SchedulerError(
                f"app name {app!r} has {len(app)} characters; with role {name!r} and {nodes} replicas, "
                f"a host name has room for {limit}"
            )
