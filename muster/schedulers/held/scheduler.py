"""`held` and `local_held`: TorchX's interface over a supervisor process per run, whose nodes are those of a hold."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from torchx.specs import AppDef, AppDryRunInfo, Role
from torchx.workspace.api import WorkspaceMixin

from muster._shared.control import ControlError
from muster.schedulers.adapter.process_scheduler import ProcessScheduler
from muster.schedulers.adapter.scheduler import PluginScheduler
from muster.schedulers.agent_command import find_agent_flag, is_agent_role
from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.held.holds import (
    RUNS,
    AnyHold,
    RemoteHold,
    choose_hold,
    is_remote,
    run_beside_holder,
    take_hold,
)
from muster.schedulers.held.link import load_scheduler
from muster.schedulers.held.remote import (
    DRIVER,
    WORKSPACE,
    HeldOptions,
    RemoteRequest,
    build_remote_request,
    check_remote,
)
from muster.schedulers.local.request import LocalRequest
from muster.schedulers.local.submission import build_spec, prepare_request
from muster.schedulers.naming import build_app_name, make_secret, make_suffix
from muster.schedulers.node_program.frames import HOLD_DIR
from muster.schedulers.runner.live_lines import draws_bars
from muster.schedulers.runner.option_records import parse_options
from muster.schedulers.supervision.app_folder import AppSpec
from muster.schedulers.supervision.registry import find_state_dir
from muster.schedulers.supervision.state import ReplicaId

if TYPE_CHECKING:
    from muster.schedulers.node_program.pipe import NodePipe

_FILE_LIMIT_S: Final = 20.0
_ROLE_KEY: Final = "nproc-per-node"


@dataclass(frozen=True, kw_only=True)
class HeldRequest:
    """A whole run."""

    run: LocalRequest | RemoteRequest
    """On this machine, or on a hold of another adapter."""
    app: str | None
    """The hold's name. Which hold it is turns out at the submission."""
    waits: bool
    processes: Mapping[str, str]
    """What the roles ask for on each node, by role."""
    nodes: int

    def __str__(self) -> str:
        """Return the text of the dry run, without secrets."""
        return json.dumps({"hold": self.app, "wait": self.waits, **json.loads(str(self.run))}, indent=2)


