"""`ssh`: TorchX's interface over a supervisor process per app, whose replicas run on other machines.

Other shells need only the state folder: an app's state is in its folder, which names the hosts.
"""

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torchx.specs import AppDef, AppDryRunInfo, Role
from torchx.workspace.api import WorkspaceMixin

from muster._shared.contract import AGENT_BUNDLE_NAME, print_line
from muster._shared.control import ControlError
from muster.schedulers import adapter
from muster.schedulers.node_program.session import WORDS, LostNodeError, Order, run_captured
from muster.schedulers.ssh import checks
from muster.schedulers.ssh.checks import Checked
from muster.schedulers.ssh.command import build_ssh, explain_failure
from muster.schedulers.ssh.driver import RUN, find_workspace_name
from muster.schedulers.ssh.options import SshOptions, find_hosts
from muster.schedulers.ssh.request import WORKSPACE, SshRequest, build_request, count_replicas, place_request
from muster.schedulers.supervision.app_folder import AppFolder, AppSpec

_OWN_VARIABLES: Final = "MUSTER_"
_MARGIN_BYTES: Final = 32 << 20
"""Beyond twice the workspace and the agent: for logs."""
_END_LIMIT_S: Final = 0.5
"""Of an `ssh` that has asked."""
_COMMAND_LIMIT_S: Final = 10.0
"""The host ends what is left of a command before its `ssh` ends."""

logger = logging.getLogger(__name__)


class SshScheduler(adapter.ProcessScheduler, WorkspaceMixin[None]):  # type: ignore[misc]
    """Runs replicas on hosts that `ssh` reaches, one on each.

    Args:
        name: `ssh`.
        session_name: TorchX's name of the session. It is part of the default path of logs.
    """

    option_record = SshOptions

    # -- submitting -------------------------------------------------------------------------------------------------

    def build_workspace_and_update_role(self, role: Role, workspace: str, cfg: Mapping[str, Any]) -> None:
        """Take the folder of `--workspace`. TorchX calls this before the dry run.

        Raises:
            SchedulerError: the folder cannot be read.
        """
        del cfg
        self.note_workspace(role, workspace, WORKSPACE)

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo:
        options = adapter.parse_options(SshOptions, self._run_opts(), cfg)
        name = adapter.build_app_name(app.name, adapter.make_suffix())
        folder = self.choose_folder(name, options.log_dir)
        hosts = find_hosts(options)
        return AppDryRunInfo(
            build_request(app, options, hosts, app_id=name, folder=folder, token=adapter.make_secret()), str
        )

    def schedule(self, dryrun_info: AppDryRunInfo) -> str:
        """Look at all hosts, start the app's supervisor, and return when all replicas have been sent off.

        Raises:
            EngineError: too few hosts can be used, with a line for each that cannot. Nothing is left of the app.
            SchedulerError: the workspace cannot be read.
        """
        request: SshRequest = dryrun_info.request
        with contextlib.ExitStack() as held:
            # It is built while the hosts answer.
            bundle = held.enter_context(ThreadPoolExecutor(1)).submit(adapter.build_agent_bundle)
            paths = held.enter_context(_pack_files(request.spec))
            good = held.enter_context(_checked_hosts(request, sum(path.stat().st_size for path in paths.values())))
            spec = _place_request(request, good)
            # With which `ssh` runs: its agent's socket, the home folder. No other place reads them.
            environment = {name: value for name, value in os.environ.items() if not name.startswith(_OWN_VARIABLES)}
            files: dict[str, bytes | Path] = {AGENT_BUNDLE_NAME: bundle.result(), **paths}
            used = {each.host.name: each.connection for each in good[: count_replicas(spec)]}
            self.start_app(
                replace(spec, details={**spec.details, "environment": environment}),
                detach=request.options.detach,
                files=files,
                lent_fds={name: connection.lend() for name, connection in used.items()},
            )
            for connection in used.values():
                connection.give()
        return spec.app_id

    # -- asking -----------------------------------------------------------------------------------------------------

    def ask_command(
        self, spec: AppSpec, replica: adapter.ReplicaId, command: Sequence[str], env: Mapping[str, str], limit_s: float
    ) -> tuple[int, str, str]:
        """See `ProcessScheduler`. The command and its variables go over standard input."""
        record = AppFolder(spec.folder).read_record()
        handle = None if record is None else record.handles.get(replica)
        if handle is None:
            return 1, "", f"{replica} does not run"
        run = str(handle["run"])
        order = Order(
            app="",
            index=replica.index,
            command=[word.replace(RUN, run) for word in command],
            env={name: value.replace(RUN, run) for name, value in env.items()},
            cwd=run,
        )
        try:
            return run_captured(_open_host(spec, handle, WORDS, _END_LIMIT_S), order, limit_s)
        except LostNodeError as error:
            return (1, "", str(error)) if error.was_reached else (adapter.NOT_REACHED, "", error.why or str(error))
        except ControlError as error:
            return 1, "", str(error)

    def open_beside(
        self, spec: AppSpec, replica: adapter.ReplicaId, handle: Mapping[str, Any], words: Sequence[str]
    ) -> adapter.NodePipe:
        """See `ProcessScheduler`."""
        del replica
        return _open_host(spec, handle, words, _COMMAND_LIMIT_S)


