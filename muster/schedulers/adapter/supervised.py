"""The base class of adapters whose replicas are processes or containers that a supervisor of muster owns.

The adapter submits an app as an `AppSpec`, which names its `ReplicaDriver`. The supervisor starts and ends replicas by
that driver, retries, resizes, and keeps the app's state in its folder; what is asked of an app goes through the folder,
and through a command where a replica runs. So any shell can do it.
"""

import abc
import contextlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse
from torchx.specs import AppState
from torchx.specs.api import ReplicaStatus

from muster._shared.contract import AskKind
from muster._shared.reports import Answer
from muster.schedulers.adapter.scheduler import LogRequest, PluginScheduler
from muster.schedulers.adapter.status import AppFacts, build_status, check_replica
from muster.schedulers.errors import EngineError, UnsafeFolderError
from muster.schedulers.lines import Readers
from muster.schedulers.runner.app_codec import load_app
from muster.schedulers.runner.roles import find_elastic_role
from muster.schedulers.runner.waiting import follow_suspension, read_app_for_wait
from muster.schedulers.supervision import asking, client
from muster.schedulers.supervision.app_folder import AppFolder, AppRecord, AppSpec, StateError
from muster.schedulers.supervision.registry import AppRegistry
from muster.schedulers.supervision.state import AppPhase, ReplicaState
from muster.schedulers.supervision.state import ReplicaStatus as Status

