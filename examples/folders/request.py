"""From an AppDef and options to what a supervisor runs: pure, so that a dry run needs nothing but this."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torchx.specs import AppDef

from muster.schedulers.adapter import (
    DETACH,
    ENV,
    ERROR_FILE,
    GRACE_S,
    AgentPlace,
    AppFolder,
    AppSpec,
    ReplicaId,
    assign_arguments,
    build_process_spec,
    build_role_labels,
    mask_plans,
    option,
    plan_replica,
)

WORKSPACE = "folders.workspace"
"""In `Role.metadata`: absolute path of the folder of which each replica gets a copy."""


@dataclass(frozen=True, kw_only=True)
class FolderOptions:
    """The options of `-cfg`."""

    path: str = option(str, "PATH of the replicas", default=os.defpath)
    env: Mapping[str, str] = ENV.as_field()
    detach: bool = DETACH.as_field()
    grace_s: float | None = GRACE_S.as_field()


def build_spec(app: AppDef, options: FolderOptions, *, app_id: str, folder: str, token: str) -> AppSpec:
    """Build what the supervisor runs; the AppDef is not changed."""
    files = AppFolder(folder)

    def build_place(role: str) -> AgentPlace:
        return AgentPlace(
            adapter="folders",
            app_id=app_id,
            log_dir=str(files.role_dir(role)),
            grace_s=options.grace_s,
            env={"PATH": options.path, **options.env},
            stops_together=True,
            logs_here=True,
        )

    plans = {}
    for role in assign_arguments(app, build_role_labels([role.name for role in app.roles]), app_id):
        folders = [files.replica_dir(ReplicaId(role.name, index)) for index in range(role.num_replicas)]
        plans[role.name] = [
            plan_replica(
                role,
                index,
                build_place(role.name),
                cwd=str(replica_dir / "work"),
                bundle_dir=str(files.state_dir),
                error_file=str(replica_dir / ERROR_FILE),
            )
            for index, replica_dir in enumerate(folders)
        ]
    return build_process_spec(
        app,
        plans,
        build_place(app.roles[0].name),
        folder=folder,
        driver="folders.driver:FolderDriver",
        token=token,
        workspace_key=WORKSPACE,
        details={"needs_bundle": True},
    )


def show(spec: AppSpec) -> str:
    """Return the text of a dry run, without secrets."""
    shown = asdict(spec)
    del shown["details"]["token"], shown["description"]
    shown["details"]["replicas"] = mask_plans(spec.details["replicas"])
    return json.dumps(shown, indent=2)
