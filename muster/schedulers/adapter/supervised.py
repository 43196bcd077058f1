"""The base class of adapters whose replicas are processes or containers that a supervisor of muster owns.

The adapter submits an app as an `AppSpec`, which names its `ReplicaDriver`. The supervisor starts and ends replicas by
that driver, retries, resizes, and keeps the app's state in its folder. A request to an app goes through the folder, and
through a command where a replica runs. So any shell can do it.
"""

import abc
import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchx.schedulers.api import ListAppResponse
from torchx.specs import AppState

from muster._shared.contract import AskKind
from muster._shared.control import CommandExit, ControlError
from muster._shared.reports import Answer
from muster.schedulers.adapter.scheduler import Leftover, ListedApp, LogRequest, PluginScheduler, measure_folder
from muster.schedulers.errors import EngineError, describe_os_error
from muster.schedulers.lines import Readers
from muster.schedulers.runner import callers
from muster.schedulers.runner.command_line import follow_suspension
from muster.schedulers.supervision import client
from muster.schedulers.supervision.app_folder import AppFolder, AppRecord, AppSpec, ProcessId, StateError
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir
from muster.schedulers.supervision.state import AppPhase, ReplicaState
from muster.schedulers.supervision.state import ReplicaStatus as Status
from muster.schedulers.wording.reasons import Code, Reason, Reasons

if TYPE_CHECKING:
    from muster._shared.reports import Report
    from muster.schedulers.supervision.agent_requests import AskNode
    from muster.schedulers.wording.facts import AppFacts, ExplainedReplica
    from muster.schedulers.wording.reasons import JobFacts

REPLICA_STATES: Final[Mapping[Status, AppState]] = {
    Status.WAITING: AppState.PENDING,
    Status.RUNNING: AppState.RUNNING,
    Status.SUCCEEDED: AppState.SUCCEEDED,
    Status.FAILED: AppState.FAILED,
    Status.LOST: AppState.FAILED,
    Status.CANCELLED: AppState.CANCELLED,
}

_WAIT_LIMIT_S: Final = 60.0
"""The longest delay of an answer, so that no error here can block a caller for good."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AgentReports:
    """What the agents of an app have reported, all roles together."""

    restarts: int = 0
    """Restarts of workers in place. Those of replicas are in the app's record."""
    jobs: "Mapping[str, JobFacts]" = field(default_factory=dict)
    """What is known of an app that runs or is being ended, by role. See `failure_report.RecordReader.job`."""
    trouble: Reasons = ()
    """Why more is not known: no engine answers. Empty: nothing is in the way."""
    error: str | None = None
    """The app's error.json as text, if there is one."""
    reports: "Mapping[str, Report]" = field(default_factory=dict)
    """By role. See `AppFacts.reports`."""


