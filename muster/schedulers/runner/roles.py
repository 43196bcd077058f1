"""Roles of an AppDef on both lines of TorchX: macros, checks, workspaces, and what the supervisor needs of them."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from torchx import specs
from torchx.specs import AppDef, Role, macros
from torchx.specs.api import RetryPolicy

from muster._shared.contract import SIZE_LIMIT, Env, RoleKey
from muster._shared.role_policy import PolicedRole, PolicyError, RolePolicy, check_policies, parse_policy
from muster.schedulers.agent_command import find_program, is_agent_role
from muster.schedulers.errors import SchedulerError
from muster.schedulers.supervision.state import RetryScope, SupervisedRole

BASE_IMAGE_KEY: Final = "muster.base_image"
"""In `Role.metadata`: the image on top of which that with the role's workspace was built."""


def apply_macros(role: Role, *, app_id: str, replica_id: int | str, img_root: str = "") -> Role:
    """Return a copy of the role with TorchX's macros substituted for one replica."""
    values = macros.Values(img_root=img_root, app_id=app_id, replica_id=str(replica_id), rank0_env=Env.RANK0_HOST)
    return values.apply(role)


def count_cpus(role: Role) -> float:
    """Return how many CPUs a node of a role gets: as many as it has workers, if the user gave no number.

    0 or less: no number was given, and its workers are not known.
    """
    request = role.metadata.get(RoleKey.CPU_REQUEST)
    return float(request if request is not None else role.resource.cpu if role.resource is not None else 0)


def share_workspace(app: AppDef, key: str) -> AppDef:
    """Give the first role's workspace to all other agent roles of the same image that have none.

    TorchX gives the workspace of a command line to the first role only, and all roles run scripts from it.

    Args:
        app: after TorchX has built its workspaces. It is not changed.
        key: in `Role.metadata`: names a role's workspace.
    """
    first = app.roles[0] if app.roles else None
    if first is None or not first.metadata.keys() & {key, BASE_IMAGE_KEY}:
        return app
    base_image = first.metadata.get(BASE_IMAGE_KEY, first.image)
    own = {name: first.metadata[name] for name in (key, BASE_IMAGE_KEY) if name in first.metadata}

    def shares(role: Role) -> bool:
        return is_agent_role(role) and role.image == base_image and not role.metadata.keys() & own.keys()

    return replace(
        app,
        roles=[
            replace(role, image=first.image, metadata={**role.metadata, **own}) if shares(role) else role
            for role in app.roles
        ],
    )


def describe_workspace(role: Role, path: str, *, has_image: bool = False, is_quiet: bool = False) -> list[str]:
    """Return lines about what of a role's folder does not travel: files that are left out, and the role's script.

    Args:
        role: what runs.
        path: the folder.
        has_image: the script may be in the role's image.
        is_quiet: only a missing script is named.

    Raises:
        SchedulerError: the folder cannot be read.
    """
    from muster.schedulers.workspace.packing import BundleError, describe_left_out  # most commands pack nothing

    try:
        left_out = [] if is_quiet else describe_left_out(path)
        return [*left_out, describe_missing_script(role, path, has_image=has_image)]
    except BundleError as error:
        raise SchedulerError(str(error)) from error


def describe_missing_script(role: Role, path: str, *, has_image: bool = False) -> str:
    """Say in one line that an agent role's script does not travel; return "" if it does, or if that is not known.

    Args:
        role: of TorchX, with its macros.
        path: the folder of the workspace.
        has_image: the role runs in an image, and the line says that the image must have the script.

    Raises:
        BundleError: the folder's ignore file cannot be read.
    """
    import difflib  # most commands pack nothing

    from muster.schedulers.workspace.packing import explain_unsent

    target = _find_relative_script(role)
    if not target:
        return ""
    inside = os.path.normpath(target)
    folder, name = os.path.split(inside)
    try:
        names = [] if inside.split(os.sep)[0] == os.pardir else os.listdir(os.path.join(path, folder))
    except OSError:
        names = []
    if name in names:
        why = explain_unsent(path, inside)
        then = "; otherwise the image must have it" if has_image else ""
        return f"{target} is not sent with the workspace: {why}{then}" if why else ""
    if inside == os.curdir:
        return ""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    hint = f" (did you mean {os.path.join(folder, close[0])}?)" if close else ""
    then = "; the image must have it" if has_image else ""
    return f"{target} is not in the workspace {os.path.abspath(path)}{then}{hint}"


def describe_unsent_scripts(app: AppDef, key: str) -> Iterator[str]:
    """Say of agent roles without a workspace that their script, which lies here, is not sent.

    A program that builds the app in Python has no workspace unless it gives one, and its image may have the script.

    Args:
        app: of TorchX, with its macros.
        key: of the workspace in `Role.metadata`.
    """
    for role in app.roles:
        target = _find_relative_script(role)
        if target and key not in role.metadata and os.path.isfile(target):
            yield f"{target} of this folder is not sent, because the job has no workspace: the image must have it"


def _find_relative_script(role: Role) -> str:
    """Return the path of an agent role's script in its workspace or image; "" if there is none, or it is not known."""
    kind, target = (find_program(role.args) if is_agent_role(role) else None) or ("", "")
    return "" if kind != "script" or os.path.isabs(target) or "$" in target else target


