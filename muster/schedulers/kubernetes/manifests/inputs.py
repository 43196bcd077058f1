"""Checks an app and its roles, and derives what the flavours need of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from torchx.specs import macros

from muster._shared.contract import Env
from muster._shared.role_policy import Restart, RolePolicy
from muster.schedulers.adapter.agent_role import assign_arguments
from muster.schedulers.agent_command import is_agent_role
from muster.schedulers.errors import OptionError, SchedulerError
from muster.schedulers.grace import decide_grace_s
from muster.schedulers.kubernetes import kube
from muster.schedulers.kubernetes.options import Options
from muster.schedulers.kubernetes.schema import check_version
from muster.schedulers.role_variables import build_role_env
from muster.schedulers.runner.roles import build_role_plan, read_policy
from muster.schedulers.secret_variables import MASK, is_secret, list_named_secrets, mask_args

INDEX_PLACEHOLDER: Final = "\0i\0"
"""Replaces `${replica_id}` until the user's `$` are doubled. No argument or value can contain NUL."""


NAMESPACE_PLACEHOLDER: Final = "\0n\0"
"""Stands for the namespace in the same way. The namespace is known only in the cluster."""

_HANDLE_VARIABLE: Final = "TORCHX_JOB_ID"
"""TorchX's `ENV_TORCHX_JOB_ID`, on 0.7 and the nightly: `SCHEDULER://SESSION/${app_id}`."""

_RESERVED: Final = (Env.RANK0_HOST, kube.INDEX_VARIABLE, kube.NAMESPACE_VARIABLE)
_RESERVED_OF_AGENTS: Final = (Env.TOKEN, Env.REQUIRE_TOKEN, Env.NODE_NAME, Env.MACHINE_NAME)
"""Variables that a role's own environment must not have: without them, or with other values, no job starts."""

SECRET_ARGUMENT: Final = "MUSTER_ARGUMENT_{number}"
"""A variable with an argument that looks secret."""


@dataclass(frozen=True, kw_only=True)
class RoleInputs:
    """One role."""

    role: Any
    """The caller's `torchx.specs.Role`, which is not changed."""
    label: str
    """The role's name as part of object names."""
    runs_agent: bool
    min_nodes: int
    max_nodes: int
    args: tuple[str, ...]
    """With macros substituted, `$` doubled, and `INDEX_PLACEHOLDER` for the node's index."""
    env: Mapping[str, str]
    """Like `args`."""
    secret_env: Mapping[str, str] = field(repr=False)
    """Secret variables, and those with secret arguments: stored in the Secret, never printed."""
    workspace: str | None
    """Key of the packed workspace in its Secret."""
    grace_s: int
    policy: RolePolicy = field(default_factory=RolePolicy)
    others: Mapping[str, str] = field(default_factory=dict)
    """Variables by which it finds the app's other roles."""

    @property
    def is_wrapped(self) -> bool:
        """Whether its command runs under `_shared.role_command`, because nothing else waits, or starts it again."""
        return self.is_restarted or bool(self.policy.after and not self.runs_agent)

    @property
    def is_restarted(self) -> bool:
        """Whether its policy has it started again."""
        return self.policy.restart not in (None, Restart.NEVER)

    @property
    def elastic(self) -> bool:
        """Whether the job may run with fewer nodes, which only our agent can."""
        return self.runs_agent and self.min_nodes < self.max_nodes


@dataclass(frozen=True, kw_only=True)
class AppInputs:
    """One app."""

    name: str
    """The unique name of the app, which is the Service's name and the `app.kubernetes.io/instance` label."""
    app: Any
    roles: tuple[RoleInputs, ...]
    options: Options
    submitter: str = ""
    """Value of the label that names the submitting user. "": no label."""

    @property
    def secret_values(self) -> dict[str, str]:
        """The Secret's content without the tokens."""
        return {
            kube.build_variable_key(each.label, name): each.secret_env[name]
            for each in self.roles
            for name in each.secret_env
        }

    @property
    def token_roles(self) -> dict[str, str]:
        """Key in the Secret -> name of the agent role whose token it is."""
        return {kube.build_token_key(role.label): role.role.name for role in self.roles if role.runs_agent}

    def build_rank0_host(self, role: RoleInputs) -> str:
        """Return the address of rank 0 for a role, resolvable in the app's namespace.

        An agent role is a job of its own: its own replica 0. Other roles: replica 0 of the first role, as in TorchX.
        """
        label = role.label if role.runs_agent else self.roles[0].label
        return f"{kube.build_job_name(self.name, label, self.options.flavor)}-0.{self.name}"

    @property
    def elastic(self) -> bool:
        """Whether a role may run with fewer nodes."""
        return any(role.elastic for role in self.roles)

    @property
    def minimum(self) -> int:
        """Pods that must run at the same time."""
        return sum(role.min_nodes for role in self.roles)


