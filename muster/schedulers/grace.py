"""Decides how long an adapter waits between the polite signal and the kill.

It is longer than the agent waits for workers. The agent stops its workers within `--shutdown-timeout`, then kills them,
reports and exits. An adapter that kills the agent in this time loses the report, and the exit code is that of the kill
(137) instead of the agent's own.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from muster._shared.contract import Env, RoleKey
from muster._shared.role_policy import parse_policy
from muster.schedulers.agent_command import find_agent_flag, is_agent_role
from muster.schedulers.errors import SchedulerError

DEFAULT_SHUTDOWN_TIMEOUT_S: Final = 30.0
"""The agent's default, and the grace period of roles that do not run it: Kubernetes' default for pods."""

GRACE_MARGIN_S: Final = 15.0
"""From the kill of the last worker to the agent's exit: the report, the log files, the other members."""


DRAIN_MARGIN_S: Final = 5.0
"""What is left of the grace period after a drain and `--shutdown-timeout`, for the report and the exit."""


def build_drain_env(role: Any, given_s: float | None, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variable that gives an agent the limit of a drain, because it cannot see its own grace period.

    Args:
        role: a role of TorchX's that runs the agent.
        given_s: the option `grace_s`. None: not given, and the agent's own default fits.
        env: variables that reach the role's replicas besides its own.
    """
    given_s = _find_own_grace_s(role) or given_s
    if given_s is None:
        return {}
    limit_s = given_s - find_shutdown_timeout_s(role, env or {}) - DRAIN_MARGIN_S
    return {Env.DRAIN_LIMIT_S: f"{max(0.0, limit_s):g}"}


def decide_app_grace_s(roles: Sequence[Any], given_s: float | None, env: Mapping[str, str] | None = None) -> float:
    """Return the grace period of an app: the longest of those roles without one of their own. See `decide_grace_s`."""
    periods = [(_find_own_grace_s(role) is None, decide_grace_s(role, given_s, env)) for role in roles]
    return max(periods)[1]  # those without one of their own first


def decide_grace_s(role: Any, given_s: float | None, env: Mapping[str, str] | None = None) -> float:
    """Return the grace period of a role, in seconds.

    Args:
        role: TorchX's.
        given_s: the option `grace_s`. None: not given.
        env: variables that reach the role's replicas besides its own, which come first.

    Raises:
        SchedulerError: the option contradicts the agent's `--shutdown-timeout`.
    """
    own_s = _find_own_grace_s(role)
    name, given_s = ("grace_s", given_s) if own_s is None else ("the policy's grace_s", own_s)
    if not is_agent_role(role):
        return DEFAULT_SHUTDOWN_TIMEOUT_S if given_s is None else given_s
    timeout_s = find_shutdown_timeout_s(role, env or {})
    if given_s is None:
        return timeout_s + GRACE_MARGIN_S
    if given_s <= timeout_s:
        raise SchedulerError(
            f"{name}={given_s:g} must be greater than the agent's --shutdown-timeout, which is {timeout_s:g} s "
            f"in role {role.name!r}: otherwise the agent is killed while it stops its workers{_explain_setting(role)}"
        )
    return given_s


def _find_own_grace_s(role: Any) -> float | None:
    """Return the grace period of the role's policy. None: it is that of the app."""
    return parse_policy(role.name, role.metadata.get(RoleKey.POLICY)).grace_s


def _explain_setting(role: Any) -> str:
    """Say how the timeout is set by a variable, unless the role's flag comes before it."""
    if find_agent_flag(role.args, "shutdown-timeout") is not None:
        return ""
    return "; a variable of the job sets it, such as dist.ddp --env PET_SHUTDOWN_TIMEOUT=SECONDS"


def find_shutdown_timeout_s(role: Any, env: Mapping[str, str]) -> float:
    """Return the agent's `--shutdown-timeout`, from arguments or environment. The agent itself refuses an invalid one.

    Source: `muster/agent/cli/arguments.py` and `flag_table.py`.
    """
    variables = {**env, **role.env}
    texts = (
        find_agent_flag(role.args, "shutdown-timeout"),
        variables.get("PET_SHUTDOWN_TIMEOUT"),
        variables.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    )
    text = next((text for text in texts if text is not None), "")
    try:
        timeout_s = float(text)
    except ValueError:
        return DEFAULT_SHUTDOWN_TIMEOUT_S
    return timeout_s if math.isfinite(timeout_s) and timeout_s >= 0 else DEFAULT_SHUTDOWN_TIMEOUT_S