_REPLICA_STATES: Final[Mapping[Status, AppState]] = {
    Status.WAITING: AppState.PENDING,
    Status.RUNNING: AppState.RUNNING,
    Status.SUCCEEDED: AppState.SUCCEEDED,
    Status.FAILED: AppState.FAILED,
    Status.LOST: AppState.FAILED,
    Status.CANCELLED: AppState.CANCELLED,
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AgentWords:
    """What the agents of an app have told, all roles together."""

    restarts: int = 0
    """Of workers, in place; those of replicas are in the app's record."""
    running: str = ""
    """What is known of an app that runs or is being ended: a hang with which it goes on, how far it is, that no engine
    answers; "": nothing."""
    error: str | None = None
    """The app's error.json as text, when there is one."""


class SupervisedScheduler(PluginScheduler, abc.ABC):
    """A `PluginScheduler` whose apps each have a supervisor on this machine.

    Besides what `PluginScheduler` wants, subclasses define `find_registry`, `build_asker` and `read_words`, and
    `FLUSH_S` where an end takes longer. They call `keep_attached` for an app that has been submitted. What is here
    asks, stops, resizes, recovers, describes, lists and deletes.
    """

    FLUSH_S: float = 15.0
    """The longest time, in seconds, that ending an app takes beyond its grace period."""

    def __init__(self, backend: str, session_name: str) -> None:
        super().__init__(backend, session_name)
        self._attached: dict[str, AppFolder] = {}
        self._readers = Readers()

    @abc.abstractmethod
    def find_registry(self) -> AppRegistry:
        """Return where the folders of this user's apps are found by their ids."""

    @abc.abstractmethod
    def build_asker(self, folder: AppFolder) -> asking.AskNode:
        """Return what runs a command where a replica of this app runs."""

    @abc.abstractmethod
    def read_words(self, folder: AppFolder, spec: AppSpec) -> AgentWords:
        """Return what the agents of an app have told; see `records.RecordReader`."""

    def describe_unregistered(self, app_id: str) -> DescribeAppResponse | None:
        """Return what is known of an app that has no folder; None: nothing."""
        del app_id
        return None

    def find_url(self, folder: AppFolder) -> str | None:
        """Return a link for the user to what an app has written; None: there is none."""
        del folder
        return None

    def translate_errors(self) -> AbstractContextManager[None]:
        """Return a context in which this adapter's own errors become those that TorchX prints as one line."""
        return translate_errors()

    def find_folder(self, app_id: str) -> AppFolder | None:
        """Return the folder of an app; None if the id is not known (any more).

        Raises:
            UnsafeFolderError: another user could change or replace it.
        """
        return self.find_registry().open(app_id)

    def keep_attached(self, app_id: str, folder: AppFolder, *, detach: bool) -> None:
        """Record an app that this process has submitted; unless `detach`, it ends with this process."""
        self._submitted.add(app_id)
        if not detach:
            self._attached[app_id] = folder
            follow_suspension(self._tell_attached)

    def describe_app(self, app_id: str) -> DescribeAppResponse | None:
        """See `PluginScheduler`."""
        folder = self.find_folder(app_id)
        with self.translate_errors():
            if folder is None:
                return self.describe_unregistered(app_id)
            found = read_app_for_wait(folder, keeps=app_id in self._submitted)
            if found is None:
                return None  # another shell has just deleted it
            words, lost = self.read_words(folder, found[0]), client.find_loss(folder, found[1])
            return build_supervised_status(*found, words, lost=lost, ui_url=self.find_url(folder))

    def list_apps(self, cfg: Mapping[str, Any]) -> list[ListAppResponse]:
        """See `PluginScheduler`."""
        del cfg
        return [ListAppResponse(app_id=app_id, state=state) for app_id, state in self.read_states().items()]

    def read_states(self) -> dict[str, AppState]:
        """Return the states of all apps with a folder; UNKNOWN of one that cannot be read."""
        states = {app_id: self._read_state(app_id) for app_id in self.find_registry()}
        return {app_id: state for app_id, state in states.items() if state is not None}

    def _read_state(self, app_id: str) -> AppState | None:
        """None: another shell has just deleted it."""
        try:
            folder = self.find_folder(app_id)
            if folder is None:
                return None
            _, record = client.read_app(folder)
            return _find_state(record, client.find_loss(folder, record))
        except FileNotFoundError:
            return None
        except UnsafeFolderError as error:
            logger.warning("%s: %s", app_id, error)
        except (StateError, client.SupervisorError) as error:
            logger.info("%s: %s", app_id, error)
        return AppState.UNKNOWN

    def check_replica_of(self, folder: AppFolder, request: LogRequest) -> None:
        """Refuse a role or a replica that the app does not have.

        Raises:
            SchedulerError: one line that names what it has.
        """
        with self.translate_errors():
            spec = folder.read_spec()
        check_replica(spec.app_id, {role.name: role.replicas for role in spec.roles}, request.role, request.index)

    def ask_app(self, app_id: str, kind: AskKind, limit_s: float) -> Answer:
        """See `PluginScheduler`."""
        with self._open_app(app_id) as folder:
            return asking.ask_app(folder, kind, limit_s, self.build_asker(folder))

    def stop_app(self, app_id: str, limit_s: float) -> Answer:
        """See `PluginScheduler`."""
        with self._open_app(app_id) as folder:
            return asking.stop_app(folder, limit_s, self.build_asker(folder))

    def recover_app(self, app_id: str) -> Answer:
        """See `PluginScheduler`."""
        with self._open_app(app_id) as folder:
            return asking.recover_app(folder)

    def resize_app(self, app_id: str, nodes: int, role: str | None) -> Answer:
        """See `PluginScheduler`."""
        with self._open_app(app_id) as folder:
            return asking.resize_app(folder, nodes, lambda spec: find_elastic_role(app_id, spec.roles, role, nodes))

    @contextlib.contextmanager
    def _open_app(self, app_id: str) -> Iterator[AppFolder]:
        with self.translate_errors(), asking.open_app(self.find_folder(app_id), app_id, self.backend) as folder:
            yield folder

    def delete_app(self, app_id: str) -> None:
        """See `PluginScheduler`. Removes the app's logs too."""
        folder = self.find_folder(app_id)
        if folder is None:
            return
        with self.translate_errors():
            client.delete(folder, self.find_registry(), app_id)
        self._attached.pop(app_id, None)

    def _cancel_existing(self, app_id: str) -> None:
        folder = self.find_folder(app_id)
        with self.translate_errors():
            if folder is not None:
                client.request_stop(folder)

    def close(self) -> None:
        """End the attached apps that this scheduler started, and wait for their ends. Idempotent.

        TorchX also calls this after Ctrl-C; a second Ctrl-C during the call kills the apps.
        """
        super().close()
        folders = [folder for folder in self._attached.values() if folder.spec_file.exists()]
        self._attached.clear()
        try:
            client.end_all(folders, flush_s=self.FLUSH_S)
        finally:
            if folders:
                self._readers.wait_until_idle()

    def _tell_attached(self, word: str) -> None:
        for folder in self._attached.values():
            folder.send_request(word)


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Turn the errors of state files and supervisors into an `EngineError`."""
    try:
        yield
    except (StateError, client.SupervisorError) as error:
        raise EngineError(str(error)) from error


def build_supervised_status(
    spec: AppSpec,
    record: AppRecord | None,
    words: AgentWords,
    *,
    lost: str = "",
    ui_url: str | None = None,
) -> DescribeAppResponse:
    """Build what `torchx status` and `describe` show of a supervised app.

    Args:
        spec: as submitted.
        record: its current state; None: its supervisor has recorded none yet.
        words: of its agents.
        lost: `client.describe_loss` of an app whose supervisor has died; "": it runs, or has ended.
        ui_url: a link for the user.
    """
    facts = AppFacts(
        app_id=spec.app_id,
        app=load_app(spec.description),
        state=_find_state(record, lost),
        replicas=None if record is None else _list_replicas(record, is_lost=bool(lost)),
        restarts=words.restarts + (0 if record is None else record.app.num_restarts),
        messages=_list_messages(record, words.running, lost),
        error=words.error,
        ui_url=ui_url,
    )
    return build_status(facts)


def _find_state(record: AppRecord | None, lost: str) -> AppState:
    if lost:
        return AppState.UNKNOWN
    return AppState.SUBMITTED if record is None else AppState[record.app.app_state]


def _list_messages(record: AppRecord | None, running: str, lost: str) -> tuple[str, ...]:
    if record is None:
        return ()
    told = running if record.app.phase in (AppPhase.RUNNING, AppPhase.ENDING) else ""
    return lost or told, record.app.reason


def _list_replicas(record: AppRecord, *, is_lost: bool) -> list[ReplicaStatus]:
    def find_state(known: ReplicaState) -> AppState:
        return AppState.UNKNOWN if is_lost and known.status is Status.RUNNING else _REPLICA_STATES[known.status]

    return [
        ReplicaStatus(id=each.index, state=find_state(known), role=each.role, hostname=record.machine.host)
        for each, known in record.app.replicas.items()
    ]
