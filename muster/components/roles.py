"""Joins several roles into one app, each with what becomes of the app when it ends.

learner = dist.ddp(script="learner.py", j="1x2")
actor = roles.command("python3", "actor.py", replicas=3)
app = roles.join(
    "rl",
    roles.role("learner", learner, ports={"samples": 5555}),
    roles.role("actor", actor, critical=False, restart="always", after="learner", ends_with="learner"),
)
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchx import specs

from muster._shared.contract import RoleKey
from muster._shared.role_policy import PolicyError, dump_policy, parse_policy
from muster.components.errors import ComponentError


def command(
    entrypoint: str,
    *args: str,
    replicas: int = 1,
    image: str = "",
    env: Mapping[str, str] | None = None,
    resource: specs.Resource | None = None,
) -> specs.Role:
    """Return a role that runs a plain program, without muster's agent.

    Args:
        entrypoint: the program.
        args: its arguments, in which TorchX's macros are replaced.
        replicas: how many of it.
        image: where the scheduler has images.
        env: its variables.
        resource: of each replica. None: TorchX's default.
    """
    return specs.Role(
        name="command",
        image=image,
        entrypoint=entrypoint,
        args=list(args),
        num_replicas=replicas,
        env=dict(env or {}),
        resource=resource or specs.Resource(cpu=1, gpu=0, memMB=1024),
    )


def role(
    name: str,
    source: specs.AppDef | specs.Role,
    *,
    ports: Mapping[str, int] | None = None,
    critical: bool = True,
    ends_with: str = "",
    after: str = "",
    restart: str | None = None,
    max_restarts: int | None = None,
    backoff_s: float = 1.0,
    grace_s: float | None = None,
) -> specs.Role:
    """Return a copy of a role with a name and a policy.

    Args:
        name: of the role in the app.
        source: a role, or an app of one role, as `dist.ddp` returns it.
        ports: put first into its `port_map`; the other roles get them as variables.
        critical: its failure for good ends the app. Otherwise the other roles go on.
        ends_with: the role that it serves: once that one has ended, this one is stopped.
        after: the role that must be ready before this one starts: its first port listens, or its workers run.
        restart: when a replica is started again: `never`, `on-failure` or `always`. None: TorchX's `max_retries`.
        max_restarts: how often each replica is started again. None: no limit.
        backoff_s: seconds before the second restart in a row; they double up to 60.
        grace_s: seconds from the polite signal to the kill. None: the app's.

    Raises:
        ComponentError: a wrong value, or an app of several roles.
    """
    if isinstance(source, specs.AppDef):
        if len(source.roles) != 1:
            raise ComponentError(f"role {name!r}: its app must have one role, and has {len(source.roles)}")
        [source] = source.roles
    given: dict[str, Any] = {
        "critical": critical,
        "ends_with": ends_with,
        "after": after,
        "restart": restart,
        "max_restarts": max_restarts,
        "backoff_s": backoff_s,
        "grace_s": grace_s,
    }
    try:
        policy = parse_policy(name, given)
    except PolicyError as error:
        raise ComponentError(str(error)) from error
    kept = dump_policy(policy)
    return replace(
        source,
        name=name,
        port_map={**(ports or {}), **source.port_map},
        metadata={**source.metadata, **({RoleKey.POLICY: kept} if kept else {})},
    )


def join(name: str, *parts: specs.Role) -> specs.AppDef:
    """Return an app of these roles.

    Args:
        name: of the app.
        parts: see `role`. TorchX gives the workspace to the first one, and others of the same image share it.
    """
    return specs.AppDef(name=name, roles=list(parts))
