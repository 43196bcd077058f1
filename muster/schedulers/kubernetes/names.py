"""Names of objects and pods, checked against Kubernetes' limits before anything is sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from muster.schedulers.errors import SchedulerError
from muster.schedulers.naming import build_role_labels

LIMIT: Final = 63
"""Characters of a DNS label: Service and host names, label values."""

ROLE_LIMIT: Final = 20
CONTAINER: Final = "main"
LEAD: Final = "lead"

_SUFFIX: Final = {"job": "", "jobset": "-0", "volcano": ""}
"""What a flavour puts between the role and the node's index."""

_RANDOM: Final = {"job": 6, "jobset": 6, "volcano": 0}
"""Characters a controller adds behind the index, as in `-x7k2p`."""


@dataclass(frozen=True, kw_only=True)
class RolePlace:
    """How one flavour calls the pods of a role."""

    flavor: str
    lead: str = ""
    """Volcano: label of the elastic role, whose node 0 is a task of its own; "" without one."""

    def pod_prefix(self, app: str, label: str) -> str:
        """What stands before a pod's index: the Job's name for `job`."""
        return f"{app}-{label}{_SUFFIX[self.flavor]}"

    def rank0_host(self, app: str, label: str) -> str:
        """Replica 0 of a role as the app's pods find it."""
        task = LEAD if label == self.lead else label
        return f"{self.pod_prefix(app, task)}-0.{app}"


def secret_name(app: str) -> str:
    """The Secret that holds the tokens of the agent roles and secret variables."""
    return f"{app}-secret"


def token_key(label: str) -> str:
    """Where in the Secret a role's token is. Keys of variables have a dot, which no label has."""
    return f"token-{label}"


def config_map_name(app: str) -> str:
    """The ConfigMap that holds the agent and the packed workspaces."""
    return f"{app}-bundle"


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


def app_limit(labels: Sequence[str], flavor: str, nodes: int) -> int:
    """Characters the app's name may have so that every pod's host name and every label fits."""
    longest = max(len(label) for label in (*labels, LEAD))
    return LIMIT - 1 - longest - len(_SUFFIX[flavor]) - 1 - len(str(nodes)) - _RANDOM[flavor]


def check_names(app: str, roles: Sequence[tuple[str, str, int]], place: RolePlace) -> None:
    """Refuses an app whose pods could not be named.

    Args:
        app: the app's unique name.
        roles: (name, label, number of replicas) of each.
        place: the flavour's way of naming.

    Raises:
        SchedulerError: names the name, its length and the limit.
    """
    for name, label, nodes in roles:
        if place.lead and label == LEAD:
            raise SchedulerError(f"role name {name!r} is taken: flavor=volcano calls node 0 of an elastic job so")
        limit = app_limit([label], place.flavor, nodes)
        if len(app) > limit:
            raise SchedulerError(
                f"name {app!r} is {len(app)} characters; with role {name!r} and {nodes} replicas at most {limit} fit "
                f"into a host name"
            )
