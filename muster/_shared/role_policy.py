"""What becomes of an app when one of its roles ends: as it is kept in `torchx.specs.Role.metadata`, and checked."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Final

from muster._shared.contract import ExitCode

MOST_HOSTS: Final = 1024
"""More would not fit into a variable, which has at most 128 KiB."""
MOST_BACKOFF_S: Final = 60.0
"""The longest pause before a restart. A replica that has run for so long begins anew with the shortest one."""


class Restart(str, Enum):
    """When a replica that has ended is started again."""

    NEVER = "never"
    ON_FAILURE = "on-failure"
    ALWAYS = "always"


class PolicyError(ValueError):
    """A policy that is wrong. `str()` is one line that names the value and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class RolePolicy:
    """How a role ends, begins and is restarted. A role without one behaves as TorchX describes it."""

    critical: bool = True
    """Its failure for good ends the app. Otherwise the other roles go on, and the app can succeed without it."""
    ends_with: str = ""
    """The role that it serves: once that one has ended, this one is stopped. "": none."""
    after: str = ""
    """The role that must be ready before this one starts: its first port listens, or its workers run. "": none."""
    restart: Restart | None = None
    """When its replicas are started again, each alone. None: as TorchX's `max_retries` and `retry_policy` say."""
    max_restarts: int | None = None
    """How often each replica is started again. None: no limit."""
    backoff_s: float = 1.0
    """The pause before the second restart in a row, in seconds. It doubles up to `MOST_BACKOFF_S`."""
    grace_s: float | None = None
    """Seconds from the polite signal to the kill. None: the app's."""

    def restarts(self, exit_code: int | None, used: int, *, runs_agent: bool) -> bool:
        """Return whether a replica that has ended is started again.

        Args:
            exit_code: 128+n for signal n. None: not known.
            used: how often it was started again before.
            runs_agent: the exit codes are those of muster's agent. It would refuse its command line again, and one that
                was preempted says so.
        """
        if self.restart in (None, Restart.NEVER) or (exit_code == 0 and self.restart is not Restart.ALWAYS):
            return False
        if runs_agent and exit_code in (ExitCode.USAGE, ExitCode.TERMINATED):
            return False
        return self.max_restarts is None or used < self.max_restarts

    def find_pause_s(self, quick_ends: int) -> float:
        """Return the seconds until the next start, after so many ends in a row that came soon after a start."""
        return 0.0 if quick_ends < 2 else min(self.backoff_s * 2.0 ** min(quick_ends - 2, 16), MOST_BACKOFF_S)


def dump_policy(policy: RolePolicy) -> dict[str, Any]:
    """Return a policy as it is kept in a role's metadata: JSON's types, without what is as usual."""
    usual = asdict(RolePolicy())
    kept = {name: value for name, value in asdict(policy).items() if value != usual[name]}
    return kept if policy.restart is None else {**kept, "restart": policy.restart.value}


def parse_policy(role: str, data: object) -> RolePolicy:
    """Return a role's policy.

    Args:
        role: the role's name, for messages.
        data: what its metadata has. None: nothing.

    Raises:
        PolicyError: a wrong name or value.
    """
    if data is None:
        return RolePolicy()
    if not isinstance(data, Mapping):
        raise PolicyError(f"role {role!r}: its policy must be a dictionary, not {data!r}")
    unknown = [name for name in data if name not in _CHECKS]
    if unknown:
        raise PolicyError(f"role {role!r}: a policy has no {unknown[0]!r}; it has: {', '.join(_CHECKS)}")
    for name, value in data.items():
        is_valid, allowed = _CHECKS[name]
        if not is_valid(value):
            raise PolicyError(f"role {role!r}: {name} must be {allowed}, not {value!r}")
    restart = data.get("restart")
    return RolePolicy(**{**data, "restart": None if restart is None else Restart(restart)})


