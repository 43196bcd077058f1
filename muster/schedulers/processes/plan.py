"""What a supervisor must know to start the processes of an app: the `details` of its spec. Standard library only."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

LOOPBACK: Final = "127.0.0.1"
"""Where the replicas of a machine reach each other. Not `localhost`: that may resolve to ::1 first, or not at all."""


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """What one replica runs."""

    command: tuple[str, ...]
    """The program (an absolute path, or a name of PATH for one that a guard starts) and its arguments."""
    env: Mapping[str, str] = field(repr=False)
    """Added to those of its place, such as the app's `base_env`."""
    runs_agent: bool
    cwd: str = ""
    """Absolute path of the folder in which it starts. "": its place decides that."""
    secret_env: tuple[str, ...] = ()
    """Variables of `env` that are never printed, whatever they look like."""


def build_details(
    replicas: Mapping[str, Sequence[ReplicaPlan]],
    *,
    token: str,
    base_env: Mapping[str, str],
    needs_bundle: bool = False,
) -> dict[str, Any]:
    """Build the `details` of a spec whose driver is a `ProcessDriver`.

    Args:
        replicas: by role, in order of index.
        token: the app's secret. The driver derives a token from it for each agent role.
        base_env: variables that all replicas get.
        needs_bundle: the driver puts the agent's bundle into the app's `AppFolder.state_dir`.
    """
    return {
        "base_env": dict(base_env),
        "token": token,
        "needs_bundle": needs_bundle,
        "replicas": {role: [asdict(each) for each in plans] for role, plans in replicas.items()},
    }
