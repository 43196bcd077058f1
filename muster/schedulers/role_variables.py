"""The variables by which the roles of an app find each other, and wait for each other. Standard library only."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Final

from muster._shared.contract import Env
from muster._shared.role_policy import build_role_variables
from muster.schedulers.supervision.state import SupervisedRole

_READY_PORTS: Final = range(30000, 32000)
"""Below those that the system gives to anybody, and above those that adapters choose for rendezvous."""


def build_role_env(
    roles: Sequence[SupervisedRole], app_id: str, own: str, hosts: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return the variables that the replicas of a role get because the app has other roles.

    Args:
        roles: all of the app.
        app_id: the app's id.
        own: the role's name.
        hosts: of each role the host names of its replicas, by index.
    """
    env: dict[str, str] = {}
    by_name = {role.name: role for role in roles}
    for role in roles:
        if role.name != own:
            env |= build_role_variables(role.name, hosts[role.name], role.ports)
    after = by_name[own].policy.after
    if after:
        env[Env.AFTER] = f"{after} {_find_ready_port(by_name[after], app_id)}"
    if not by_name[own].ports and any(role.policy.after == own for role in roles):
        env[Env.READY_PORT] = str(_find_ready_port(by_name[own], app_id))
    return env


def _find_ready_port(role: SupervisedRole, app_id: str) -> int:
    """Return the port that says that a role is ready: the first of its own, or one at which its agent says it."""
    chosen = _READY_PORTS[zlib.crc32(f"{app_id}/{role.name}".encode()) % len(_READY_PORTS)]
    return next(iter(role.ports.values()), chosen)
