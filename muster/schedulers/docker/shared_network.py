"""Puts an app on a network that other apps use too. There every alias gets the app's name as prefix. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from muster._shared.contract import Env
from muster.schedulers.docker.spec import AppRequest

SHARED_NETWORK: Final = "muster-shared"
"""Apps join it when the engine has no address pool left for a network of their own."""


def share_network(request: AppRequest, network: str = SHARED_NETWORK) -> AppRequest:
    """Return the same app on a network that other apps use too: every alias gets the app's name as prefix."""
    prefix = f"{request.app_id}-"
    known = {alias for container in request.containers for alias in container.aliases}
    containers = tuple(
        replace(
            container,
            aliases=tuple(prefix + alias for alias in container.aliases),
            env=_with_rank0(container.env, prefix, known),
        )
        for container in request.containers
    )
    return replace(request, network=network, owns_network=False, containers=containers)


def _with_rank0(env: Mapping[str, str], prefix: str, known: set[str]) -> dict[str, str]:
    host = env[Env.RANK0_HOST]
    return {**env, Env.RANK0_HOST: prefix + host if host in known else host}