def _is_seconds(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf  # type: ignore[operator]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_RESTARTS: Final = tuple(each.value for each in Restart)
_CHECKS: Final[Mapping[str, tuple[Any, str]]] = {
    "critical": (lambda value: isinstance(value, bool), "True or False"),
    "ends_with": (_is_text, "the name of a role"),
    "after": (_is_text, "the name of a role"),
    "restart": (lambda value: value is None or value in _RESTARTS, f"one of {', '.join(_RESTARTS)}"),
    "max_restarts": (
        lambda value: value is None or (type(value) is int and value >= 1),
        "a whole number of at least 1, or None for no limit",
    ),
    "backoff_s": (_is_seconds, "a number of seconds above 0"),
    "grace_s": (lambda value: value is None or _is_seconds(value), "a number of seconds above 0"),
}


@dataclass(frozen=True, kw_only=True)
class PolicedRole:
    """What the check of an app's policies needs of a role."""

    name: str
    policy: RolePolicy
    max_retries: int
    restarts_role: bool
    """Its `retry_policy` starts all its replicas again when one has failed."""
    is_observable: bool
    """Others can see that it is ready: it has a port, or runs muster's agent."""


def check_policies(roles: Sequence[PolicedRole]) -> None:
    """Refuse policies that contradict each other or TorchX's retries.

    Raises:
        PolicyError: see there.
    """
    known = {role.name: role for role in roles}
    for role in roles:
        _check_others(role, known)
        _check_restarts(role)
    variables = [_to_variable(role.name) for role in roles]
    same = next((role.name for role in roles if variables.count(_to_variable(role.name)) > 1), None)
    if same is not None and any(role.policy != RolePolicy() for role in roles):
        raise PolicyError(f"role {same!r}: another role would have the same variables {name_hosts_variable(same)}, ...")
    if roles and not any(role.policy.critical for role in roles):
        raise PolicyError(f"no role is critical; at least one must be, of: {', '.join(known)}")


def _check_others(role: PolicedRole, known: Mapping[str, PolicedRole]) -> None:
    policy = role.policy
    for what, other in (("ends_with", policy.ends_with), ("after", policy.after)):
        if other and (other not in known or other == role.name):
            others = ", ".join(name for name in known if name != role.name) or "none"
            raise PolicyError(f"role {role.name!r}: {what}={other!r} is none of the app's other roles: {others}")
    if policy.after and not known[policy.after].is_observable:
        raise PolicyError(
            f"role {role.name!r}: after={policy.after!r}: nobody can see when that role is ready, because it has no "
            "port_map and does not run muster's agent"
        )
    seen, after = [role.name], policy.after
    while after in known:
        if after in seen:
            raise PolicyError(f"roles wait for each other: {' after '.join([*seen, after])}")
        seen.append(after)
        after = known[after].policy.after


def _check_restarts(role: PolicedRole) -> None:
    policy = role.policy
    if policy.restart is not None and role.max_retries:
        raise PolicyError(
            f"role {role.name!r}: max_retries={role.max_retries} and restart={policy.restart.value!r} contradict: give "
            "one of them (max_restarts limits the restarts)"
        )
    if policy.restart is not None and role.restarts_role:
        raise PolicyError(
            f"role {role.name!r}: retry_policy=ROLE and restart={policy.restart.value!r} contradict: the policy has "
            "each replica started again alone"
        )
    if policy.restart in (None, Restart.NEVER) and policy.max_restarts is not None:
        raise PolicyError(f"role {role.name!r}: max_restarts={policy.max_restarts} needs restart='on-failure'")
    if policy.restart is Restart.ALWAYS and policy.critical and not policy.ends_with:
        raise PolicyError(
            f"role {role.name!r}: restart='always' never ends: give ends_with, the role that it serves, or "
            "critical=False"
        )


# -- how roles find each other ----------------------------------------------------------------------------------------


def build_role_variables(role: str, hosts: Sequence[str], ports: Mapping[str, int]) -> dict[str, str]:
    """Return the variables by which the other roles of an app find one of its roles.

    Args:
        role: its name.
        hosts: the host names of its replicas, by index.
        ports: its `port_map`.

    Returns:
        `MUSTER_ROLE_LEARNER_HOSTS`: the first `MOST_HOSTS` hosts, separated by commas.
        `MUSTER_ROLE_LEARNER_PORT_HTTP`: the port `http`.
    """
    prefix = f"MUSTER_ROLE_{_to_variable(role)}_PORT"
    return {
        name_hosts_variable(role): ",".join(hosts[:MOST_HOSTS]),
        **{f"{prefix}_{_to_variable(name)}": str(port) for name, port in ports.items()},
    }


def name_hosts_variable(role: str) -> str:
    """Return the name of the variable with the hosts of a role."""
    return f"MUSTER_ROLE_{_to_variable(role)}_HOSTS"


def _to_variable(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", name.upper())
