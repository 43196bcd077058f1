"""Runs an app's replicas as containers, for the supervisor.

Threads call the engine, because its client blocks. A few carry out starts and signals, and one watcher follows the
engine's events and reports every end. When the engine stops, the watcher waits until it answers again. Containers that
have ended by then were ended by the engine. They are started again, and do not count as lost. What a thread of the pool
could not do is tried again, because an engine that only hung, or failed one request, does not end the watcher's stream
of events. A person may also restart a container (`docker restart`), so an end by the engine's SIGTERM is not reported
before it is clear that the container does not run again. No container of the app outlives the app.
"""

import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from muster._shared import processes
from muster._shared.contract import LogNames
from muster.schedulers.docker.engine import ContainerFacts, Engine
from muster.schedulers.docker.running_apps import exit_evidence, reservations
from muster.schedulers.docker.running_apps.creation import Creator, read_payload, remove_app, remove_payload
from muster.schedulers.docker.sdk import DockerError, EngineUnavailable, NotFound
from muster.schedulers.docker.spec import AppRequest, ContainerRequest, Label
from muster.schedulers.failure_report import explain_start_failure
from muster.schedulers.supervision.app_folder import AppFolder, AppSpec
from muster.schedulers.supervision.decisions import ReplicaEnded
from muster.schedulers.supervision.driver import EventQueue, Handle
from muster.schedulers.supervision.state import ReplicaId
from muster.schedulers.wording.reasons import Code, Reason

_LOOK_S: Final = 0.2
RESTART_S: Final = 5.0
"""How long after `docker restart` has stopped a container it starts it at the latest. It takes about 0.4 s."""

STOP_S: Final = 1.0
"""How long after a container's end the engine tells at the latest that it has stopped it. A busy one takes 0.1 s."""


class OutsideStops:
    """What the engine's events say of `docker stop` and `docker restart`: both stop a container, one starts it again.

    The supervisor only sends signals, so "stop" never comes from it. It starts no container a second time. An engine
    that is about to stop does not announce it, but sends SIGTERM to all containers first.

    Args:
        engine: the one whose events are recorded.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.signalled: set[str] = set()
        """Containers, of the app or not, that got SIGTERM through the engine: of a person, or an engine that stops."""
        self._lock = threading.Lock()
        self._ended: set[str] = set()
        self._stopped_s: dict[str, float] = {}
        """Container -> when it was stopped, on the monotonic clock. Those that were started again are left out."""
        self._is_app_signalled = False

    def record_signal(self, container: str, signum: str | None, *, is_ours: bool) -> None:
        """Record that a container got a signal through the engine.

        Args:
            container: of the app or not.
            signum: the signal's number, as text.
            is_ours: whether others have sent it to a container of the app.
        """
        if signum == str(int(signal.SIGTERM)):
            self.signalled.add(container)
            self._is_app_signalled |= is_ours

    def is_engine_stopping(self) -> bool:
        """Return whether containers still run and the engine is ending all of them."""
        running = self._engine.list_container_ids({}, running_only=True)
        return bool(running) and self.signalled.issuperset(running)

    def wait_over(self) -> None:
        """Wait until no container may be about to start again."""
        if self._is_app_signalled:
            time.sleep(STOP_S)  # of what has ended just now it is told later that it was stopped
        while any(map(self.may_restart, tuple(self._stopped_s))):
            time.sleep(_LOOK_S)

    def record(self, action: str, container: str) -> bool:
        """Record an event of one of the app's containers. Return whether it was started again."""
        with self._lock:
            if action == "die":
                self._ended.add(container)
            elif action == "stop":
                self._stopped_s[container] = time.monotonic()
            elif action == "start" and container in self._ended:
                self._ended.discard(container)
                self.signalled.discard(container)
                self._stopped_s.pop(container, None)
                return True
        return False

    def may_restart(self, container: str) -> bool:
        """Return whether a container was stopped a moment ago, so that it may be about to start again."""
        with self._lock:
            return time.monotonic() < self._stopped_s.get(container, -RESTART_S) + RESTART_S


ENGINE_KEY: Final = "engine"
"""In an app's description: the address of its engine."""

RECONNECT_S: Final = 0.5
"""Between two attempts to reach an engine that stopped."""

SETTLE_S: Final = 3.0
"""How long an engine that shuts down may answer after its last container has ended."""

END_S: Final = 30.0
"""How long a killed container may need until the engine has recorded its end."""

