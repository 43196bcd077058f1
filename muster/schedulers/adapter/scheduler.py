"""The base class of every scheduler of muster: one set of signatures for both lines of TorchX, and for `muster`.

TorchX 0.7 and its nightly differ here:

| item              | 0.7                                   | nightly                              |
|---                |---                                    |---                                   |
| `_validate`       | (app, scheduler)                      | (app, scheduler, cfg)                |
| `list`            | ()                                    | (cfg=None)                           |
| `delete`          | none                                  | `_delete_existing`                   |
| AppDryRunInfo     | `_app`, `_cfg`                        | `app`, `cfg`                         |
| workspace         | "file:///path"                        | "/path", or a `Workspace`            |
| RetryPolicy       | REPLICA, APPLICATION, HOT_SPARE       | REPLICA, APPLICATION, ROLE           |
| Role              | `base_image`                          | `workspace`, `overrides`             |
"""

import abc
import contextlib
import dataclasses
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream
from torchx.specs import AppDef, AppDryRunInfo, AppState, Role, is_terminal
from torchx.specs.api import NONE

from muster._shared.contract import AskKind, print_line, show_controls
from muster._shared.control import CommandExit, ControlError
from muster._shared.foreign_files import read_regular, walk_files
from muster._shared.reports import Answer
from muster.schedulers.adapter.properties import Properties
from muster.schedulers.adapter.waiting_line import WaitingLine
from muster.schedulers.errors import EngineError, SchedulerError, UnknownAppError, describe_os_error
from muster.schedulers.interrupts import raise_dropped_interrupts
from muster.schedulers.runner import callers
from muster.schedulers.runner.command_line import is_interrupted, print_errors_as_lines, unwind_on_signals
from muster.schedulers.runner.live_lines import LiveLines, repeat_failure, say_that_it_goes_on
from muster.schedulers.runner.option_parsing import StrictOpts
from muster.schedulers.runner.option_records import declare_options
from muster.schedulers.runner.roles import describe_workspace, get_workspace_path

if TYPE_CHECKING:
    from muster.schedulers.node_program.pipe import NodePipe
    from muster.schedulers.wording.facts import AppFacts

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
"""How often the state of an app is looked at if its adapter cannot wait for its end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogRequest:
    """Which part of which replica's output is wanted."""

    role: str
    index: int
    pattern: "re.Pattern[str] | None" = None
    """Only lines that match it are wanted. None: all are."""
    since: datetime | None = None
    until: datetime | None = None
    follow: bool = False
    stream: Stream = Stream.COMBINED

    @property
    def since_s(self) -> float | None:
        """`since` in seconds since the epoch."""
        return None if self.since is None else self.since.timestamp()

    @property
    def until_s(self) -> float | None:
        """`until` in seconds since the epoch."""
        return None if self.until is None else self.until.timestamp()

    def matches(self, line: str) -> bool:
        """Return whether the line is wanted."""
        return self.pattern is None or self.pattern.search(line) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leftover:
    """What one job left behind, for `muster prune`."""

    name: str
    """The app's handle without a session, as people read it."""
    what: str
    """In words: the outcome, and what there is."""
    remove: Callable[[], object]
    size_bytes: int = 0
    """The size of its files on this machine."""
    ended_s: float | None = None
    """Wall-clock seconds. None: not known."""


@dataclasses.dataclass
class ListedApp(ListAppResponse):  # type: ignore[misc]
    """One app of `list_apps`, with the fields by which `muster list` sorts apps."""

    submitted_s: float | None = None
    """Wall-clock seconds. None: not known."""
    has_other_home: bool = False
    """It was submitted with another home folder; here only the engine knows it. `muster list` has such apps last."""

    __hash__ = ListAppResponse.__hash__