class SupervisedScheduler(PluginScheduler, abc.ABC):
    """A `PluginScheduler` whose apps each have a supervisor on this machine.

    Besides what `PluginScheduler` wants, subclasses define `build_asker`, `read_reports` and `read_log`. They define
    `FLUSH_S` if an end takes longer, and `LEAVES` if an app leaves more than its folder. Their `schedule` calls
    `start_app`. This class asks, stops, resizes, recovers, describes, lists, deletes, and finds what apps have left.
    """

    TELLS_STATUS = True

    FLUSH_S: float = 15.0
    """The longest time, in seconds, that ending an app takes beyond its grace period."""

    LEAVES: str = "logs"
    """What `delete_app` removes of an app that has ended, for people."""

    def __init__(self, backend: str, session_name: str) -> None:
        super().__init__(backend, session_name)
        self._attached: dict[str, AppFolder] = {}
        self._readers = Readers()

    def choose_folder(self, app_id: str, log_dir: str | None = None) -> str:
        """Return the absolute path of an app's future folder.

        Args:
            app_id: of the app.
            log_dir: where the user wants it. None: the user's state folder.
        """
        parent = os.path.expanduser(log_dir) if log_dir else str(find_state_dir(os.environ) / "logs")
        return os.path.abspath(os.path.join(parent, self.session_name or "torchx", app_id))

    def find_registry(self) -> AppRegistry:
        """Return where the folders of this user's apps are found by their ids."""
        return AppRegistry(find_state_dir(os.environ), self.properties.same_apps_as or self.backend)

    @abc.abstractmethod
    def build_asker(self, folder: AppFolder) -> "AskNode":
        """Return what runs a command where a replica of this app runs."""

    @abc.abstractmethod
    def read_reports(self, folder: AppFolder, spec: AppSpec) -> AgentReports:
        """Return what the agents of an app have reported. See `failure_report.RecordReader`."""

    def find_unregistered(self, app_id: str) -> "AppFacts | None":
        """Return what is known of an app that has no folder. None: nothing."""
        del app_id
        return None

    def find_url(self, folder: AppFolder) -> str | None:
        """Return a link for the user to what an app has written. None: there is none."""
        del folder
        return None

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Turn this adapter's own errors into those that TorchX prints as one line."""
        try:
            yield
        except StateError as error:
            raise EngineError(str(error)) from error

    def find_folder(self, app_id: str) -> AppFolder | None:
        """Return the folder of an app, or None if the id is not known (any more).

        Raises:
            UnsafeFolderError: another user could change or replace it.
        """
        return self.find_registry().open(app_id)

    def start_app(
        self,
        spec: AppSpec,
        *,
        detach: bool,
        files: Mapping[str, bytes | Path] | None = None,
        lent_fds: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Make the app's folder, start its supervisor, and wait until it has started all replicas.

        If one step fails, or this process is interrupted, nothing is left of the app.

        Args:
            spec: what to run. Its `owner` is set here.
            detach: whether the app keeps running when this process ends.
            files: the driver's own, by name. See `client.submit`.
            lent_fds: descriptors of this process that the driver inherits, by name. Its `take_lent_fds` says which.

        Raises:
            EngineError: the supervisor could not be started. It is one line.
        """
        owner = None if detach else ProcessId.of(os.getpid())
        try:
            with self.keep_attached(spec.app_id, AppFolder(spec.folder), detach=detach):
                client.submit(replace(spec, owner=owner), self.find_registry(), files, lent_fds)
        except EngineError as error:
            raise EngineError(f"cannot start {spec.app_id}: {error}") from error
        except OSError as error:
            raise EngineError(f"cannot start {spec.app_id}: {describe_os_error(error, spec.folder)}") from error

    @contextlib.contextmanager
    def keep_attached(self, app_id: str, folder: AppFolder, *, detach: bool) -> Iterator[None]:
        """Record the app that this process submits in the block. Unless `detach`, the app ends with this process.

        It is recorded before the submission. Otherwise a Ctrl-C could come at a moment in which no process would end
        the app.
        """
        self._submitted.add(app_id)
        if not detach:
            self._attached[app_id] = folder
        try:
            yield
        except Exception:
            self._submitted.discard(app_id)
            self._attached.pop(app_id, None)  # the folder may become another app's
            raise
        if not detach:
            follow_suspension(self._tell_attached)

    def read_facts(self, app_id: str) -> "AppFacts | None":
        """See `PluginScheduler`."""
        folder = self.find_folder(app_id)
        with self.translate_errors():
            if folder is None:
                return self.find_unregistered(app_id)
            found = read_app_for_wait(folder, keeps=app_id in self._submitted)
            if found is None:
                return None  # another shell has deleted it
            reported, lost = self.read_reports(folder, found[0]), client.find_loss(folder, found[1])
            return build_supervised_facts(*found, reported, lost=lost, ui_url=self.find_url(folder))

    def wait_ended(self, app_id: str, limit_s: float) -> None:
        """See `PluginScheduler`."""
        folder = self.find_folder(app_id)
        with self.translate_errors(), contextlib.suppress(FileNotFoundError):
            if folder is None or folder.read_record() is None:
                super().wait_ended(app_id, limit_s)
            else:
                client.wait_ended(folder, limit_s=limit_s)

    def list_apps(self, cfg: Mapping[str, Any]) -> list[ListAppResponse]:
        """See `PluginScheduler`."""
        del cfg
        return self.list_states(self.read_states())

    def list_states(self, states: Mapping[str, AppState]) -> list[ListedApp]:
        """Return apps with their states as `list_apps` does."""
        registry = self.find_registry()
        return [
            ListedApp(app_id=app_id, state=state, submitted_s=registry.find_added_s(app_id))
            for app_id, state in states.items()
        ]

    def read_states(self) -> dict[str, AppState]:
        """Return the states of all apps with a folder. The state of one that cannot be read is UNKNOWN."""
        registry = self.find_registry()
        states = {app_id: _read_state(registry, app_id) for app_id in registry}
        return {app_id: state for app_id, state in states.items() if state is not None}

    def check_replica_of(self, folder: AppFolder, request: LogRequest) -> None:
        """Refuse a role or a replica that the app does not have.

        Raises:
            SchedulerError: one line that names what it has.
        """
        from muster.schedulers.adapter.status import check_replica

        with self.translate_errors():
            spec = folder.read_spec()
        check_replica(spec.app_id, {role.name: role.replicas for role in spec.roles}, request.role, request.index)

    def ask_app(self, app_id: str, kind: AskKind, limit_s: float) -> Answer:
        """See `PluginScheduler`."""
        from muster.schedulers.supervision import agent_requests

        with self._open_app(app_id) as folder:
            return agent_requests.ask_app(folder, kind, limit_s, self.build_asker(folder))

    def stop_app(self, app_id: str, limit_s: float) -> Answer:
        """See `PluginScheduler`."""
        from muster.schedulers.supervision import agent_requests

        with self._open_app(app_id) as folder:
            return agent_requests.stop_app(folder, limit_s, self.build_asker(folder))

    def recover_app(self, app_id: str) -> Answer:
        """See `PluginScheduler`."""
        from muster.schedulers.supervision import agent_requests

        with self._open_app(app_id) as folder:
            return agent_requests.recover_app(folder)

    def resize_app(self, app_id: str, nodes: int, role: str | None) -> Answer:
        """See `PluginScheduler`."""
        from muster.schedulers.runner.roles import find_elastic_role
        from muster.schedulers.supervision import agent_requests

        with self._open_app(app_id) as folder:
            return agent_requests.resize_app(
                folder, nodes, lambda spec: find_elastic_role(app_id, spec.roles, role, nodes)
            )

    @contextlib.contextmanager
    def _open_app(self, app_id: str) -> Iterator[AppFolder]:
        """Open an app for a request. Another shell may delete it at the same time.

        Raises:
            ControlError: it does not exist (any more), or its supervisor cannot be started again.
        """
        unknown = ControlError(f"{self.backend} knows no app {app_id!r}", CommandExit.UNKNOWN)
        with self.translate_errors():
            folder = self.find_folder(app_id)
            if folder is None:
                raise unknown
            try:
                yield folder
            except FileNotFoundError:
                raise unknown from None
            except (StateError, EngineError) as error:
                raise ControlError(str(error), CommandExit.LOST) from error

    def delete_app(self, app_id: str) -> None:
        """See `PluginScheduler`. Removes the app's logs too."""
        folder = self.find_folder(app_id)
        if folder is None:
            return
        with self.translate_errors():
            client.delete(folder, self.find_registry(), app_id)
        self._attached.pop(app_id, None)

    def find_leftovers(self) -> Iterator[Leftover]:
        """See `PluginScheduler`."""
        registry = self.find_registry()
        for app_id in registry:
            try:
                folder = registry.open(app_id)
                record = None if folder is None else folder.read_record()
            except (OSError, StateError, EngineError) as error:
                logger.warning("%s: %s", app_id, error)
                continue
            if folder is None or record is None or not client.has_ended(record):
                continue
            outcome = record.app.outcome.value.lower() if record.app.outcome is not None else "ended"
            yield Leftover(
                name=f"{self.backend}://{app_id}",
                what=f"{outcome}: {self.LEAVES}",
                size_bytes=measure_folder(folder.path),
                ended_s=record.ended_s,
                remove=functools.partial(self.delete_app, app_id),
            )

    def _cancel_existing(self, app_id: str) -> None:
        folder = self.find_folder(app_id)
        with self.translate_errors():
            if folder is not None:
                client.request_stop(folder)

    def close(self) -> None:
        """End the attached apps that this scheduler started, and wait for their ends. Idempotent.

        TorchX also calls this after Ctrl-C. A second Ctrl-C during the call kills the apps.
        """
        super().close()
        folders = [folder for folder in self._attached.values() if folder.spec_file.exists()]
        self._attached.clear()
        try:
            client.end_all(folders, flush_s=self.FLUSH_S)
        finally:
            if folders:
                self._readers.wait_until_idle()

    def goes_on(self, app_id: str) -> bool:
        """See `PluginScheduler`."""
        return app_id not in self._attached and self.find_folder(app_id) is not None

    def _tell_attached(self, word: str) -> None:
        for folder in self._attached.values():
            folder.send_request(word)


def _read_state(registry: AppRegistry, app_id: str) -> AppState | None:
    """Return the state. None: another shell has just deleted it."""
    try:
        folder = registry.open(app_id)
        if folder is None:
            return None
        _, record = client.read_app(folder)
        return _find_state(record, client.find_loss(folder, record))
    except FileNotFoundError:
        return None
    except (EngineError, StateError) as error:
        logger.warning("%s: %s", app_id, error)
    return AppState.UNKNOWN


def read_app_for_wait(folder: AppFolder, *, keeps: bool) -> tuple[AppSpec, AppRecord | None] | None:
    """Do as `client.read_app`, after the app's end if TorchX's `wait` calls. Return None if it has been deleted.

    On both lines `wait` reads the state, sleeps and reads it again. The interval is 1 s on the command line and 10 s by
    default in Python, and half of it would be lost at the end of every app. All other callers get an answer at once.
    What waits for an app keeps its supervisor running.

    Args:
        folder: the app's.
        keeps: this process submitted the app, and keeps its supervisor running, too.

    Raises:
        EngineError: see `client.revive_app`.
    """
    with contextlib.suppress(FileNotFoundError):
        waits = callers.is_wait()
        spec, record = (client.revive_app if waits or keeps else client.read_app)(folder)
        if waits and record is not None and not client.has_ended(record) and client.runs_here(record):
            client.wait_ended(folder, limit_s=_WAIT_LIMIT_S)
            return client.read_app(folder)
        return spec, record
    return None


def build_supervised_facts(
    spec: AppSpec,
    record: AppRecord | None,
    reported: AgentReports,
    *,
    lost: Reason | None = None,
    ui_url: str | None = None,
) -> "AppFacts":
    """Build what is known of a supervised app.

    Args:
        spec: as submitted.
        record: its current state. None: its supervisor has recorded none yet.
        reported: of its agents.
        lost: see `client.find_loss`.
        ui_url: a link for the user.
    """
    from muster.schedulers.runner.app_codec import load_app
    from muster.schedulers.wording.facts import AppFacts

    is_told = record is not None and lost is None and record.app.phase in (AppPhase.RUNNING, AppPhase.ENDING)
    has_ended = record is not None and record.app.phase is AppPhase.ENDED
    told = () if lost is None else (lost,)
    submitted_s = None if record is None else record.submitted_s or None
    ended_s = None if record is None else record.ended_s
    known = AppFacts(
        app_id=spec.app_id,
        app=load_app(spec.description),
        state=_find_state(record, lost),
        replicas=None if record is None else _list_replicas(record, is_lost=lost is not None),
        restarts=0 if record is None else record.app.num_restarts,
        reasons=() if record is None else (*told, *(reported.trouble if is_told else ()), *_list_reasons(record)),
        ui_url=ui_url,
        submitted_s=submitted_s,
        since_s=None if lost is not None else submitted_s if ended_s is None else ended_s,
    )
    return combine_facts(known, reported, tells_jobs=is_told or has_ended)


def combine_facts(known: "AppFacts", reported: AgentReports, *, tells_jobs: bool) -> "AppFacts":
    """Combine what an adapter knows of an app with what its agents say.

    Args:
        known: without what agents say. The restarts are those of replicas. Those of workers in place are added.
        reported: of its agents.
        tells_jobs: whether the facts include what the agents report of their jobs.
    """
    return replace(
        known,
        restarts=reported.restarts + known.restarts,
        jobs=reported.jobs if tells_jobs else {},
        error=reported.error,
        reports=reported.reports,
    )


def _find_state(record: AppRecord | None, lost: Reason | None) -> AppState:
    if lost is not None:
        return AppState.UNKNOWN
    return AppState.SUBMITTED if record is None else AppState[record.app.app_state]


def _list_reasons(record: AppRecord) -> Reasons:
    failed = tuple(each for reasons in record.app.failed.values() for each in reasons)
    reasons = (*failed, *record.app.reasons)
    is_ending = reasons and record.app.phase is AppPhase.ENDING
    return (Reason(code=Code.ENDING, causes=reasons),) if is_ending else reasons


def count_restarts(known: ReplicaState) -> Reasons:
    """Say how often the policy of its role had a replica started again that goes on, or has succeeded."""
    goes_on = known.status in (Status.WAITING, Status.RUNNING, Status.SUCCEEDED)
    return (Reason(code=Code.RESTARTS, count=known.restarts),) if known.restarts and goes_on else ()


def _list_replicas(record: AppRecord, *, is_lost: bool) -> "list[ExplainedReplica]":
    from muster.schedulers.wording.facts import ExplainedReplica

    def find_state(known: ReplicaState) -> AppState:
        return AppState.UNKNOWN if is_lost and known.status is Status.RUNNING else REPLICA_STATES[known.status]

    hosts = record.find_hosts()
    return [
        ExplainedReplica(
            id=each.index,
            state=find_state(known),
            role=each.role,
            hostname=hosts.get(each, record.machine.host),
            reasons=count_restarts(known),
        )
        for each, known in record.app.replicas.items()
    ]
