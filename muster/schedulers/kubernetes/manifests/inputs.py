"""What the flavours need to know of an app and its roles, worked out and checked once."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torchx.specs import macros

from muster._contract import Env
from muster.schedulers.agent_command import assign_run_ids, find_agent_flag, is_agent_role
from muster.schedulers.errors import SchedulerError
from muster.schedulers.kubernetes import syntax
from muster.schedulers.kubernetes.names import RolePlace, check_names, label_roles, token_key
from muster.schedulers.kubernetes.options import Options
from muster.schedulers.kubernetes.schema import check_version
from muster.schedulers.runner.roles import check_roles, mask_env

INDEX_MARK: Final = "\0"
"""Stands for `${replica_id}` until the user's `$` are doubled; no argument or value can hold it."""

_ENV_NAME: Final = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
"""What Kubernetes took before 1.32, and what shells can use."""

DEFAULT_SHUTDOWN_TIMEOUT_S: Final = 30.0
"""The agent's own, see its `--shutdown-timeout`."""

_GRACE_MARGIN_S: Final = 15
"""What the agent may take beyond its shutdown timeout: reports, goodbyes, reaping."""


@dataclass(frozen=True, kw_only=True)
class SecretValue:
    """One variable of a role that lives in the app's Secret."""

    key: str
    """In the Secret: ROLE.NAME."""
    value: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class RoleInputs:
    """One role."""

    role: Any
    """The caller's `torchx.specs.Role`, never changed."""
    label: str
    """The role's name as part of object names."""
    is_agent: bool
    min_nodes: int
    max_nodes: int
    args: tuple[str, ...]
    """Macros substituted, `$` doubled, `INDEX_MARK` where the node's index goes."""
    env: Mapping[str, str]
    """Like `args`."""
    secret_env: Mapping[str, SecretValue]
    """Variables whose names say that they hold secrets: they travel in the Secret and are never printed."""
    workspace: str | None
    """Key of the packed workspace in the ConfigMap."""
    grace_s: int

    @property
    def elastic(self) -> bool:
        """Whether the job goes on with fewer nodes: only our agent can."""
        return self.is_agent and self.min_nodes < self.max_nodes


@dataclass(frozen=True, kw_only=True)
class AppInputs:
    """One app."""

    name: str
    """Unique; the Service's name and the `app.kubernetes.io/instance` label."""
    app: Any
    roles: tuple[RoleInputs, ...]
    options: Options
    place: RolePlace

    @property
    def secret_values(self) -> dict[str, str]:
        """The Secret's content but for the token."""
        return {item.key: item.value for role in self.roles for item in role.secret_env.values()}

    @property
    def token_roles(self) -> dict[str, str]:
        """Key in the Secret -> name of the agent role whose token it holds."""
        return {token_key(role.label): role.role.name for role in self.roles if role.is_agent}

    def rank0_host(self, role: RoleInputs) -> str:
        """The address of rank 0 for a role, resolvable in the app's namespace.

        An agent role is a job of its own and meets at its own replica 0; for others it is TorchX's: replica 0 of the
        first role.
        """
        return self.place.rank0_host(self.name, role.label if role.is_agent else self.roles[0].label)

    @property
    def minimum(self) -> int:
        """Pods that must run at the same time."""
        return sum(role.min_nodes for role in self.roles)


def build_inputs(app: Any, options: Options, *, name: str, workspaces: Mapping[str, str]) -> AppInputs:
    """Checks an app against the options and works out its roles.

    Args:
        app: a `torchx.specs.AppDef`; not changed.
        options: checked ones.
        name: the app's unique name.
        workspaces: key in the ConfigMap by role name.

    Raises:
        SchedulerError: a role this adapter cannot run; one line that says why.
    """
    check_roles(app)
    for role in app.roles:
        _check_role(role)
    names = [role.name for role in app.roles]
    labels = dict(zip(names, label_roles(names), strict=True))
    args = assign_run_ids(app.roles, labels, app_id=macros.app_id)
    roles = tuple(
        _build_role_inputs(role, labels[role.name], args[role.name], options, name, workspaces) for role in app.roles
    )
    check_version(options.schema_version, elastic=any(role.elastic for role in roles), source="kube_version")
    place = RolePlace(flavor=options.flavor, lead=_find_lead(roles) if options.flavor == "volcano" else "")
    plan = AppInputs(name=name, app=app, roles=roles, options=options, place=place)
    check_names(name, [(role.role.name, role.label, role.max_nodes) for role in roles], place)
    return plan


