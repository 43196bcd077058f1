"""Names of objects, pods, containers and variables, within Kubernetes' limits."""

from collections.abc import Sequence
from typing import Final

from muster._shared.contract import Env
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
