"""Builds what local_cwd will run from the AppDef and options, without side effects. The dry run prints it."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from torchx.specs import AppDef, Role

from muster.schedulers.adapter.agent_role import AgentPlace, ReplicaPlan, assign_arguments, translate_replica
from muster.schedulers.adapter.process_plan import build_process_spec, mask_plans
from muster.schedulers.adapter.process_scheduler import ERROR_FILE
from muster.schedulers.agent_command import AGENT_ENTRY, is_agent_role
from muster.schedulers.gpus import VISIBLE, DeviceRequest, assign_devices, share_devices
from muster.schedulers.local.options import LocalOptions
from muster.schedulers.naming import LOOPBACK, build_role_labels
from muster.schedulers.runner.roles import apply_macros
from muster.schedulers.supervision.app_folder import STATE_DIR_NAME, AppSpec, build_role_dir_name

_ADAPTER: Final = "local_cwd"
_DRIVER: Final = "muster.schedulers.processes.driver:create_driver"
_OWN_VARIABLES: Final = "MUSTER_"


@dataclass(frozen=True, kw_only=True)
class Host:
    """Facts about this machine and the caller on which a request depends."""

    cwd: str
    python: str
    """Interpreter for agents."""
    has_muster: bool
    """Whether that interpreter finds this version of muster."""
    draws_bars: bool = False
    """Whether the caller draws progress bars, see `Env.LIVE_BARS`."""
    devices: tuple[str, ...] = ()
    """GPUs the caller may use. They are only listed if they are to be divided."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The caller's environment, which the replicas inherit."""


@dataclass(frozen=True, kw_only=True)
class LocalRequest:
    """A whole app."""

    spec: AppSpec = field(repr=False)
    """What its supervisor starts from. A submission adds the scheduler's name."""
    detach: bool

    def __str__(self) -> str:
        """Return the text of the dry run, without secrets."""
        spec = self.spec
        shown = {
            "app_id": spec.app_id,
            "folder": spec.folder,
            "grace_s": spec.grace_s,
            "detach": self.detach,
            "plans": [asdict(role) for role in spec.roles],
            "replicas": mask_plans(spec.details["replicas"]),
            "needs_bundle": spec.details["needs_bundle"],
        }
        return json.dumps(shown, indent=2)


def build_request(
    app: AppDef, options: LocalOptions, *, name: str, token: str, folder: str, host: Host
) -> LocalRequest:
    """Build the request for an app. It is pure, and the AppDef is not changed.

    Args:
        app: what to run. Images, mounts and resources other than GPUs are ignored.
        options: of `-cfg`.
        name: the app's id.
        token: the app's secret. The driver derives a token from it for each agent role.
        folder: absolute path of the app's future folder.
        host: see `Host`.

    Raises:
        SchedulerError: a part of the app cannot be run. It is one line.
    """
    roles = assign_arguments(app, build_role_labels([role.name for role in app.roles]), name)
    devices = _divide_devices(app, options, host)
    replicas = {
        role.name: tuple(
            _build_launch(role, index, options, name, folder, host, devices.get(role.name))
            for index in range(role.num_replicas)
        )
        for role in roles
    }
    spec = build_process_spec(
        app,
        replicas,
        _build_place(name, folder, app.roles[0], options, host),
        folder=folder,
        driver=_DRIVER,
        token=token,
        details={
            "base_env": {key: value for key, value in host.env.items() if not key.startswith(_OWN_VARIABLES)},
            "needs_bundle": not host.has_muster and any(is_agent_role(role) for role in app.roles),
        },
    )
    return LocalRequest(spec=spec, detach=options.detach)


def list_device_requests(app: AppDef, options: LocalOptions) -> list[DeviceRequest]:
    """Return what each role needs of the GPUs."""
    return [
        DeviceRequest(
            role=role.name,
            replicas=role.num_replicas,
            each=max(0, role.resource.gpu),
            runs_agent=is_agent_role(role),
            chosen=VISIBLE in role.env or VISIBLE in options.env,
        )
        for role in app.roles
    ]


def _divide_devices(app: AppDef, options: LocalOptions, host: Host) -> Mapping[str, list[str]]:
    """Return the values of CUDA_VISIBLE_DEVICES by role."""
    wanted = list_device_requests(app, options)
    if options.auto_set_cuda_visible_devices:
        return assign_devices(wanted, host.devices)
    return {} if options.auto_set_cuda_visible_devices is False else share_devices(wanted, host.devices)


def _build_place(app_id: str, folder: str, role: Role, options: LocalOptions, host: Host) -> AgentPlace:
    return AgentPlace(
        adapter=_ADAPTER,
        app_id=app_id,
        log_dir=os.path.join(folder, build_role_dir_name(role.name)),
        grace_s=options.grace_s,
        env={**host.env, **options.env},
        stops_together=True,
        draws_bars=host.draws_bars,
        logs_here=True,
    )


def _build_launch(
    role: Role,
    index: int,
    options: LocalOptions,
    app_id: str,
    folder: str,
    host: Host,
    devices: list[str] | None,
) -> ReplicaPlan:
    applied = apply_macros(role, app_id=app_id, replica_id=index, img_root=host.cwd)
    place = _build_place(app_id, folder, role, options, host)
    bundle_dir = os.path.join(folder, STATE_DIR_NAME)
    # A path is exactly that interpreter.
    made = translate_replica(
        applied, place, rank0_host=LOOPBACK, bundle_dir=bundle_dir, python=host.python, env=options.env
    )
    env = dict(made.env)
    env["PATH"] = _join_path(
        env.get("PATH"), host.env.get("PATH", os.defpath), host.cwd, prepend_cwd=options.prepend_cwd
    )
    env.setdefault("TORCHELASTIC_ERROR_FILE", os.path.join(place.log_dir, str(index), ERROR_FILE))
    if "PYTHONUNBUFFERED" not in host.env:
        env.setdefault("PYTHONUNBUFFERED", "1")
    if devices is not None:
        env[VISIBLE] = devices[index]
    command = made.command
    if not made.runs_agent:
        env.setdefault("PET_LOG_DIR", os.path.join(place.log_dir, "torchelastic"))  # torchrun's --log-dir
    elif host.has_muster:
        command = (command[0], AGENT_ENTRY, *command[2:])
    return replace(made, command=command, env=env, cwd=host.cwd)


def _join_path(role_path: str | None, host_path: str, cwd: str, *, prepend_cwd: bool) -> str:
    parts = [part.strip(os.pathsep) for part in (role_path, host_path) if part]
    parts = [cwd, *parts] if prepend_cwd else [*parts, cwd]
    return os.pathsep.join(part for part in parts if part)
