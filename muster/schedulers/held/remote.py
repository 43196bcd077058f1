"""What a run on a hold of another adapter is: its request, and what the supervisor starts it from. Pure.

The AppDef's role becomes arguments and variables for the agents that wait on the nodes. Interpreter, image, folders,
resources and addresses are those of the hold. The rest of a run's variables comes from there: `node_program.held_run`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from torchx.specs import AppDef, Role

import muster
from muster._shared.contract import Env
from muster.schedulers.adapter.agent_role import AgentPlace, ReplicaPlan, assign_arguments, translate_replica
from muster.schedulers.adapter.process_plan import build_process_spec, mask_plans
from muster.schedulers.adapter.process_scheduler import ERROR_FILE
from muster.schedulers.agent_command import is_agent_role
from muster.schedulers.errors import OptionError, SchedulerError
from muster.schedulers.held.holds import RemoteHold
from muster.schedulers.local.options import LocalOptions
from muster.schedulers.naming import build_role_labels
from muster.schedulers.node_program.frames import HOLD_DIR
from muster.schedulers.runner.option_records import option
from muster.schedulers.runner.roles import apply_macros
from muster.schedulers.supervision.app_folder import AppSpec


@dataclass(frozen=True, kw_only=True)
class HeldOptions(LocalOptions):
    """The caller's options, checked."""

    app: str | None = option(str, "the hold, as `muster hold` prints it (default: the only one there is)")
    wait: bool = option(
        bool, "wait until the hold's run has ended; false: refuse the job while the hold has a run", default=False
    )


DRIVER: Final = "muster.schedulers.held.driver:create_driver"
WORKSPACE: Final = "held.workspace"
"""In `Role.metadata`: absolute path of the folder that travels to the nodes."""


@dataclass(frozen=True, kw_only=True)
class RemoteRequest:
    """A whole run on nodes elsewhere."""

    spec: AppSpec = field(repr=False)
    """It lacks only the hold. In its details are the variables with which this machine reaches the nodes."""
    detach: bool
    cwd: str
    """This folder, where the hold's nodes share it."""

    @property
    def workspace(self) -> str | None:
        """The folder that travels. None: none was given."""
        return next(iter(self.spec.details["workspaces"].values()), None)

    def __str__(self) -> str:
        """Return the text of the dry run, without secrets."""
        shown = {
            "app_id": self.spec.app_id,
            "folder": self.spec.folder,
            "grace_s": self.spec.grace_s,
            "detach": self.detach,
            "workspace": self.workspace,
            "replicas": mask_plans(self.spec.details["replicas"]),
        }
        return json.dumps(shown, indent=2)


def build_remote_request(
    app: AppDef,
    options: HeldOptions,
    *,
    name: str,
    folder: str,
    token: str,
    cwd: str,
    environ: Mapping[str, str],
    draws_bars: bool,
) -> RemoteRequest:
    """Build the request of a run. The AppDef is not changed.

    Args:
        app: what to run.
        options: of `-cfg`.
        name: the app's id.
        folder: absolute path of the app's future folder here.
        token: the app's secret.
        cwd: of the caller.
        environ: the caller's variables.
        draws_bars: see `Env.LIVE_BARS`.

    Raises:
        SchedulerError: it cannot run there. It is one line.
    """
    for local_option, is_given in (
        ("prepend_cwd", options.prepend_cwd),
        ("auto_set_cuda_visible_devices", options.auto_set_cuda_visible_devices is not None),
    ):
        if is_given:
            raise OptionError(f"{local_option} is for holds on this machine", local_option)
    roles = assign_arguments(app, build_role_labels([role.name for role in app.roles]), name)
    if len(roles) != 1 or not is_agent_role(roles[0]):
        raise SchedulerError("a run on this hold needs an app with one role, which runs muster's agent")
    role = roles[0]
    if "/" in role.entrypoint:
        raise SchedulerError(f"role {role.name} names {role.entrypoint}, but a run on a hold uses the hold's Python")
    run_dir = f"{HOLD_DIR}/runs/{name}"
    place = AgentPlace(
        adapter="held",
        app_id=name,
        log_dir=f"{run_dir}/log",
        termination_log=f"{run_dir}/termination",
        grace_s=options.grace_s,
        env=options.env,
        draws_bars=draws_bars,
    )
    spec = build_process_spec(
        app,
        {str(role.name): [_build_plan(role, index, place, run_dir) for index in range(role.num_replicas)]},
        place,
        folder=folder,
        driver=DRIVER,
        token=token,
        workspace_key=WORKSPACE,
        details={"environment": {key: value for key, value in environ.items() if not key.startswith("MUSTER_")}},
    )
    return RemoteRequest(spec=spec, detach=options.detach, cwd=cwd)


def _build_plan(role: Role, index: int, place: AgentPlace, run_dir: str) -> ReplicaPlan:
    applied = apply_macros(role, app_id=place.app_id, replica_id=index, img_root=f"{run_dir}/work")
    made = translate_replica(applied, place, rank0_host="", bundle_dir=HOLD_DIR, env=place.env)
    env = {name: value for name, value in made.env.items() if name != Env.RANK0_HOST}  # the hold's node knows it
    env.setdefault("TORCHELASTIC_ERROR_FILE", f"{run_dir}/{ERROR_FILE}")
    return replace(made, env=env, cwd=run_dir)


def check_remote(request: RemoteRequest, hold: RemoteHold) -> None:
    """Refuse a run that does not fit its hold.

    Raises:
        SchedulerError: one line.
    """
    if hold.version != muster.__version__:
        line = f"{hold.handle} was started by muster {hold.version}, and this is {muster.__version__}"
        raise SchedulerError(f"{line}: `muster release` it, and hold again")
    if hold.shares_folders and request.workspace is not None and request.workspace != request.cwd:
        where = f"the nodes of {hold.handle} share this machine's folders"
        raise SchedulerError(f"{where}: a run works in the current folder, not in the workspace {request.workspace}")