def _find_lead(roles: Sequence[RoleInputs]) -> str:
    """Volcano: label of the elastic role, "" without one.

    Raises:
        SchedulerError: it is not the only agent role.
    """
    elastic = [role for role in roles if role.elastic]
    if elastic and sum(role.is_agent for role in roles) > 1:
        raise SchedulerError(
            f"role {elastic[0].role.name!r} is elastic ({elastic[0].min_nodes}:{elastic[0].max_nodes}) and not the "
            "only one that runs the agent: a Volcano Job ends as a whole, with the first elastic role that succeeds; "
            "use flavor=job or jobset, or a fixed number of nodes"
        )
    return elastic[0].label if elastic else ""


def _build_role_inputs(
    role: Any, label: str, args: Sequence[str], options: Options, name: str, workspaces: Mapping[str, str]
) -> RoleInputs:
    for key in role.env:
        if _ENV_NAME.fullmatch(key) is None:
            raise SchedulerError(
                f"role {role.name!r}: {key!r} is no name of an environment variable: {_ENV_NAME.pattern}"
            )
    is_agent = is_agent_role(role)
    values = macros.Values(img_root="", app_id=name, replica_id=INDEX_MARK, rank0_env=Env.RANK0_HOST)
    env = {key: values.substitute(_check_text(text, role, key)) for key, text in role.env.items()}
    secret_env = {
        key: SecretValue(key=f"{label}.{key}", value=text)
        for key, text in env.items()
        if INDEX_MARK not in text and mask_env({key: text}) != {key: text}
    }
    return RoleInputs(
        role=role,
        label=label,
        is_agent=is_agent,
        min_nodes=role.min_replicas or role.num_replicas,
        max_nodes=role.num_replicas,
        args=tuple(escape(values.substitute(arg)) for arg in args),
        env={key: escape(text) for key, text in env.items() if key not in secret_env},
        secret_env=secret_env,
        workspace=workspaces.get(role.name),
        grace_s=_grace(role, is_agent, options),
    )


def _check_role(role: Any) -> None:
    """What the API server would refuse in its own words, or what would never run."""
    for arg in role.args:
        _check_text(arg, role, "argument")
    if not role.image or role.image != role.image.strip():
        raise SchedulerError(f"role {role.name!r}: image {role.image!r} is no name of an image")
    if role.num_replicas > syntax.INDEXED_LIMIT:
        raise SchedulerError(
            f"role {role.name!r}: {role.num_replicas} replicas, a Job has at most {syntax.INDEXED_LIMIT}"
        )
    if role.max_retries + role.num_replicas > syntax.COUNT_LIMIT:
        raise SchedulerError(f"role {role.name!r}: max_retries={role.max_retries} is too large")


def _check_text(text: Any, role: Any, what: str) -> str:
    if not isinstance(text, str) or "\0" in text:
        raise SchedulerError(f"role {role.name!r}: {what} {text!r} is not text without NUL")
    return text


def escape(text: str) -> str:
    """Doubles `$`, which Kubernetes halves in command, args and env.

    Source: https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
    """
    return text.replace("$", "$$")


def _grace(role: Any, is_agent: bool, options: Options) -> int:
    if not is_agent:
        return options.grace_s if options.grace_s is not None else int(DEFAULT_SHUTDOWN_TIMEOUT_S)
    timeout_s = _find_shutdown_timeout(role)
    if options.grace_s is None:
        return int(timeout_s) + _GRACE_MARGIN_S
    if options.grace_s <= timeout_s:
        raise SchedulerError(
            f"grace_s={options.grace_s} is not more than the agent's --shutdown-timeout {timeout_s:g}: "
            "Kubernetes would kill the agent while its workers still end"
        )
    return options.grace_s


def _find_shutdown_timeout(role: Any) -> float:
    """The agent's `--shutdown-timeout`, from arguments or environment; a wrong one is the agent's to refuse."""
    text = find_agent_flag(role.args, "shutdown-timeout")
    if text is None:
        text = role.env.get("PET_SHUTDOWN_TIMEOUT", role.env.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", ""))
    try:
        timeout_s = float(text)
    except ValueError:
        return DEFAULT_SHUTDOWN_TIMEOUT_S
    return timeout_s if math.isfinite(timeout_s) and timeout_s >= 0 else DEFAULT_SHUTDOWN_TIMEOUT_S
