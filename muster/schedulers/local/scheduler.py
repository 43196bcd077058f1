"""`local_cwd` and `detached`: TorchX's interface over a supervisor process per app.

Other shells need nothing from this process: an app's state is in its folder, and the registry finds it by the id.
"""

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torchx.specs import AppDef, AppDryRunInfo

from muster._shared.contract import AGENT_MODULE, Env
from muster._shared.programs import explain_missing
from muster.schedulers.adapter.records import RecordReader, describe_roles
from muster.schedulers.adapter.scheduler import LogRequest
from muster.schedulers.adapter.supervised import AgentWords, SupervisedScheduler
from muster.schedulers.agent_command import build_ask_command, find_program, is_agent_role
from muster.schedulers.errors import EngineError, SchedulerError, describe_os_error
from muster.schedulers.failure_report import read_error_file
from muster.schedulers.local.agent_files import read_records
from muster.schedulers.local.devices import list_devices, needs_sharing
from muster.schedulers.local.interpreter import find_interpreter, has_same_muster
from muster.schedulers.local.logs import FileLogQuery, read_log
from muster.schedulers.local.options import LocalOptions
from muster.schedulers.local.request import ERROR_FILE, Host, LocalRequest, build_request, list_device_requests
from muster.schedulers.naming import build_app_name, derive_token, make_secret, make_suffix
from muster.schedulers.runner.option_parsing import StrictOpts
from muster.schedulers.runner.option_records import declare_options, parse_options
from muster.schedulers.runner.shown.live_lines import draws_bars
from muster.schedulers.supervision import asking, client
from muster.schedulers.supervision.app_folder import AppFolder, AppSpec, ProcessId
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir
from muster.schedulers.supervision.state import ReplicaId

DRIVER = "muster.schedulers.local.driver:create_driver"
_OWN_VARIABLES = "MUSTER_"

logger = logging.getLogger(__name__)


class LocalScheduler(SupervisedScheduler):
    """Runs replicas as processes of this machine, in the current directory.

    Args:
        name: `local_cwd`, whose apps end with the command that started them, or `detached`, whose apps keep running.
        session_name: TorchX's; part of the default path of logs.
    """

    def __init__(self, name: str, session_name: str) -> None:
        super().__init__(name, session_name)
        self._registries: dict[tuple[str | None, str | None], AppRegistry] = {}

    # -- submitting -------------------------------------------------------------------------------------------------

    def add_options(self, opts: StrictOpts) -> None:
        """See `PluginScheduler`."""
        declare_options(opts, LocalOptions, {"detach": self.backend == "detached"})

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo:
        options = parse_options(LocalOptions, self._run_opts(), cfg)
        name = build_app_name(app.name, make_suffix())
        folder = os.path.abspath(os.path.join(self._find_log_dir(options), self.session_name or "torchx", name))
        host = _read_host(app, options)
        host = replace(host, draws_bars=not options.detach and draws_bars(os.environ))
        request = build_request(app, options, name=name, token=make_secret(), folder=folder, host=host)
        return AppDryRunInfo(request, str)

    def _find_log_dir(self, options: LocalOptions) -> str:
        if options.log_dir:
            return os.path.expanduser(options.log_dir)
        return str(find_state_dir(os.environ) / "logs")

    def schedule(self, dryrun_info: AppDryRunInfo) -> str:
        """Starts the app's supervisor and returns when all replicas have been started.

        Raises:
            EngineError: the supervisor could not be started; nothing is left of the app.
            SchedulerError: a script or module does not exist.
        """
        request: LocalRequest = dryrun_info.request
        _check_programs(request)
        spec = AppSpec(
            app_id=request.app_id,
            scheduler=self.backend,
            folder=request.folder,
            driver=DRIVER,
            roles=request.plans,
            grace_s=request.grace_s,
            owner=None if request.detach else ProcessId.of(os.getpid()),
            description=request.description,
            details={
                "base_env": {name: value for name, value in os.environ.items() if not name.startswith(_OWN_VARIABLES)},
                "token": request.token,
                "needs_bundle": request.needs_bundle,
                "replicas": {role: [vars(each) for each in launches] for role, launches in request.replicas.items()},
            },
        )
        try:
            client.submit(spec, self.find_registry())
        except client.SupervisorError as error:
            raise EngineError(f"cannot start {request.app_id}: {error}") from error
        except OSError as error:
            raise EngineError(f"cannot start {request.app_id}: {describe_os_error(error, request.folder)}") from error
        self.keep_attached(request.app_id, AppFolder(request.folder), detach=request.detach)
        return request.app_id

    # -- reading ----------------------------------------------------------------------------------------------------

    def read_words(self, folder: AppFolder, spec: AppSpec) -> AgentWords:
        """See `SupervisedScheduler`."""
        readers = {
            role.name: RecordReader(partial(read_records, folder.role_dir(role.name)))
            for role in spec.roles
            if role.runs_agent
        }
        restarts = sum(each.restarts for each in readers.values())
        return AgentWords(restarts=restarts, running=describe_roles(readers), error=_read_error(folder, spec))

    def find_url(self, folder: AppFolder) -> str:
        """See `SupervisedScheduler`."""
        return folder.path.as_uri()

    def read_log(self, app_id: str, request: LogRequest) -> Iterator[str]:
        """See `PluginScheduler`."""
        folder = self.find_folder(app_id)
        if folder is None:
            raise self._build_unknown(app_id)
        self.check_replica_of(folder, request)
        query = FileLogQuery(
            folder=folder.replica_dir(ReplicaId(request.role, request.index)),
            stream=request.stream.value,
            pattern=request.pattern,
            since_s=request.since_s,
            until_s=request.until_s,
            follow=request.follow,
        )
        has_ended = client.EndCheck(folder, keeps=app_id in self._submitted)
        return self._readers.count_reader(read_log(query, has_ended, folder.state_dir))

    # -- for `SupervisedScheduler` ----------------------------------------------------------------------------------

    def build_asker(self, folder: AppFolder) -> asking.AskNode:
        """See `SupervisedScheduler`."""
        del folder
        return ask_node

    def find_registry(self) -> AppRegistry:
        """See `SupervisedScheduler`."""
        places = os.environ.get("XDG_STATE_HOME"), os.environ.get("HOME")
        if places not in self._registries:  # the way to each is checked once: `list` asks for every app
            self._registries[places] = AppRegistry(find_state_dir(os.environ), self.backend)
        return self._registries[places]