class PluginScheduler(Scheduler, abc.ABC):  # type: ignore[misc]
    """A `Scheduler` with one set of signatures for TorchX's release and nightly. With both, it refuses unknown options.

    Subclasses define `_submit_dryrun`, `schedule`, `read_facts`, `_cancel_existing`, `option_record`, `list_apps`,
    `read_log`, `delete_app` and, if they refuse some AppDefs, `check_app`. They define which requests of `muster` they
    can carry out. `ask_app` carries `checkpoint`, `pause`, `resume`, `stacks` and `stop`, and each other method carries
    the command of its name.

    Args:
        backend: the scheduler's name, as in app handles.
        session_name: TorchX's.
    """

    TELLS_STATUS: bool = False
    """Whether `read_facts` costs so little that a terminal may ask every second or so how far a job is."""

    properties: Properties = Properties()
    """As its `Factory` declares them."""
    option_record: type[Any]
    """Declares the options of `-cfg`, see `option_records`."""

    def __init__(self, backend: str, session_name: str) -> None:
        super().__init__(backend, session_name)
        self._submitted: set[str] = set()
        """Apps of this process: it keeps their supervisors running while it reads their logs. See `close`, too."""
        self._printed: set[str] = set()
        self._live_lines = LiveLines()
        """Shared by the readers of all replicas, which TorchX runs in threads of their own."""
        self._merged_lock = threading.Lock()
        self._merged_ranks: dict[str, dict[str, int]] = {}
        """App -> role -> how many ranks have lines that a terminal shows merged."""
        self._awaited: DescribeAppResponse | None = None
        """The last answer that `Runner.wait` got."""
        self._waiting_line = WaitingLine(lambda app_id, line: logger.info("%s %s", app_id, show_controls(line)))
        print_errors_as_lines()
        unwind_on_signals()

    def add_options(self, opts: StrictOpts) -> None:
        """Declare the options of `-cfg`. Without `detach`, apps outlive their command unless TorchX waits for them."""
        declare_options(opts, self.option_record, {"detach": not self.properties.waits})

    @abc.abstractmethod
    def read_facts(self, app_id: str) -> "AppFacts | None":
        """Return what is known of an app. None: it is not known (any more).

        Raises:
            EngineError: the state cannot be read.
        """

    def describe_app(self, app_id: str) -> DescribeAppResponse | None:
        """Return the same as TorchX has it. Programs call it again and again: it may look less closely."""
        from muster.schedulers.adapter.status import build_status

        facts = self.read_facts(app_id)
        return None if facts is None else build_status(facts)

    def print_once(self, *lines: str) -> None:
        """Print lines that are not empty, each once: TorchX packs the same folder for every role."""
        for line in lines:
            if line and line not in self._printed:
                self._printed.add(line)
                print_line(f"muster: {line}")

    def note_workspace(self, role: Role, workspace: str, key: str, *, is_quiet: bool = False) -> None:
        """Note in a role's metadata the folder that travels with it, and print what of it does not.

        Args:
            role: gets the folder's absolute path.
            workspace: as TorchX passes it.
            key: in `Role.metadata`.
            is_quiet: see `describe_workspace`.

        Raises:
            SchedulerError: it is not a folder of this machine, or cannot be read.
        """
        path = os.path.abspath(get_workspace_path(workspace))
        self.print_once(*describe_workspace(role, path, is_quiet=is_quiet))
        role.metadata[key] = path

    def describe_unknown(self, app_id: str) -> str:
        """Say in one line that there is no such app, why that may be, and what a person can do."""
        return (
            f"{self.backend} has no job {app_id!r}: it may have been deleted, or submitted by another user or on "
            f"another machine; `muster list -s {self.backend}` lists the jobs that are known here"
        )

    def find_named(self, word: str) -> tuple[Sequence[str], str]:
        """Find the apps that a person may mean by a word, as `Properties.own_names` and `has_apps_elsewhere` promise.

        Returns:
            Their ids. If there are none, also one line that says so, or "".

        Raises:
            EngineError, SchedulerError: it cannot be found out.
            ControlError: the app that is meant does not exist any more.
        """
        del word
        return (), ""

    def shares_folders(self, cfg: Mapping[str, Any]) -> bool:
        """Return whether nodes have the folders of this machine, so that no workspace need travel to a hold."""
        del cfg
        return False

    def wait_ended(self, app_id: str, limit_s: float) -> None:
        """Return when an app may have ended, or after the limit: `muster run` asks for its state then.

        Args:
            app_id: of an app that exists.
            limit_s: the longest time, in seconds.
        """
        del app_id
        time.sleep(min(limit_s, _LOOK_S))

    @abc.abstractmethod
    def list_apps(self, cfg: Mapping[str, Any]) -> list[ListAppResponse]:
        """List the apps the scheduler knows of. `muster list` sorts those that are a `ListedApp` by their time."""

    @abc.abstractmethod
    def delete_app(self, app_id: str) -> None:
        """Delete an app that exists. Stop it first if it runs."""

    def delete_unfinished(self, app_id: str) -> bool:
        """Delete what a submission left that was interrupted before there was an app. False: it left nothing."""
        del app_id
        return False

    def ask_app(self, app_id: str, kind: AskKind, limit_s: float) -> Answer:
        """Ask the agents of a running app for a checkpoint, a pause, its end or their stacks, or whether they answer.

        Args:
            app_id: of the app.
            kind: what is asked for.
            limit_s: how long the ranks may take, in seconds.

        Raises:
            ControlError: it cannot be asked. Nothing was changed.
        """
        del app_id, limit_s
        raise ControlError(f"{self.backend} jobs cannot be asked for {kind.value}", CommandExit.REFUSED)

    def stop_app(self, app_id: str, limit_s: float) -> Answer:
        """Record that the app ends, so that nothing is started again. Then let all ranks stop at one step.

        If a node that runs cannot be asked, the record is withdrawn, and the answer is `AskOutcome.UNREACHED`. `muster
        stop` has asked for `AskKind.REACH` before, so this is rare.

        Args:
            app_id: of the app.
            limit_s: how long the ranks may take, in seconds. If they agree on no step, they get SIGTERM.

        Raises:
            ControlError: it cannot be stopped. Nothing was changed.
        """
        return self.ask_app(app_id, AskKind.STOP, limit_s)

    def recover_app(self, app_id: str) -> Answer:
        """Continue an app whose supervisor has died: adopt what still runs, start again what has ended.

        Raises:
            ControlError: it cannot be continued. Nothing was changed.
        """
        del app_id
        raise ControlError(f"{self.backend} jobs have no supervisor that could be lost", CommandExit.REFUSED)

    def resize_app(self, app_id: str, nodes: int, role: str | None) -> Answer:
        """Change the number of nodes of an elastic role, within its MIN:MAX.

        Args:
            app_id: of the app.
            nodes: the new number.
            role: the role to resize. None: the only elastic one.

        Raises:
            ControlError: it cannot be resized. Nothing was changed.
            SchedulerError: no such app or role, not elastic, out of bounds, or it has ended.
        """
        del app_id, nodes, role
        raise ControlError(f"{self.backend} jobs cannot be resized", CommandExit.REFUSED)

    def open_in_node(self, app_id: str, role: str, index: int, words: Sequence[str]) -> "NodePipe":
        """Start a Python where a node of a running app runs, for `muster exec` and `muster shell`.

        Its standard input and output are here, see `start_pipe` and `pump_pipe`. What runs there ends when its standard
        input ends, and all that it has started ends with it.

        Args:
            app_id: of the app.
            role: runs agents.
            index: of the node.
            words: the arguments of the node's Python.

        Raises:
            ControlError: nothing can be run there, or the node does not run.
        """
        del app_id, role, index, words
        raise ControlError(f"no command can be run in the nodes of {self.backend} jobs", CommandExit.REFUSED)

    def run_in_node(
        self, app_id: str, role: str, index: int, command: Sequence[str], limit_s: float
    ) -> tuple[int, str, str]:
        """Run a command where a node of a running app runs, with this user's rights, and wait for its end.

        Args:
            app_id: of the app.
            role: runs agents.
            index: of the node.
            command: a program of the node, and its arguments.
            limit_s: the longest time, in seconds.

        Returns:
            Its exit code, standard output and standard error.

        Raises:
            ControlError: it cannot be run there, or the node does not run.
        """
        from muster.schedulers.node_program import session

        pipe = self.open_in_node(app_id, role, index, session.WORDS)
        order = session.Order(app=session.find_name(app_id), index=index, command=command)
        return session.run_captured(pipe, order, limit_s)

    def end_node(self, app_id: str, role: str, index: int) -> bool:
        """Take a node away as its scheduler does: stop its container, delete its pod. False: only signals can do it.

        Raises:
            ControlError: the node does not run.
        """
        del app_id, role, index
        return False

    def find_run_dir(self, app_id: str, role: str) -> Path | None:
        """Find the folder on this machine in which the agents of a role keep the files of its newest run.

        None: it is not here. `LogNames` has the names of its files.
        """
        del app_id, role
        return None

    def read_run_file(self, app_id: str, role: str, index: int, name: str, limit_bytes: int) -> bytes | None:
        """Read a file of a role's newest run, where one of its nodes runs or here.

        Args:
            app_id: of an app that exists.
            role: runs agents.
            index: of the node whose agent has written it. Here all nodes of a role have one folder.
            name: below the run's folder: "events.jsonl", "node_1/attempt_0/3/stderr.log".
            limit_bytes: of a longer file the end is read, or nothing.

        Returns:
            Its content. None: it does not exist, or no longer does.

        Raises:
            EngineError: it is not known whether the file exists. The line says why.
        """
        del index
        folder = self.find_run_dir(app_id, role)
        return None if folder is None else read_run_file(folder, name, limit_bytes)

    def find_leftovers(self) -> "Iterable[Leftover]":
        """Find what apps that have ended left behind. Leave out apps that run."""
        return ()

    @abc.abstractmethod
    def read_log(self, app_id: str, request: LogRequest) -> Iterable[str]:
        """Return the lines of one replica.

        If they are not followed and their times are known, each is a `TimedLine`: `muster log` prints the lines of all
        replicas in the order of their times.

        Raises:
            SchedulerError: no such app, role or replica.
        """

    def check_app(self, app: AppDef, cfg: Mapping[str, Any]) -> None:
        """Refuse what the scheduler cannot run. `cfg` is empty on 0.7.

        Raises:
            SchedulerError: one line that names what is wrong.
        """

    def _run_opts(self) -> StrictOpts:
        opts = StrictOpts(self.backend)
        self.add_options(opts)
        return opts

    def submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo:
        """Do what TorchX's method does. The result's AppDef is a copy that prints no secret."""
        from muster.schedulers.runner.dry_run import hide_secrets

        return hide_secrets(super().submit_dryrun(app, cfg))

    def _validate(self, app: AppDef, scheduler: str, cfg: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002
        self.check_app(app, cfg or {})

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Return the lines of one replica. See `torchx.schedulers.api.Scheduler.log_iter`. Every parameter is honoured.

        Raises:
            SchedulerError: no such app, role or replica, or the regex is invalid.
        """
        try:
            pattern = re.compile(regex) if regex else None
        except re.error as error:
            raise SchedulerError(f"{regex!r} is not a valid regex: {error}") from error
        request = LogRequest(
            role=role_name,
            index=k,
            pattern=pattern,
            since=since,
            until=until,
            follow=should_tail,
            stream=streams or Stream.COMBINED,
        )
        return self._live_lines.show(
            self.read_log(app_id, request),
            role_name,
            k,
            count_merged_ranks=lambda: self.count_merged_ranks(app_id, role_name),
            read_status=(lambda: self.read_status_line(app_id)) if should_tail and self.TELLS_STATUS else None,
        )

    def read_status_line(self, app_id: str) -> str:
        """Return how far a job is that runs, in one line for the last row of a terminal. "": nothing is known."""
        from muster._shared.console.summary import format_status_line

        try:
            facts = self.read_facts(app_id)
        except (SchedulerError, OSError):
            return ""
        jobs = {} if facts is None else facts.jobs
        lines = {role: format_status_line(job.status) for role, job in jobs.items() if job.status is not None}
        return "; ".join(line if len(jobs) == 1 else f"{role}: {line}" for role, line in lines.items() if line)

    def count_merged_ranks(self, app_id: str, role_name: str) -> int:
        """Return what `agent_command.count_merged_ranks` returns for a role, or 0 if it cannot be known."""
        from muster.schedulers.agent_command import count_merged_ranks, is_agent_role

        with self._merged_lock, contextlib.suppress(SchedulerError):
            if app_id not in self._merged_ranks:
                response = self.describe_app(app_id)
                self._merged_ranks[app_id] = {
                    role.name: count_merged_ranks(role.args, role.resource.gpu)
                    for role in (() if response is None else response.roles)
                    if is_agent_role(role)
                }
        return self._merged_ranks.get(app_id, {}).get(role_name, 0)

    def list(self, cfg: Mapping[str, Any] | None = None) -> "list[ListAppResponse]":
        """List the scheduler's apps. See `list_apps`."""
        return self.list_apps(cfg or {})

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """See `describe_app`. To TorchX's `Runner.wait` an app that is deleted while it is awaited is CANCELLED.

        `torchx run --wait` prints a traceback for one that does not exist. It and `torchx log` say nothing while an app
        waits, so a log record of `WaitingLine` does.

        Raises:
            SchedulerError: a command of `torchx` names an app that does not exist, and would not say so.
        """
        with raise_dropped_interrupts():  # waiting happens here
            response = self.describe_app(app_id)
        needs_app, is_wait = callers.needs_app(), callers.is_wait()
        if needs_app:
            if response is None:
                raise self._build_unknown(app_id)
            response.roles = _add_spares(response)  # `torchx log` prints the lines of so many
        if response is not None and (needs_app or is_wait):
            self._waiting_line.update(response)
        if is_wait:
            was_awaited = self._awaited is not None and self._awaited.app_id == app_id
            if response is None and (was_awaited or app_id in self._submitted):
                message = f"{app_id} no longer exists: {self.properties.deleted}"
                response = DescribeAppResponse(app_id=app_id, state=AppState.CANCELLED, msg=message)
            self._awaited = response
            if response is not None and is_terminal(response.state) and callers.runs_command_line():
                from muster.schedulers.adapter.status import shorten_status

                return shorten_status(response, has_lines=self._live_lines.has_printed)
        return response

    def close(self) -> None:
        """Print nothing more but what becomes of a job that a command has waited for. TorchX calls it at the end."""
        self._live_lines.close()
        awaited, self._awaited = self._awaited, None
        if awaited is not None and awaited.state == AppState.FAILED and awaited.msg != NONE:
            repeat_failure(awaited.app_id, awaited.msg)
        ended_id = awaited.app_id if awaited is not None and is_terminal(awaited.state) else ""
        if is_interrupted(sys.exc_info()[1]):
            submitted, self._submitted = self._submitted - {ended_id}, set()  # said once
            for app_id in filter(self.goes_on, sorted(submitted)):
                handle = f"{self.backend}://{self.session_name}/{app_id}"
                say_that_it_goes_on(
                    f"the job goes on: `muster log -f {app_id}` follows it, `torchx cancel {handle}` ends it"
                )

    def goes_on(self, app_id: str) -> bool:
        """Return whether an app goes on when the command ends that has submitted it."""
        del app_id
        return True

    def delete(self, app_id: str) -> None:
        """Delete an app.

        An app that does not exist is no error. 0.7's command line has no `delete`: call it from Python.
        """
        if self.exists(app_id):
            self.delete_app(app_id)
        else:
            self.delete_unfinished(app_id)

    def _build_unknown(self, app_id: str) -> UnknownAppError:
        return UnknownAppError(self.describe_unknown(app_id))

    def _delete_existing(self, app_id: str) -> None:
        self.delete_app(app_id)


def _add_spares(response: DescribeAppResponse) -> list[Role]:
    from muster.schedulers.adapter.status import count_replicas

    counts = count_replicas(response)
    return [dataclasses.replace(role, num_replicas=counts[role.name]) for role in response.roles]


def measure_folder(folder: Path) -> int:
    """Return the bytes of the files in a folder that may be written to, or removed, at the same time."""
    total = 0
    for entry in walk_files(folder):
        with contextlib.suppress(OSError):
            total += entry.stat(follow_symlinks=False).st_size
    return total


def read_run_file(folder: Path, name: str, limit_bytes: int) -> bytes | None:
    """Read a file of the run that has this folder. See `PluginScheduler.read_run_file`."""
    try:
        return read_regular(str(folder / name), limit_bytes, -limit_bytes)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise EngineError(describe_os_error(error, str(folder / name))) from error