def _open_host(spec: AppSpec, handle: Mapping[str, Any], words: Sequence[str], limit_s: float) -> adapter.NodePipe:
    """Start a Python on the host of a replica. Its `ssh` ends within the limit, once it is no longer needed."""
    ssh = spec.details["ssh"]
    command = build_ssh(ssh["ssh"], handle["host"], ssh["python"], words)

    def explain(errors: bytes, code: int | None) -> str:
        return f"{handle['host']}: {explain_failure(errors, code, ssh['python'])}" if code else ""

    return adapter.start_pipe(command, spec.details["environment"], explain=explain, limit_s=limit_s)


@contextlib.contextmanager
def _pack_files(spec: AppSpec) -> Iterator[dict[str, Path]]:
    """Pack each workspace once, in files without a name, of which a kill leaves nothing. Roles may share one."""
    with contextlib.ExitStack() as opened:
        made: dict[str, Path] = {}
        paths: dict[str, Path] = {}
        for role, workspace in spec.details["workspaces"].items():
            if workspace not in made:
                out = opened.enter_context(tempfile.TemporaryFile())
                made[workspace] = Path(f"/proc/self/fd/{out.fileno()}")
                try:
                    adapter.write_workspace_bundle(workspace, out)
                    out.flush()
                except adapter.BundleError as error:
                    raise adapter.SchedulerError(str(error)) from error
            paths[find_workspace_name(role)] = made[workspace]
        yield paths


@contextlib.contextmanager
def _checked_hosts(request: SshRequest, workspace_bytes: int) -> Iterator[list[Checked]]:
    """Look at the hosts, and yield those that can be used.

    Their connections are closed at the end unless they are given away.

    Raises:
        EngineError: there are too few.
    """
    spec, options = request.spec, request.options
    needs = checks.Needs(
        ssh=options.ssh,
        python=options.python,
        folder=options.folder,
        disk_bytes=2 * workspace_bytes + _MARGIN_BYTES,
        ports=max(1, sum(role.runs_agent for role in spec.roles)),
    )
    wanted = count_replicas(spec)
    hosts = request.hosts[: wanted + options.spares]
    if spec.details["discover"]:
        wanted = spec.roles[0].needed
    good, failed = checks.check_hosts(hosts, needs)
    try:
        if len(good) < wanted:
            raise adapter.EngineError(checks.describe_failures(failed, len(hosts)))
        for name, why in failed.items():
            print_line(f"ssh: {name} cannot be used: {why}")
        yield good
    finally:
        for each in good:
            each.connection.close()


def _place_request(request: SshRequest, good: Sequence[Checked]) -> AppSpec:
    """Choose the hosts that are used, and where the agents of each role meet.

    Raises:
        EngineError: they do not reach the first one.
    """
    spec, options = request.spec, request.options
    jobs = [role.name for role in spec.roles if role.runs_agent]
    begins = {role.name: sum(each.replicas for each in spec.roles[:number]) for number, role in enumerate(spec.roles)}
    addresses: dict[str, str] = {}
    ports: dict[str, int] = {}
    for role in dict.fromkeys([spec.roles[0].name, *jobs]):
        first = good[begins[role]]
        if options.rank0 is not None and begins[role] == 0:
            addresses[role] = options.rank0
        else:
            others = [each for each in good if each is not first]
            address, failed = checks.find_address(first, others)
            if address is None:
                hint = f"-cfg rank0=ADDR names an address of {first.host.name} that all reach"
                raise adapter.EngineError("\n  ".join([hint, *(f"{name}: {why}" for name, why in failed.items())]))
            addresses[role] = address
        if role in jobs:
            ports[role] = first.ports[jobs.index(role)]
    return place_request(
        request,
        hosts=[each.host.name for each in good],
        addresses=addresses,
        ports=ports,
        others={each.host.name: each.addresses[0] for each in good},
    )