def check_roles(app: AppDef) -> None:
    """Refuse what no adapter can run.

    Raises:
        SchedulerError: no roles, a role without a command, role names that repeat, impossible counts.
    """
    if not app.roles:
        raise SchedulerError(f"app {app.name!r} has no roles")
    names = [role.name for role in app.roles]
    for role in app.roles:
        if names.count(role.name) > 1:
            raise SchedulerError(f"role names must differ, but {role.name!r} appears {names.count(role.name)} times")
        _check_role(role)
    with _translate_policy_errors():
        check_policies(
            [
                PolicedRole(
                    name=role.name,
                    policy=read_policy(role),
                    max_retries=role.max_retries,
                    restarts_role=build_role_plan(role).retry_scope is RetryScope.ROLE,
                    is_observable=bool(find_ports(role)) or is_agent_role(role),
                )
                for role in app.roles
            ]
        )


def find_ports(role: Role) -> dict[str, int]:
    """Return the ports of a role's program: those of rendezvous, which `dist.*` declares as TorchX does, are not."""
    return {name: port for name, port in role.port_map.items() if not (name == "c10d" and is_agent_role(role))}


def read_policy(role: Role) -> RolePolicy:
    """Return the policy in a role's metadata.

    Raises:
        SchedulerError: it is wrong.
    """
    with _translate_policy_errors():
        return parse_policy(role.name, role.metadata.get(RoleKey.POLICY))


@contextlib.contextmanager
def _translate_policy_errors() -> Iterator[None]:
    try:
        yield
    except PolicyError as error:
        raise SchedulerError(str(error)) from error


def _check_role(role: Role) -> None:
    if not role.name or "/" in role.name or role.name in (".", ".."):
        raise SchedulerError(f"role name {role.name!r} must be a non-empty word without '/'")
    if not role.entrypoint or role.entrypoint == "<MISSING>":
        raise SchedulerError(f"role {role.name!r} has no entrypoint")
    if not 1 <= role.num_replicas <= SIZE_LIMIT:
        raise SchedulerError(f"role {role.name!r}: num_replicas must be 1 to {SIZE_LIMIT}, not {role.num_replicas}")
    if role.max_retries < 0:
        raise SchedulerError(f"role {role.name!r}: max_retries must be at least 0, not {role.max_retries}")
    least = role.min_replicas
    if least is not None and not 1 <= least <= role.num_replicas:
        raise SchedulerError(
            f"role {role.name!r}: min_replicas must be from 1 to num_replicas ({role.num_replicas}), not {least}"
        )


def build_role_plan(role: Role) -> SupervisedRole:
    """Return what the supervisor's decisions need to know about a role."""
    policy = role.retry_policy
    return SupervisedRole(
        name=role.name,
        replicas=role.num_replicas,
        runs_agent=is_agent_role(role),
        min_replicas=role.min_replicas,
        max_retries=role.max_retries,
        retry_scope=_SCOPES[policy.name if isinstance(policy, RetryPolicy) else str(policy)],
        policy=read_policy(role),
        ports=find_ports(role),
    )


def find_elastic_role(app: str, roles: Sequence[SupervisedRole], name: str | None, nodes: int) -> SupervisedRole:
    """Return the role of an app that gets another number of nodes.

    Args:
        app: name of the app, for messages.
        roles: all of it.
        name: which. None: the only elastic one.
        nodes: the new number.

    Raises:
        SchedulerError: no such role, several elastic ones, not elastic, or the number is out of bounds.
    """
    named = [role for role in roles if name in (None, role.name)]
    if not named:
        raise SchedulerError(f"app {app!r} has no role {name!r}; it has: {', '.join(role.name for role in roles)}")
    elastic = [role for role in named if role.is_elastic]
    if not elastic:
        sizes = ", ".join(f"role {role.name!r}: {role.replicas}" for role in named)
        raise SchedulerError(
            f"app {app!r} has a fixed number of nodes ({sizes}); only roles with -j MIN:MAX can resize"
        )
    if len(elastic) > 1:
        names = ", ".join(role.name for role in elastic)
        raise SchedulerError(f"app {app!r} has several elastic roles: choose one of {names} with --role")
    [role] = elastic
    if not role.needed <= nodes <= role.replicas:
        raise SchedulerError(
            f"role {role.name!r} of {app!r} can have {role.needed} to {role.replicas} nodes, not {nodes}"
        )
    return role


_SCOPES: Mapping[str, RetryScope] = {
    "REPLICA": RetryScope.REPLICA,
    "HOT_SPARE": RetryScope.REPLICA,  # 0.7: replaces replicas while min_replicas are there
    "ROLE": RetryScope.ROLE,
    "APPLICATION": RetryScope.APPLICATION,
}


def name_workspace(folder: str) -> str:
    """Return the workspace argument that names a folder of this machine."""
    return folder if hasattr(specs, "Workspace") else f"file://{folder}"  # the nightly, 0.7


def get_workspace_path(workspace: str) -> str:
    """Return the folder that a workspace argument names. TorchX's release and nightly differ in its form.

    Raises:
        SchedulerError: it is not a folder of this machine (`memory://...`).
    """
    scheme, found, path = workspace.partition("://")
    if not found:
        return workspace
    if scheme != "file":
        raise SchedulerError(f"workspace {workspace!r} is not a local folder; give a path or file:///path")
    return path or "."
