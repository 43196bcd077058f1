"""From the roles of an AppDef to what a `ProcessDriver` starts, and to the app's spec: pure."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torchx.specs import AppDef, Role

from muster.schedulers.adapter.agent_role import AgentPlace, ReplicaPlan, translate_replica
from muster.schedulers.grace import decide_app_grace_s
from muster.schedulers.runner.app_codec import dump_app
from muster.schedulers.runner.roles import apply_macros, build_role_plan
from muster.schedulers.secret_variables import mask_args, mask_env
from muster.schedulers.supervision.app_folder import AppSpec


def plan_replica(
    role: Role,
    index: int,
    place: AgentPlace,
    *,
    cwd: str,
    bundle_dir: str,
    error_file: str,
    python: str = sys.executable,
) -> ReplicaPlan:
    """Plan one replica: its command and all its variables. A variable of the role overrides that of `place.env`.

    Args:
        role: of `assign_arguments`.
        index: of the replica.
        place: where it runs.
        cwd: absolute path of the folder in which it starts, which is also the macro `img_root`.
        bundle_dir: see `translate_replica`.
        error_file: absolute path of what `TORCHELASTIC_ERROR_FILE` names, unless the role sets it.
        python: see `translate_replica`.
    """
    applied = apply_macros(role, app_id=place.app_id, replica_id=index, img_root=cwd)
    # Node 0's address is known only when the replica starts.
    made = translate_replica(applied, place, rank0_host="", bundle_dir=bundle_dir, python=python, env=place.env)
    env = {"TORCHELASTIC_ERROR_FILE": error_file, "PYTHONUNBUFFERED": "1", **made.env}
    return replace(made, env=env, cwd=cwd)


def build_process_spec(
    app: AppDef,
    replicas: Mapping[str, Sequence[ReplicaPlan]],
    place: AgentPlace,
    *,
    folder: str,
    driver: str,
    token: str,
    workspace_key: str | None = None,
    details: Mapping[str, Any] | None = None,
    python: str = sys.executable,
) -> AppSpec:
    """Build the spec of an app whose driver is a `ProcessDriver`.

    Args:
        app: as submitted.
        replicas: by role, in order of index.
        place: of any of its roles.
        folder: absolute path of the app's folder, where the driver runs.
        driver: `package.module:function`.
        token: the app's secret.
        workspace_key: the key of `Role.metadata` at which the adapter has put the path of the folder that travels with
            the role. The spec's details have these paths as `workspaces`, by role. None: no folder travels.
        details: the driver's own. `base_env` are variables that all replicas get. With `needs_bundle` the driver puts
            the agent's bundle into the app's `AppFolder.state_dir`.
        python: the interpreter that runs the supervisor.
    """
    travel = {str(each.name): each.metadata[workspace_key] for each in app.roles if workspace_key in each.metadata}
    return AppSpec(
        app_id=place.app_id,
        scheduler=place.adapter,
        folder=folder,
        driver=driver,
        roles=tuple(build_role_plan(role) for role in app.roles),
        grace_s=decide_app_grace_s(app.roles, place.grace_s, place.env),
        python=python,
        description=dump_app(app, without_metadata=() if workspace_key is None else (workspace_key,)),
        details={
            "base_env": {},
            "token": token,
            "replicas": {role: [asdict(each) for each in plans] for role, plans in replicas.items()},
            **({} if workspace_key is None else {"workspaces": travel}),
            **(details or {}),
        },
    )


def mask_plans(replicas: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Return the plans of `AppSpec.details`, by role, as people may see them: without secrets."""
    return {
        role: [
            {**plan, "env": mask_env(plan["env"], plan["secret_env"]), "command": mask_args(plan["command"])}
            for plan in plans
        ]
        for role, plans in replicas.items()
    }