class HeldScheduler(ProcessScheduler, WorkspaceMixin[None]):  # type: ignore[misc]
    """Runs nodes as those of a hold: on this machine in the current directory, elsewhere with a workspace that travels.

    Args:
        name: `held`, whose apps keep running when their command ends, or `local_held`.
        session_name: TorchX's name of the session. It is part of the default path of logs.
    """

    option_record = HeldOptions

    def __init__(self, name: str, session_name: str) -> None:
        super().__init__(name, session_name)
        self._others: dict[str, PluginScheduler] = {}
        """The schedulers of holds elsewhere, by name."""

    def close(self) -> None:
        """See `SupervisedScheduler`."""
        super().close()
        while self._others:
            self._others.popitem()[1].close()

    def _open_other(self, remote: Mapping[str, Any]) -> PluginScheduler:
        name = str(remote["scheduler"])
        if name not in self._others:
            self._others[name] = load_scheduler(name)
        return self._others[name]

    def build_workspace_and_update_role(self, role: Role, workspace: str, cfg: Mapping[str, Any]) -> None:
        """Take the folder of `--workspace`, where it travels. TorchX calls this before the dry run.

        Raises:
            SchedulerError: the folder cannot be read.
        """
        if is_remote(find_state_dir(os.environ), cfg.get("app")):
            self.note_workspace(role, workspace, WORKSPACE)

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo:
        options = parse_options(HeldOptions, self._run_opts(), cfg)
        for role in app.roles:
            if not is_agent_role(role):
                raise SchedulerError(f"role {role.name} does not run muster's agent: it cannot run on a hold")
        name = build_app_name(app.name, make_suffix())
        folder = self.choose_folder(name, options.log_dir)
        run: LocalRequest | RemoteRequest
        if is_remote(find_state_dir(os.environ), options.app):
            run = build_remote_request(
                app,
                options,
                name=name,
                folder=folder,
                token=make_secret(),
                cwd=os.getcwd(),
                environ=os.environ,
                draws_bars=not options.detach and draws_bars(os.environ),
            )
        else:
            run = prepare_request(app, options, name=name, folder=folder)
        request = HeldRequest(
            run=run,
            app=options.app,
            waits=options.wait,
            processes={str(role.name): find_agent_flag(role.args, _ROLE_KEY) or "1" for role in app.roles},
            nodes=sum(role.num_replicas for role in app.roles),
        )
        return AppDryRunInfo(request, str)

    def schedule(self, dryrun_info: AppDryRunInfo) -> str:
        """Take the hold, start the run's supervisor and return when all nodes have been started.

        Raises:
            EngineError: the hold runs another app, or the supervisor could not be started. Nothing is left of the run.
            SchedulerError: there is no such hold, the run does not fit, or a script does not exist.
        """
        from muster.schedulers.held.driver import LOCK, WORKSPACE_NAME  # a status starts without it

        request: HeldRequest = dryrun_info.request
        hold = choose_hold(find_state_dir(os.environ), request.app)
        if isinstance(hold, RemoteHold) is not isinstance(request.run, RemoteRequest):
            raise SchedulerError(f"the only hold is {hold.handle} now: run again")
        _check_fit(request, hold)
        if isinstance(request.run, RemoteRequest):
            assert isinstance(hold, RemoteHold)  # noqa: S101  # see above
            check_remote(request.run, hold)
            spec = request.run.spec
        else:
            spec = build_spec(request.run, RUNS)
        hint = "; with -cfg wait=true this run waits for it"
        lock_fd = take_hold(hold, spec.app_id, waits=request.waits, hint=hint)
        try:
            place, entries = _describe_place(request, hold)
            files = {} if entries is None else {WORKSPACE_NAME: json.dumps(entries).encode()}
            spec = replace(spec, driver=DRIVER, details={**spec.details, "hold": place})
            self.start_app(spec, detach=request.run.detach, files=files, lent_fds={LOCK: [lock_fd]})
        finally:
            os.close(lock_fd)
        return spec.app_id

    # -- asking -----------------------------------------------------------------------------------------------------

    def ask_command(
        self, spec: AppSpec, replica: ReplicaId, command: Sequence[str], env: Mapping[str, str], limit_s: float
    ) -> tuple[int, str, str]:
        """See `ProcessScheduler`. On a hold elsewhere it runs on the run's node."""
        remote = spec.details["hold"].get("remote")
        if remote is None:
            return super().ask_command(spec, replica, command, env, limit_s)
        argv = ["{muster-agent}", *command[2:]]
        try:
            return self._run_there(remote, replica.index, argv, env, limit_s)
        except (ControlError, EngineError) as error:
            return 1, "", str(error)

    def read_run_file(self, app_id: str, role: str, index: int, name: str, limit_bytes: int) -> bytes | None:
        """See `PluginScheduler`. What a link has not brought from a hold elsewhere may still be on the node."""
        content = super().read_run_file(app_id, role, index, name, limit_bytes)
        folder, run_dir = self.find_folder(app_id), self.find_run_dir(app_id, role)
        if content is not None or folder is None or run_dir is None:
            return content
        hold = folder.read_spec().details.get("hold", {})
        if "remote" not in hold:
            return None
        remote, path = hold["remote"], f"{HOLD_DIR}/runs/{app_id}/log/{run_dir.name}/{name}"
        argv = ["tail", "-c", str(limit_bytes), path]
        try:
            code, output, _ = self._run_there(remote, index, argv, {}, _FILE_LIMIT_S)
        except (ControlError, EngineError):
            return None
        return output.encode() if code == 0 else None

    def _run_there(
        self, remote: Mapping[str, Any], index: int, command: Sequence[str], env: Mapping[str, str], limit_s: float
    ) -> tuple[int, str, str]:
        return run_beside_holder(
            self._open_other(remote), remote["app_id"], remote["role"], index, command, env, limit_s
        )

    def open_beside(
        self, spec: AppSpec, replica: ReplicaId, handle: Mapping[str, Any], words: Sequence[str]
    ) -> "NodePipe":
        """See `ProcessScheduler`. On a hold elsewhere its agent is known by the client that stands there for it."""
        remote = spec.details["hold"].get("remote")
        if remote is None:
            return super().open_beside(spec, replica, handle, words)
        other = self._open_other(remote)
        return replace(other.open_in_node(remote["app_id"], remote["role"], replica.index, words), root=0)


def _describe_place(request: HeldRequest, hold: AnyHold) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    """Return what the driver must know of the hold, and the entries of the workspace, if one travels."""
    place = {"handle": hold.handle, "lock": str(hold.lock_path)}
    if not isinstance(hold, RemoteHold):
        return {**place, "folders": hold.list_folders()}, None
    run = request.run
    assert isinstance(run, RemoteRequest)  # noqa: S101  # see `schedule`
    travels = run.workspace is not None and not hold.shares_folders
    remote = {
        **place,
        "remote": {"scheduler": hold.scheduler, "app_id": hold.app_id, "role": hold.role, "nodes": hold.nodes},
        "cwd": run.cwd if hold.shares_folders else None,
        "root": run.workspace,
        "waits": request.waits,
    }
    return remote, _list_files(run) if travels else None


def _list_files(run: RemoteRequest) -> list[dict[str, Any]]:
    from muster.schedulers.workspace.packing import BundleError, list_workspace

    try:
        return list_workspace(str(run.workspace))
    except BundleError as error:
        raise SchedulerError(str(error)) from error


def _check_fit(request: HeldRequest, hold: AnyHold) -> None:
    """Refuse a run that is larger than the hold.

    Raises:
        SchedulerError: one line.
    """
    if request.nodes > hold.nodes:
        nodes = "1 node" if hold.nodes == 1 else f"{hold.nodes} nodes"
        raise SchedulerError(f"the run needs {request.nodes} nodes, and {hold.handle} has {nodes}")
    if isinstance(hold, RemoteHold):
        held = hold.processes
    else:
        held = min((int(state.get("nproc", 0)) for state in hold.read_states()), default=0)
    for role, count in request.processes.items():
        if count.isdecimal() and held and int(count) > held:
            raise SchedulerError(f"role {role} runs {count} processes on each node, and {hold.handle} holds {held}")