def ask_node(spec: AppSpec, replica: ReplicaId, words: Sequence[str], limit_s: float) -> tuple[int, str, str]:
    """An `asking.AskNode`: the job's agents on this machine are found by its token."""
    plan = spec.details["replicas"][replica.role][replica.index]
    token = derive_token(spec.details["token"], replica.role)
    command = build_ask_command(plan["command"], words)
    env = {**spec.details["base_env"], **plan["env"], Env.TOKEN: token}
    try:
        done = subprocess.run(
            command,
            env=env,
            cwd=spec.folder,  # this shell's may be gone
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except OSError as error:
        return 1, "", str(error)
    except subprocess.TimeoutExpired:
        return 1, "", f"its command did not end in {limit_s:g} s"
    return done.returncode, done.stdout, done.stderr


def _check_programs(request: LocalRequest) -> None:
    """Refuse a script or module that does not exist: each worker of each node would say so otherwise."""
    for role, (launch, *_) in request.replicas.items():
        program = find_program(["-m", AGENT_MODULE, *launch.command[2:]]) if launch.runs_agent else None
        if program is None or "PYTHON_EXEC" in launch.env or not os.path.exists(launch.command[0]):
            continue  # there is no program, or another message is due
        # What another interpreter, or one with other folders, can import is not known here.
        if program[0] == "module" and (launch.command[0] != sys.executable or "PYTHONPATH" in launch.env):
            continue
        problem = explain_missing(*program, launch.cwd)
        if problem is not None:
            raise SchedulerError(f"role {role}: {problem}")


def _read_host(app: AppDef, options: LocalOptions) -> Host:
    """The facts on which the request depends besides its arguments; the one place that reads the environment."""
    divides = options.auto_set_cuda_visible_devices
    if divides is None:
        divides = needs_sharing(list_device_requests(app, options))
    runs_agents = any(is_agent_role(role) for role in app.roles)
    python = find_interpreter(os.environ, sys.executable) if runs_agents else sys.executable
    return Host(
        cwd=os.getcwd(),
        path=os.environ.get("PATH", os.defpath),
        python=python,
        has_muster=not runs_agents or has_same_muster(python),
        sets_unbuffered="PYTHONUNBUFFERED" not in os.environ,
        devices=list_devices(os.environ) if divides else (),
        env=dict(os.environ),
    )


def _read_error(folder: AppFolder, spec: AppSpec) -> str | None:
    """The first error.json of any replica, as one line of JSON."""
    paths = [
        folder.replica_dir(ReplicaId(role.name, index)) / ERROR_FILE
        for role in spec.roles
        for index in range(role.replicas)
    ]
    found: list[tuple[float, Path]] = []
    for path in paths:
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path))
    texts = (read_error_file(path) for _, path in sorted(found))
    return next(filter(None, texts), None)