_WORKERS: Final = 8
_ACTIONS: Final = ("kill", "die", "stop", "start", "destroy")
_PREEMPTED: Final = 143
_KILL: Final = "SIGKILL"
_INTERRUPT: Final = "SIGINT"


@dataclass
class _Replica:
    """The driver's state of one replica. Guarded by the driver's lock."""

    request: ContainerRequest
    container: str | None = None
    """Id of its newest container. None: there is none yet."""
    starting: bool = False
    asked: str = ""
    """The signal by which it is to end, the strongest since its start. "": none."""
    sent: str = ""
    """The signal that the engine has sent to its container."""
    is_out_of_step: bool = False
    """It could not be suspended or continued."""
    failed: bool | None = None
    """A call for it has failed: it must be looked at again. True: the engine was unavailable, and may have ended it."""
    end_reported: bool = True
    """False from start or adoption until its end is posted."""
    suspension: threading.Lock = field(default_factory=threading.Lock)
    """Held while the container is suspended or continued: the newest request is carried out last."""


class DockerDriver:
    """A `ReplicaDriver` whose replicas are containers.

    Args:
        engine: runs the containers. The caller closes it.
        app: the submitted request.
        folder: of the app's state, with its payload. It gets the first agent's error file.
        event_queue: gets the ends.
    """

    def __init__(self, engine: Engine, app: AppRequest, folder: Path, event_queue: EventQueue) -> None:
        self._engine = engine
        self._app = app
        self._event_queue = event_queue
        self._creator = Creator(engine, app, read_payload(folder, app))
        self._folder = folder
        self._lock = threading.RLock()
        self._replicas = {ReplicaId(c.role, c.replica): _Replica(request=c) for c in app.containers}
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="docker")
        self._closing = threading.Event()
        self._has_failed = threading.Event()
        """A replica is `failed`, or the driver is closing."""
        self._is_suspended = False
        self._outside_stops = OutsideStops(engine)
        self._watcher: threading.Thread | None = None
        self._printed: set[str] = set()

    # -- called by the supervisor, in its own thread ------------------------------------------------------------------

    def start(self, replica: ReplicaId, start_number: int) -> Handle:
        """See `ReplicaDriver`. Returns at once: a container that cannot be started is reported as a final end."""
        known = self._replicas[replica]
        with self._lock:
            known.end_reported, known.starting, known.container = False, True, None
            known.asked, known.sent, known.is_out_of_step = "", "", False
        self._submit(self._start, replica)
        self._ensure_watcher()
        return {"start": start_number}

    def adopt(self, replica: ReplicaId, handle: Handle) -> bool:  # noqa: ARG002  # labels say more than the handle
        """See `ReplicaDriver`. Adopts the newest container with the replica's labels.

        While the engine does not answer, or answers with an error, the container may still exist: then this returns
        True, and the pool looks for it until the engine answers.
        """
        known = self._replicas[replica]
        try:
            newest = next(reversed(self._list_containers(replica)), None)
        except DockerError:
            newest = None
        else:
            if newest is None:
                return False
        with self._lock:
            known.end_reported = False
            if newest is not None and newest.status != "created":
                known.container = newest.id
        self._ensure_watcher()
        # A running watcher gets no past events.
        self._submit(self._catch_up_one, replica, False)
        return True

    def stop(self, replica: ReplicaId, *, is_interrupt: bool = False) -> None:
        """See `ReplicaDriver`."""
        has_agent = self._replicas[replica].request.runs_agent
        self._submit(self._signal, replica, _INTERRUPT if is_interrupt and has_agent else "SIGTERM")

    def suspend(self, *, suspended: bool) -> None:
        """See `ReplicaDriver`. All nodes are on one engine, so the job's leases can stand still, too."""
        self._is_suspended = suspended
        for replica in self._replicas:
            self._submit(self._follow_suspension, replica)

    def kill(self, replica: ReplicaId) -> None:
        """See `ReplicaDriver`."""
        self._submit(self._signal, replica, _KILL)

    def close(self, *, succeeded: bool) -> None:
        """See `ReplicaDriver`: removes containers by the `keep` option, all else in any case."""
        self._outside_stops.wait_over()
        self._closing.set()
        self._has_failed.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        with suppress(OSError):  # a disk now read-only; no container is on it
            remove_payload(self._folder, self._app)
        removes = self._app.keep == "none" or (self._app.keep == "failed" and succeeded)
        try:
            reservations.release_reservations(self._engine, self._app.labels)
            for container in self._engine.list_container_ids(self._app.labels, running_only=True):
                self._end_container(container)
            if removes:
                remove_app(self._engine, self._app.labels)
            elif self._app.owns_network:
                self._engine.remove_network(self._app.network)
        except DockerError as error:
            processes.write_stderr(f"not removed, use muster delete: {error}\n")  # the supervisor's log

    # -- carried out by the pool --------------------------------------------------------------------------------------

    def _submit(self, call: Callable[..., None], replica: ReplicaId, *args: object) -> None:
        with suppress(RuntimeError):  # the pool has just been shut down
            if not self._closing.is_set():
                done = self._pool.submit(call, replica, *args)
                done.add_done_callback(
                    lambda _: self._handle_failure(replica, None if done.cancelled() else done.exception())
                )

    def _handle_failure(self, replica: ReplicaId, error: BaseException | None) -> None:
        """Look at a replica again after a call in the pool has failed: else its end might never be reported."""
        if error is None:
            return
        was_away = isinstance(error, EngineUnavailable)
        if not was_away:
            self._print_once(error)
        known = self._replicas[replica]
        with self._lock:
            known.failed = known.failed or was_away
        self._has_failed.set()

    def _print_once(self, error: BaseException) -> None:
        """Print an error to the supervisor's log, unless it was printed before: each attempt may raise it again."""
        if repr(error) in self._printed:
            return
        self._printed.add(repr(error))
        if isinstance(error, DockerError):  # only this request failed
            processes.write_stderr(f"retrying: {error}\n")
        else:
            traceback.print_exception(error)

    def _retry_failed(self) -> None:
        """Look again and again at replicas for which a call has failed, until that succeeds."""
        while self._has_failed.wait() and not self._closing.wait(RECONNECT_S):
            self._has_failed.clear()
            for replica, known in self._replicas.items():
                with self._lock:
                    was_away, known.failed = known.failed, None
                if was_away is not None:
                    self._look(replica, was_away)

    def _start(self, replica: ReplicaId) -> None:
        known = self._replicas[replica]
        if known.asked:
            self._report_end(replica, known.container, _PREEMPTED, Reason(code=Code.STOPPED_BEFORE_START))
            return
        container = None
        try:
            container = self._find_or_create(replica)
            with self._lock:
                known.container = container
            self._engine.start_container(container)
        except EngineUnavailable:
            # Started when an engine answers again.
            with self._lock:
                known.container, known.starting = None, False
            raise
        except Exception as error:  # noqa: BLE001  # also of the payload's files, and a bug: the end must be reported
            if not isinstance(error, DockerError):
                traceback.print_exception(error)
            self._report_start_failure(replica, container, error)
            return
        with self._lock:
            known.starting = False
            asked = known.asked
        if asked:
            self._signal(replica, asked)
        elif self._is_suspended:
            self._follow_suspension(replica)
        self._check_end(replica)  # the watcher ignored ends until now

    def _find_or_create(self, replica: ReplicaId) -> str:
        """Return a container of the replica to start: that of the submission, or a new one in its place."""
        found = self._list_containers(replica)
        for facts in found:
            if facts.running:  # a person has restarted it
                self._end_container(facts.id)
        newest = next(reversed(found), None)
        if newest is not None and newest.status == "created" and not newest.error:
            return newest.id
        request = self._replicas[replica].request
        if newest is None:
            return self._creator.create(request, 0)
        checkpoint = exit_evidence.read_checkpoint(self._engine, request, newest.id)
        others = self._engine.list_container_ids({**self._app.labels, Label.ROLE: replica.role}, running_only=True)
        return self._creator.create(request, newest.incarnation + 1, checkpoint, is_alone=not others)

    def _end_container(self, container: str) -> None:
        """Kill a container and wait for its end: of two that run for one replica, the second agent is refused."""
        self._engine.signal_container(container, _KILL)
        with suppress(NotFound):
            self._engine.wait_container(container, END_S)

    def _report_start_failure(self, replica: ReplicaId, container: str | None, error: Exception) -> None:
        request = self._replicas[replica].request
        reason = explain_start_failure(error, request.image, request.command[0], runs_agent=request.runs_agent)
        if container is not None:
            with suppress(DockerError):  # report the end in any case; delete removes it
                self._engine.remove_container(container)
        self._report_end(replica, container, exit_evidence.COMMAND_NOT_FOUND, reason, final=True)

    def _signal(self, replica: ReplicaId, name: str) -> None:
        known = self._replicas[replica]
        with self._lock:
            known.asked = known.asked if known.asked == _KILL else name
            container = known.container
            if known.end_reported or known.starting or container is None:
                return  # `asked` is sent when it has started
        with known.suspension:  # a suspension that comes later is not carried out
            if known.sent == known.asked:
                return
            try:
                self._engine.signal_container(container, known.asked)
                if self._is_suspended and known.request.runs_agent:
                    # A suspended guard must continue first.
                    self._engine.signal_container(container, "SIGCONT")
            except DockerError:
                if known.asked == _INTERRUPT:  # a second one kills
                    known.asked = "SIGTERM"
                raise
            known.sent = known.asked

    def _follow_suspension(self, replica: ReplicaId) -> None:
        """Suspend or continue a container, whichever was asked for last.

        An agent's guard does it, and accounts for the time. A frozen guard could not. Other commands know no limits.
        """
        known = self._replicas[replica]
        with known.suspension:
            container, suspended = known.container, self._is_suspended
            if container is None or known.starting or known.asked or known.end_reported:
                return
            known.is_out_of_step = True
            if known.request.runs_agent:
                self._engine.signal_container(container, "SIGTSTP" if suspended else "SIGCONT")
            else:
                self._engine.suspend_container(container, suspended=suspended)
            known.is_out_of_step = False

    # -- watching -----------------------------------------------------------------------------------------------------

    def _ensure_watcher(self) -> None:
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="docker-watch", daemon=True)
            self._watcher.start()
            threading.Thread(target=self._retry_failed, name="docker-retry", daemon=True).start()

    def _watch(self) -> None:
        """Follow the engine's events. When it stops, wait until it answers again and check all replicas."""
        was_away = False
        while not self._closing.is_set():
            try:
                since_s = self._engine.now_s()
                for replica in self._replicas:
                    self._look(replica, was_away)
                was_away = False
                for event in self._engine.events(_ACTIONS, since_s=since_s):
                    self._handle_event(event)
                was_away = True  # an engine that stops closes the stream
            except EngineUnavailable:
                was_away = True
            except Exception as error:  # noqa: BLE001  # also a bug: without a watcher the app would never end
                self._print_once(error)
            self._closing.wait(RECONNECT_S)

    def _handle_event(self, event: dict[str, Any]) -> None:
        """Handle an event of a container of the engine, ours or not."""
        container, attributes, action = event["Actor"]["ID"], event["Actor"]["Attributes"], event["Action"]
        replica = self._find_replica(attributes)
        if action == "kill":
            is_ours = replica is not None and not self._replicas[replica].asked
            self._outside_stops.record_signal(container, attributes.get("signal"), is_ours=is_ours)
            return
        if replica is None:
            return
        known = self._replicas[replica]
        if self._outside_stops.record(action, container):
            self._submit(self._follow_restart, replica, container)
        elif action in ("die", "destroy") and known.container == container and not known.starting:
            code = attributes.get("exitCode")
            self._check_end(replica, exit_code=None if code is None else int(code))

    def _find_replica(self, labels: Mapping[str, str]) -> ReplicaId | None:
        """Return the replica whose container has these labels. None: it is none of this app's."""
        if any(labels.get(name) != value for name, value in self._app.labels.items()) or Label.REPLICA not in labels:
            return None
        replica = ReplicaId(labels[Label.ROLE], int(labels[Label.REPLICA]))
        return replica if replica in self._replicas else None

    def _follow_restart(self, replica: ReplicaId, container: str) -> None:
        """Handle a container that a person has started again."""
        known = self._replicas[replica]
        with self._lock:
            is_current = known.container == container and not known.end_reported
        if not is_current:
            self._engine.signal_container(container, _KILL)
        elif known.asked:
            known.sent = ""
            self._signal(replica, known.asked)
        elif known.request.runs_agent:
            # It would start as if for the first time, in a round of its own.
            self._restart(replica, container)

    def _wait_settled(self, replica: ReplicaId, container: str, by_engine: bool) -> None:
        """Find out whether a container that ended by the engine's SIGTERM runs again.

        An engine that stops does not announce that and answers until its last container has ended. If it stops, the
        watcher starts the replica again when it is back. A person may restart the container. Else the replica was lost.
        """
        known = self._replicas[replica]
        while not self._closing.wait(SETTLE_S):
            if known.end_reported or known.container != container:
                return
            is_stopping = by_engine and self._outside_stops.is_engine_stopping()
            if not is_stopping and not self._outside_stops.may_restart(container):
                self._check_end(replica, settled=True)
                return

    def _look(self, replica: ReplicaId, was_away: bool) -> None:
        """Look at a replica, and if that fails again later."""
        try:
            self._catch_up_one(replica, was_away)
        except Exception as error:  # noqa: BLE001  # also a bug: the replica's end must be reported
            with self._lock:
                self._replicas[replica].failed = was_away
            self._handle_failure(replica, error)

    def _catch_up_one(self, replica: ReplicaId, was_away: bool) -> None:
        known = self._replicas[replica]
        with self._lock:
            if known.end_reported or known.starting:
                return
            missing = known.container is None
            known.starting = missing
        if missing:
            self._submit(self._resume, replica)
            return
        if known.asked != known.sent:
            self._signal(replica, known.asked)
        if known.is_out_of_step:
            self._follow_suspension(replica)
        self._check_end(replica, was_away=was_away)

    def _resume(self, replica: ReplicaId) -> None:
        """Start a replica whose start or adoption the engine's stop interrupted, unless its container runs."""
        known = self._replicas[replica]
        try:
            newest = next(reversed(self._list_containers(replica)), None)
        except Exception:
            with self._lock:
                known.starting = False
            raise
        if newest is None or newest.status == "created" or not newest.running:
            self._start(replica)
            return
        with self._lock:
            known.container, known.starting = newest.id, False
        if known.asked:
            self._signal(replica, known.asked)
        self._check_end(replica)

    def _check_end(
        self, replica: ReplicaId, *, was_away: bool = False, settled: bool = False, exit_code: int | None = None
    ) -> None:
        """Check whether a replica's container has ended, and report it.

        Args:
            replica: the one to check.
            was_away: the engine was unavailable and may have ended the container.
            settled: the engine is not about to stop, nor to start the container again.
            exit_code: from an event. It is used if the container is gone by now.
        """
        known = self._replicas[replica]
        container = known.container
        if container is None or known.end_reported:
            return
        try:
            facts = self._engine.inspect_container(container)
        except NotFound:
            self._report_end(replica, container, exit_code, Reason(code=Code.CONTAINER_REMOVED))
            return
        if facts.exit_code is None:
            return
        by_engine = exit_evidence.ended_by_engine(facts, runs_agent=known.request.runs_agent)
        if was_away and by_engine and not known.asked:
            self._restart(replica, container)
            return
        if not settled and not known.asked and container in self._outside_stops.signalled:
            self._submit(self._wait_settled, replica, container, by_engine)
            return
        exit_evidence.record_restarts(self._engine, self._folder, known.request, container)
        error_file = self._folder / LogNames.ERROR
        reasons, final = exit_evidence.explain_end(
            self._engine, facts, known.request, error_file, has_init=self._app.init
        )
        self._report_end(replica, container, facts.exit_code, *reasons, final=final)

    def _restart(self, replica: ReplicaId, container: str) -> None:
        """Start a replica again that the engine or a person ended. This does not count as a lost replica."""
        known = self._replicas[replica]
        with self._lock:
            if known.end_reported or known.container != container:
                return
            known.container, known.starting = None, True
        self._submit(self._start, replica)

    def _report_end(
        self, replica: ReplicaId, container: str | None, exit_code: int | None, *reasons: Reason, final: bool = False
    ) -> None:
        known = self._replicas[replica]
        with self._lock:
            if known.end_reported or known.container != container:
                return
            known.end_reported, known.starting = True, False
        self._event_queue.post(ReplicaEnded(replica=replica, exit_code=exit_code, reasons=reasons, final=final))

    def _list_containers(self, replica: ReplicaId) -> list[ContainerFacts]:
        """Return all containers of a replica, the newest last."""
        labels = {**self._app.labels, Label.ROLE: replica.role, Label.REPLICA: str(replica.index)}
        return self._engine.list_containers(labels)


def create_driver(*, spec: AppSpec, event_queue: EventQueue) -> DockerDriver:
    """Return the factory that an app's spec names, a `driver.DriverFactory`."""
    app = AppRequest.from_json(spec.details["request"])
    return DockerDriver(Engine(spec.description[ENGINE_KEY]), app, AppFolder(spec.folder).state_dir, event_queue)
