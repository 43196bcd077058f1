"""`held` and `local_held`: TorchX's interface over a supervisor process per run, whose nodes are those of a hold."""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from torchx.specs import AppDef, AppDryRunInfo

from muster.schedulers.adapter.process_scheduler import ProcessScheduler
from muster.schedulers.agent_command import find_agent_flag, is_agent_role
from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.held.driver import LOCK
from muster.schedulers.held.options import HeldOptions
from muster.schedulers.local.hold_lock import lock_hold
from muster.schedulers.local.holds import Hold, choose_hold
from muster.schedulers.local.request import LocalRequest
from muster.schedulers.local.submission import build_spec, prepare_request
from muster.schedulers.naming import build_app_name, make_suffix
from muster.schedulers.runner.option_parsing import StrictOpts
from muster.schedulers.runner.option_records import declare_options, parse_options
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir

_BACKEND: Final = "held"
_DRIVER: Final = "muster.schedulers.held.driver:create_driver"
_POLL_S: Final = 0.1
_ROLE_KEY: Final = "nproc-per-node"


@dataclass(frozen=True, kw_only=True)
class HeldRequest:
    """A whole run."""

    local: LocalRequest
    app: str | None
    """The hold's name; which one it is turns out at the submission."""
    waits: bool
    processes: Mapping[str, str]
    """What the roles ask for on each node, by role."""

    def __str__(self) -> str:
        """Return the text of the dry run, without secrets."""
        return json.dumps({"hold": self.app, "wait": self.waits, **json.loads(str(self.local))}, indent=2)


class HeldScheduler(ProcessScheduler):
    """Runs nodes as those of a hold, in the current directory.

    Args:
        name: `held`, whose apps keep running when their command ends, or `local_held`.
        session_name: TorchX's; part of the default path of logs.
    """

    RUN_DEFAULTS = {"detach": "false"}  # noqa: RUF012  # see `PluginScheduler`

    def add_options(self, opts: StrictOpts) -> None:
        """See `PluginScheduler`."""
        declare_options(opts, HeldOptions, {"detach": self.backend == _BACKEND})

    def find_registry(self) -> AppRegistry:
        """See `SupervisedScheduler`: both names have the same apps."""
        return AppRegistry(find_state_dir(os.environ), _BACKEND)

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo:
        options = parse_options(HeldOptions, self._run_opts(), cfg)
        for role in app.roles:
            if not is_agent_role(role):
                raise SchedulerError(f"role {role.name} does not run muster's agent: it cannot run on a hold")
        name = build_app_name(app.name, make_suffix())
        local = prepare_request(app, options, name=name, folder=self.choose_folder(name, options.log_dir))
        processes = {str(role.name): find_agent_flag(role.args, _ROLE_KEY) or "1" for role in app.roles}
        request = HeldRequest(local=local, app=options.app, waits=options.wait, processes=processes)
        return AppDryRunInfo(request, str)

    def schedule(self, dryrun_info: AppDryRunInfo) -> str:
        """Take the hold, start the run's supervisor and return when all nodes have been started.

        Raises:
            EngineError: the hold runs another app, or the supervisor could not be started; nothing is left of the run.
            SchedulerError: there is no such hold, the run does not fit, or a script does not exist.
        """
        request: HeldRequest = dryrun_info.request
        hold = choose_hold(find_state_dir(os.environ), request.app)
        _check_fit(request, hold)
        spec = build_spec(request.local, _BACKEND)
        lock_fd = _take(hold, spec.app_id, waits=request.waits)
        try:
            place = {"handle": hold.handle, "folders": hold.list_folders(), "lock": str(hold.lock_path)}
            self.start_app(
                replace(spec, driver=_DRIVER, details={**spec.details, "hold": place}),
                detach=request.local.detach,
                lent_fds={LOCK: [lock_fd]},
            )
        finally:
            os.close(lock_fd)
        return spec.app_id


def _take(hold: Hold, name: str, *, waits: bool) -> int:
    """Lock the hold for a run; the descriptor."""
    told = ""
    while True:
        fd = lock_hold(hold.lock_path, name)
        if fd is not None:
            return fd
        run = hold.find_run()
        if run and not waits:
            raise EngineError(f"{hold.handle} runs {run} now; with -cfg wait=true this run waits for it")
        if run and run != told:
            print(f"held: waiting for {run} on {hold.handle}", file=sys.stderr, flush=True)
            told = run
        time.sleep(_POLL_S)


def _check_fit(request: HeldRequest, hold: Hold) -> None:
    """Refuse a run that is larger than the hold.

    Raises:
        SchedulerError: one line.
    """
    wanted = sum(role.replicas for role in request.local.plans)
    if wanted > hold.nodes:
        nodes = "1 node" if hold.nodes == 1 else f"{hold.nodes} nodes"
        raise SchedulerError(f"the run needs {wanted} nodes, and {hold.handle} has {nodes}")
    held = min((int(state.get("nproc", 0)) for state in hold.read_states()), default=0)
    for role, count in request.processes.items():
        if count.isdecimal() and held and int(count) > held:
            raise SchedulerError(f"role {role} runs {count} processes on each node, and {hold.handle} holds {held}")
