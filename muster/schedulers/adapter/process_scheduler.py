"""The base class of adapters that start a program of this machine for each replica: the command itself, `ssh`, `srun`.

Their driver is a `processes.driver.ProcessDriver`. It writes each replica's output to files of the app's folder, where
any shell can read it. What agents report is read there, too, if their log folder is the role's.
"""

import abc
import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster._shared.contract import Env, LogNames
from muster._shared.control import CommandExit, ControlError
from muster._shared.foreign_files import link_latest, unlink_latest
from muster.schedulers.adapter.scheduler import LogRequest
from muster.schedulers.adapter.supervised import AgentReports, SupervisedScheduler
from muster.schedulers.naming import derive_token
from muster.schedulers.supervision import client
from muster.schedulers.supervision.app_folder import AppFolder, AppSpec
from muster.schedulers.supervision.state import ReplicaId

if TYPE_CHECKING:
    from muster.schedulers.node_program.pipe import NodePipe
    from muster.schedulers.supervision.agent_requests import AskNode

ERROR_FILE = LogNames.ERROR
"""The file in a replica's folder to which the replica's `TORCHELASTIC_ERROR_FILE` points."""


class ProcessScheduler(SupervisedScheduler, abc.ABC):
    """A `SupervisedScheduler` whose replicas are processes that a `ProcessDriver` starts.

    Subclasses define `option_record`, `_submit_dryrun` and `schedule`, which calls `start_app`. They change
    `ask_command` and `open_beside` if a command must run in another place than this process.
    """

    def start_app(
        self,
        spec: AppSpec,
        *,
        detach: bool,
        files: Mapping[str, bytes | Path] | None = None,
        lent_fds: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """See `SupervisedScheduler`. A link `latest` beside the app's folder names it then."""
        super().start_app(spec, detach=detach, files=files, lent_fds=lent_fds)
        link_latest(*os.path.split(spec.folder))

    def delete_app(self, app_id: str) -> None:
        """See `PluginScheduler`."""
        folder = self.find_folder(app_id)
        super().delete_app(app_id)
        if folder is not None:
            unlink_latest(*os.path.split(folder.path))

    def read_reports(self, folder: AppFolder, spec: AppSpec) -> AgentReports:
        """See `SupervisedScheduler`."""
        return read_agent_reports(folder, spec)

    def find_url(self, folder: AppFolder) -> str:
        """See `SupervisedScheduler`."""
        return folder.path.as_uri()

    def find_run_dir(self, app_id: str, role: str) -> Path | None:
        """See `PluginScheduler`."""
        from muster.schedulers.processes.agent_files import find_newest_run

        folder = self.find_folder(app_id)
        return None if folder is None else find_newest_run(folder.role_dir(role))

    def read_log(self, app_id: str, request: LogRequest) -> Iterator[str]:
        """See `PluginScheduler`."""
        from muster.schedulers.lines import read_lines
        from muster.schedulers.processes.file_logs import FileSource

        folder = self.find_folder(app_id)
        if folder is None:
            raise self._build_unknown(app_id)
        self.check_replica_of(folder, request)
        replica_dir = folder.replica_dir(ReplicaId(request.role, request.index))
        lines = read_lines(
            FileSource(replica_dir, request.stream.value, folder.state_dir),
            partial(client.has_ended_logs, folder, keeps=app_id in self._submitted),
            pattern=request.pattern,
            since_s=request.since_s,
            until_s=request.until_s,
            follow=request.follow,
        )
        return self._readers.count_reader(lines)

    def build_asker(self, folder: AppFolder) -> "AskNode":
        """See `SupervisedScheduler`."""
        del folder
        return self.ask_node

    def ask_node(self, spec: AppSpec, replica: ReplicaId, words: Sequence[str], limit_s: float) -> tuple[int, str, str]:
        """Run the agent's command with other words, as an `AskNode`: agents are found by the job's token."""
        from muster.schedulers.agent_command import build_ask_command

        plan = spec.details["replicas"][replica.role][replica.index]
        token = derive_token(spec.details["token"], replica.role)
        env = {**spec.details["base_env"], **plan["env"], Env.TOKEN: token}
        try:
            return self.ask_command(spec, replica, build_ask_command(plan["command"], words), env, limit_s)
        except OSError as error:
            return 1, "", str(error)
        except subprocess.TimeoutExpired:
            return 1, "", f"its command did not end in {limit_s:g} s"

    def ask_command(
        self, spec: AppSpec, replica: ReplicaId, command: Sequence[str], env: Mapping[str, str], limit_s: float
    ) -> tuple[int, str, str]:
        """Run a command where a replica runs. Here: in a process of this machine.

        Args:
            spec: of the app.
            replica: of a role that runs agents.
            command: the agent's, with what is asked.
            env: the replica's.
            limit_s: the longest time, in seconds.

        Returns:
            Its exit code, standard output and standard error.

        Raises:
            OSError, subprocess.TimeoutExpired: it did not run, or did not end in time.
        """
        del replica
        done = subprocess.run(
            command,
            env=dict(env),
            cwd=spec.folder,  # this shell's may be gone
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def open_in_node(self, app_id: str, role: str, index: int, words: Sequence[str]) -> "NodePipe":
        """See `PluginScheduler`."""
        from muster.schedulers.supervision import agent_requests

        with self._open_app(app_id) as folder:
            spec, record = agent_requests.read_running(folder)
            replica = ReplicaId(role, index)
            if replica not in record.app.running() or replica not in record.handles:
                raise ControlError(f"{replica} of {app_id} does not run", CommandExit.ENDED)
            return self.open_beside(spec, replica, record.handles[replica], words)

    def open_beside(
        self, spec: AppSpec, replica: ReplicaId, handle: Mapping[str, Any], words: Sequence[str]
    ) -> "NodePipe":
        """Start a Python where a replica runs. Here: a process of this machine.

        Args:
            spec: of the app.
            replica: of a role that runs agents.
            handle: what the driver's `start` has returned.
            words: the arguments of the Python.

        Raises:
            ControlError: it cannot be started.
        """
        from muster.schedulers.node_program.pipe import start_pipe

        python = spec.details["replicas"][replica.role][replica.index]["command"][0]
        return start_pipe([python, *words], os.environ, root=handle["pid"])


def read_agent_reports(folder: AppFolder, spec: AppSpec) -> AgentReports:
    """Return what the agents of an app have reported into the folders of their roles."""
    from muster.schedulers.failure_report import RecordReader
    from muster.schedulers.processes.agent_files import read_records, read_report

    readers = {
        role.name: RecordReader(partial(read_records, folder.role_dir(role.name)))
        for role in spec.roles
        if role.runs_agent
    }
    return AgentReports(
        restarts=sum(each.restarts for each in readers.values()),
        jobs={role: each.job for role, each in readers.items()},
        error=_read_error(folder, spec),
        reports={role: report for role in readers if (report := read_report(folder.role_dir(role))) is not None},
    )


def _read_error(folder: AppFolder, spec: AppSpec) -> str | None:
    """Return the first error.json of any replica, as one line of JSON."""
    from muster.schedulers.failure_report import read_error_file

    paths = (
        folder.replica_dir(ReplicaId(role.name, index)) / ERROR_FILE
        for role in spec.roles
        for index in range(role.replicas)
    )
    found: list[tuple[float, Path]] = []
    for path in paths:
        with contextlib.suppress(OSError):  # this replica has not failed
            found.append((path.stat().st_mtime, path))
    texts = (read_error_file(path) for _, path in sorted(found))
    return next(filter(None, texts), None)