def build_inputs(
    app: Any, options: Options, *, name: str, workspaces: Mapping[str, str], submitter: str = ""
) -> AppInputs:
    """Check an app against the options and derives the inputs of its roles.

    Args:
        app: a `torchx.specs.AppDef`. It is not changed.
        options: parsed and checked.
        name: the app's unique name.
        workspaces: key in the workspaces' Secret by role name.
        submitter: see `AppInputs`.

    Raises:
        SchedulerError: the adapter cannot run a role. It is one line with the reason.
    """
    for role in app.roles:
        for arg in role.args:
            _check_text(arg, role, "argument")
    names = [role.name for role in app.roles]
    labels = dict(zip(names, kube.label_roles(names), strict=True))
    args = {role.name: role.args for role in assign_arguments(app, labels, macros.app_id)}
    roles = tuple(
        _build_role_inputs(role, labels[role.name], args[role.name], options, name, workspaces) for role in app.roles
    )
    if options.flavor == "jobset" and (policed := [role for role in roles if role.policy != RolePolicy()]):
        raise OptionError(
            f"flavor=jobset: role {policed[0].role.name!r} has a policy, which only flavor=job carries out", "flavor"
        )
    plans = [build_role_plan(role) for role in app.roles]
    hosts = {role.role.name: _list_hosts(name, role, options) for role in roles}
    roles = tuple(replace(role, others=build_role_env(plans, name, role.role.name, hosts)) for role in roles)
    inputs = AppInputs(name=name, app=app, roles=roles, options=options, submitter=submitter)
    check_version(options.schema_version, elastic=inputs.elastic, source="kube_version")
    return inputs


def _build_role_inputs(
    role: Any, label: str, args: Sequence[str], options: Options, name: str, workspaces: Mapping[str, str]
) -> RoleInputs:
    runs_agent = is_agent_role(role)
    _check_reserved(role, runs_agent)
    values = macros.Values(img_root="", app_id=name, replica_id=INDEX_PLACEHOLDER, rank0_env=Env.RANK0_HOST)
    given = {key: _check_text(text, role, key) for key, text in role.env.items()}
    env = {key: values.substitute(_add_namespace(key, text)) for key, text in given.items()}
    command, secret_args = _move_secret_args([values.substitute(arg) for arg in args])
    secret_env = _select_secrets(env, role) | secret_args
    return RoleInputs(
        role=role,
        label=label,
        runs_agent=runs_agent,
        min_nodes=role.min_replicas or role.num_replicas,
        max_nodes=role.num_replicas,
        args=command,
        env={key: escape(text) for key, text in env.items() if key not in secret_env},
        secret_env=secret_env,
        workspace=workspaces.get(role.name),
        grace_s=math.ceil(decide_grace_s(role, options.grace_s)),
        policy=read_policy(role),
    )


def _list_hosts(name: str, role: RoleInputs, options: Options) -> list[str]:
    job = kube.build_job_name(name, role.label, options.flavor)
    return [f"{job}-{index}.{name}" for index in range(role.max_nodes)]


def _select_secrets(env: Mapping[str, str], role: Any) -> dict[str, str]:
    """Return the secret variables. One with the node's index in it stays in the pod template."""
    named = frozenset(list_named_secrets(role.metadata))
    return {key: text for key, text in env.items() if "\0" not in text and (key in named or is_secret(key, text))}


def _move_secret_args(words: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the arguments with references to variables where they look secret, and those variables.

    These are in the Secret instead of in the pod template, which more accounts may read, and Kubernetes puts their
    values into the command. An argument with the node's index in it stays in the template.
    """
    args: list[str] = []
    secrets: dict[str, str] = {}
    for word, shown in zip(words, mask_args(words), strict=True):
        if word == shown or "\0" in word:
            args.append(escape(word))
            continue
        kept = shown.removesuffix(MASK)  # --api_key=
        variable = SECRET_ARGUMENT.format(number=len(secrets))
        secrets[variable] = word[len(kept) :]
        args.append(f"{escape(kept)}$({variable})")
    return tuple(args), secrets


def _add_namespace(name: str, text: str) -> str:
    """Return TorchX's handle of the job, made whole: the id of an app is NAMESPACE:NAME."""
    return text.replace(macros.app_id, f"{NAMESPACE_PLACEHOLDER}:{macros.app_id}") if name == _HANDLE_VARIABLE else text


def _check_reserved(role: Any, runs_agent: bool) -> None:
    reserved = _RESERVED + (_RESERVED_OF_AGENTS if runs_agent else ())
    taken = next((name for name in role.env if name in reserved), None)
    if taken is not None:
        raise SchedulerError(f"role {role.name!r}: muster sets the environment variable {taken} itself; remove it")


def _check_text(text: Any, role: Any, name: str) -> str:
    if not isinstance(text, str) or "\0" in text:
        raise SchedulerError(f"role {role.name!r}: {name} {text!r} must be text without NUL characters")
    return text


def escape(text: str) -> str:
    """Double `$`: Kubernetes turns `$$` in command, args and env into `$`.

    Source: https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
    """
    return text.replace("$", "$$")
