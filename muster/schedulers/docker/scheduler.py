"""TorchX's scheduler interface for `local_docker` and `docker`."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from torchx.schedulers.api import ListAppResponse
from torchx.specs import AppDef, AppDryRunInfo, Role
from torchx.workspace.api import WorkspaceMixin

from muster._shared.contract import LogNames, print_line
from muster._shared.control import NO_AGENT, CommandExit, ControlError, call_limited
from muster.schedulers import naming
from muster.schedulers.adapter.scheduler import Leftover, LogRequest
from muster.schedulers.adapter.status import check_replica
from muster.schedulers.adapter.supervised import AgentReports, SupervisedScheduler
from muster.schedulers.agent_command import build_ask_command
from muster.schedulers.bundle import build_agent_bundle
from muster.schedulers.docker import sdk
from muster.schedulers.docker.driver import ENGINE_KEY
from muster.schedulers.docker.engine import Engine
from muster.schedulers.docker.options import DockerOptions
from muster.schedulers.docker.request import WORKSPACE_KEY, RequestBuilder
from muster.schedulers.docker.running_apps import creation, exit_evidence, orphaned_apps, reservations
from muster.schedulers.docker.running_apps.image_check import check_images
from muster.schedulers.docker.running_apps.logs import LogReader
from muster.schedulers.docker.spec import AppRequest, Label, build_user_id
from muster.schedulers.errors import EngineError, NotConfiguredError, SchedulerError, describe_os_error
from muster.schedulers.failure_report import read_error_file
from muster.schedulers.gpus import GpuError, list_gpus
from muster.schedulers.grace import DEFAULT_SHUTDOWN_TIMEOUT_S, GRACE_MARGIN_S
from muster.schedulers.interrupts import raise_dropped_interrupts
from muster.schedulers.node_program.pipe import NodePipe
from muster.schedulers.runner.app_codec import dump_app
from muster.schedulers.runner.live_lines import draws_bars
from muster.schedulers.runner.option_records import parse_options
from muster.schedulers.runner.roles import (
    build_role_plan,
    describe_unsent_scripts,
    describe_workspace,
    get_workspace_path,
    share_workspace,
)
from muster.schedulers.supervision import agent_requests, client
from muster.schedulers.supervision.app_folder import AppFolder, AppSpec, ProcessId, StateError
from muster.schedulers.supervision.file_watch import Watch
from muster.schedulers.supervision.registry import find_state_dir
from muster.schedulers.supervision.state import ReplicaId
from muster.schedulers.wording.facts import AppFacts
from muster.schedulers.wording.reasons import Code, Reason, has_code
from muster.schedulers.wording.words import word_all
from muster.schedulers.workspace.packing import DOCKERFILE, BundleError

_DRIVER: Final = "muster.schedulers.docker.driver:create_driver"
_LOCAL_IMAGES: Final = "muster-workspace"
"""Repository of the images that are built from a `Dockerfile.torchx` without the option image_repo."""

_ROLE_AND_INDEX: Final = 30
"""Characters that names of containers and networks need after the app's name."""

_NOT_STARTED: Final = frozenset({"created", "removing", "dead"})
"""States of a container that has yet to start, and of one that could not start and is being removed."""

_CHECK_S: Final = 0.1
"""Between two looks at an app that starts."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """The result of a dry run, which `schedule` carries out."""

    request: AppRequest
    spec: AppSpec
    """Without the process that owns it, and without the request as it is carried out."""
    quiet: bool
    detach: bool


class DockerScheduler(SupervisedScheduler, WorkspaceMixin[None]):  # type: ignore[misc]
    """Runs apps on the Docker engine that DOCKER_HOST names.

    Args:
        name: "local_docker" or "docker".
        session_name: TorchX's.
    """

    option_record = DockerOptions

    FLUSH_S = 30.0
    LEAVES = "logs and containers"
    """The engine removes the app's objects."""

    def __init__(self, name: str, session_name: str) -> None:
        super().__init__(name, session_name)
        self._engine = Engine(os.environ)
        self._others: dict[str, Engine] = {}
        """Engines of apps that another DOCKER_HOST has started, by address."""
        self._workspaces = creation.PackedWorkspaces()
        self._with_dockerfile: set[str] = set()

    def close(self) -> None:
        """See `SupervisedScheduler`, and release the engine, too."""
        try:
            super().close()
        finally:
            for engine in (self._engine, *self._others.values()):
                engine.close()
            self._workspaces.remove()

    # -- submitting ---------------------------------------------------------------------------------------------------

    def build_workspace_and_update_role(self, role: Role, workspace: str, cfg: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Pack the workspace. The submission copies it into the containers or builds it into an image."""
        path = get_workspace_path(workspace)
        with self.translate_errors():
            key = self._workspaces.pack(path, find_state_dir(os.environ))
        role.metadata[WORKSPACE_KEY] = key
        if os.path.exists(os.path.join(path, DOCKERFILE)):
            self._with_dockerfile.add(key)
        self.print_once(*describe_workspace(role, path, has_image=True))

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo:
        options = parse_options(DockerOptions, self._run_opts(), cfg)
        app = share_workspace(app, WORKSPACE_KEY)
        self.print_once(*describe_unsent_scripts(app, WORKSPACE_KEY))
        builds = any(role.metadata.get(WORKSPACE_KEY) in self._with_dockerfile for role in app.roles)
        if builds and options.image_repo is None:
            options = replace(options, image_repo=_LOCAL_IMAGES)
        builder = RequestBuilder(
            app=app,
            options=options,
            name=naming.build_app_name(app.name, naming.make_suffix(), reserve=_ROLE_AND_INDEX),
            token=naming.make_secret(),
            user=build_user_id(),
            state_dir=str(find_state_dir(os.environ)),
            adapter=self.backend,
            environ=os.environ,
            draws_bars=not options.detach and draws_bars(os.environ),
        )
        request = builder.build()
        spec = AppSpec(
            app_id=request.app_id,
            scheduler=self.backend,
            folder=str(find_state_dir(os.environ) / orphaned_apps.APPS / request.app_id),
            driver=_DRIVER,
            roles=tuple(build_role_plan(role) for role in app.roles),
            grace_s=request.grace_s,
            description={**dump_app(app, without_metadata=(WORKSPACE_KEY,)), ENGINE_KEY: sdk.pick_address(os.environ)},
        )
        submission = Submission(request=request, spec=spec, quiet=options.quiet, detach=options.detach)
        return AppDryRunInfo(submission, lambda made: str(made.request.show()))

    def schedule(self, dryrun_info: AppDryRunInfo) -> str:
        """Submit the app of a dry run. If one step fails, nothing of it is left.

        Raises:
            EngineError: one line that says what the engine or the image lacks.
            SchedulerError: the app exists already.
        """
        submission: Submission = dryrun_info.request
        report_progress = (lambda _: None) if submission.quiet else (lambda line: print_line(f"docker: {line}"))
        state_dir, address, asked = find_state_dir(os.environ), sdk.pick_address(os.environ), submission.request
        with self.translate_errors():
            if self.find_registry().open(asked.app_id) is not None:
                raise SchedulerError(f"app {asked.app_id!r} exists already; give this one another name")
            with raise_dropped_interrupts():
                orphaned_apps.sweep(state_dir, address)
                # Before an image is pulled for nothing.
                request, gpus = self._find_gpus(asked)
                creation.ensure_images(self._engine, request, report_progress)
            with (
                orphaned_apps.mark_submission(state_dir, asked.app_id, address) as mark,
                self.keep_attached(asked.app_id, AppFolder(submission.spec.folder), detach=submission.detach),
            ):
                self._submit(submission, request, gpus, mark, report_progress)
        return asked.app_id

    def _submit(
        self,
        submission: Submission,
        request: AppRequest,
        gpus: Sequence[str],
        mark: Path,
        report_progress: Callable[[str], None],
    ) -> None:
        """Create everything of an app and start it. If one step fails, remove all of it."""
        with ExitStack() as undo:
            undo.callback(self._remove_created, mark, request.labels)
            with raise_dropped_interrupts():
                creation.build_images(self._engine, request, self._workspaces.files, report_progress)
                request = check_images(self._engine, request, find_state_dir(os.environ) / "docker-images")
                payload = self._build_payload(request)
                request = creation.create_app(self._engine, request, payload, gpus)
            owner = None if submission.detach else ProcessId.of(os.getpid())
            spec = replace(submission.spec, owner=owner, details={"request": request.to_json()})
            undo.callback(self._roll_back, spec)  # Ctrl-C may come now
            client.submit(spec, self.find_registry(), files=creation.build_payload(payload))
            with raise_dropped_interrupts():
                self._wait_started(spec, request)
            undo.pop_all()
        mark.unlink()

    def _remove_created(self, mark: Path, labels: Mapping[str, str]) -> None:
        """Remove what carries the app's labels: also what an interrupted call has created."""
        creation.remove_app(self._engine, labels)
        mark.unlink()

    def _find_gpus(self, request: AppRequest) -> tuple[AppRequest, list[str]]:
        """Return the ids of the GPUs that the app may use.

        Returns:
            The request, whose nodes share the GPUs if all of them would see all.
        """
        host = self._engine.host
        shares = reservations.needs_sharing(request, host) and reservations.shows_all_gpus(self._engine.info())
        if not shares and not any(container.gpus for container in request.containers):
            return request, []
        reservations.check_host(host)
        reservations.check_runtime(self._engine.info())
        visible = reservations.limit_visible(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        free = reservations.check_gpus(self._engine, request, visible)
        return (reservations.share_gpus(request, len(free)) if shares else request), free

    def _build_payload(self, request: AppRequest) -> creation.Payload:
        keys = {container.workspace for container in request.containers if container.workspace is not None}
        missing = sorted(keys - set(self._workspaces.files))
        if missing:
            raise SchedulerError(f"{missing[0]} was packed by another command: submit with the workspace again")
        bundled = any(container.bundled for container in request.containers)
        return creation.Payload(
            agent=build_agent_bundle() if bundled else b"",
            workspaces={key: self._workspaces.files[key] for key in keys},
        )

    def _wait_started(self, spec: AppSpec, request: AppRequest) -> None:
        """Wait until every container has been started once.

        Raises:
            EngineError: one could not be started.
        """
        folder = AppFolder(spec.folder)
        _, record = client.revive_app(folder)
        while not client.has_ended(record) and self._is_starting(request):
            time.sleep(_CHECK_S)
            _, record = client.revive_app(folder)
        if record is None or record.app.outcome is None:
            return
        if has_code(record.app.reasons, Code.COULD_NOT_START, Code.IMAGE_LACKS_COMMAND):
            raise EngineError(word_all(record.app.reasons))

    def _is_starting(self, request: AppRequest) -> bool:
        """Return whether a container waits for its start, or could not start and is being removed or was removed."""
        states = self._engine.list_states({**request.labels, Label.ROLE: None})
        return len(states) < len(request.containers) or not _NOT_STARTED.isdisjoint(states)

    def _roll_back(self, spec: AppSpec) -> None:
        """Remove a submission that failed, or was interrupted, after its supervisor started. Leave other apps alone."""
        folder = AppFolder(spec.folder)
        if not folder.spec_file.exists() or json.dumps(folder.read_spec().details) != json.dumps(spec.details):
            return
        client.request_stop(folder, "kill")
        client.wait_ended(folder, limit_s=self.FLUSH_S)
        client.delete(folder, self.find_registry(), spec.app_id)

    # -- reading ------------------------------------------------------------------------------------------------------

    def find_unregistered(self, app_id: str) -> AppFacts | None:
        """Do as `SupervisedScheduler`. Return None also for an app of another user."""
        containers = orphaned_apps.find_app(self._engine, app_id)
        if not containers:
            return None
        return orphaned_apps.build_facts(app_id, containers, str(find_state_dir(os.environ)))

    def read_reports(self, folder: AppFolder, spec: AppSpec) -> AgentReports:
        """See `SupervisedScheduler`."""
        engine = self._open_engine(folder)
        is_known = not spec.details or engine.is_available()
        trouble = () if is_known else (Reason(code=Code.NO_ENGINE, host=engine.host),)
        count, jobs = exit_evidence.read_events(engine, folder.state_dir, {} if trouble else spec.details)
        error = read_error_file(folder.state_dir / LogNames.ERROR)
        return AgentReports(restarts=count, jobs=jobs, trouble=trouble, error=error)

    def read_run_file(self, app_id: str, role: str, index: int, name: str, limit_bytes: int) -> bytes | None:
        """See `PluginScheduler`. Also from containers that have ended, until the app is deleted."""
        folder = self.find_folder(app_id)
        with self.translate_errors():
            engine = self._engine if folder is None else self._open_engine(folder)
            return exit_evidence.read_run_file(engine, app_id, (role, index), name, limit_bytes)

    def find_leftovers(self) -> Iterator[Leftover]:
        """See `PluginScheduler`: also what has no app any more."""
        yield from super().find_leftovers()
        yield from orphaned_apps.find_without_app(self._engine, find_state_dir(os.environ))

    def list_apps(self, cfg: Mapping[str, Any]) -> list[ListAppResponse]:  # noqa: ARG002
        """See `PluginScheduler`: apps with a state folder, and apps that only the engine knows."""
        others: set[str] = set()
        with self.translate_errors():
            states = self.read_states()
            try:
                found = orphaned_apps.list_apps(self._engine)
            except sdk.EngineUnavailable as error:
                if not states and not sdk.is_configured(os.environ):
                    raise NotConfiguredError(f"{error}; set DOCKER_HOST") from error
                logger.warning("%s: apps that only the engine knows are not listed", error)
            else:
                unknown = {app_id: containers for app_id, containers in found.items() if app_id not in states}
                states |= {app_id: orphaned_apps.find_app_state(each) for app_id, each in unknown.items()}
                state_dir = str(find_state_dir(os.environ))
                others = {
                    app_id for app_id, each in unknown.items() if orphaned_apps.find_other_state_dir(each, state_dir)
                }
        return [replace(each, has_other_home=each.app_id in others) for each in self.list_states(states)]

    def read_log(self, app_id: str, request: LogRequest) -> Iterable[str]:
        """Return the output of all containers of the replica, in order. If there are none, one line says so.

        See `PluginScheduler`.
        """
        folder = self.find_folder(app_id)
        with self.translate_errors():
            self._check_replica(app_id, folder, request)
        engine = self._open_engine(folder)
        lines = LogReader(engine, app_id, request).lines()
        if folder is not None and request.follow:
            lines = self._follow_or_explain(app_id, self._follow(engine, app_id, request, folder))
        return self._readers.count_reader(filter(request.matches, self._translate_each(lines)))

    def _translate_each(self, lines: Iterator[str]) -> Iterator[str]:
        with self.translate_errors():
            yield from lines

    def _follow(self, engine: Engine, app_id: str, request: LogRequest, folder: AppFolder) -> Iterator[str]:
        """Follow a replica's log.

        The supervisor follows the engine's events, and writes the app's state when it has started the next container.
        """
        with Watch(folder.state_dir) as watch:
            has_ended = partial(client.has_ended_logs, folder, keeps=app_id in self._submitted)
            yield from LogReader(engine, app_id, request, wait=watch.wait, has_ended=has_ended).lines()

    def _follow_or_explain(self, app_id: str, lines: Iterator[str]) -> Iterator[str]:
        """Let what follows a job's output, as `torchx run` does, show an error as if there were no output."""
        try:
            yield from lines
        except sdk.UnreadableLogs:
            self.print_once(
                f"the output of {app_id} cannot be shown: the log driver of its containers keeps no output that "
                "can be read; --log-dir and --tee 3 keep it in files"
            )

    def _check_replica(self, app_id: str, folder: AppFolder | None, request: LogRequest) -> None:
        if folder is not None:
            self.check_replica_of(folder, request)
            return
        containers = orphaned_apps.find_app(self._engine, app_id)
        if not containers:
            raise self._build_unknown(app_id)
        # In order: the last of each role counts.
        known = {facts.labels[Label.ROLE]: int(facts.labels[Label.REPLICA]) + 1 for facts in containers}
        check_replica(app_id, known, request.role, request.index)

    # -- ending -------------------------------------------------------------------------------------------------------

    def _cancel_existing(self, app_id: str) -> None:
        folder = self.find_folder(app_id)
        with self.translate_errors():
            if folder is None:
                containers = orphaned_apps.find_app(self._engine, app_id)
                orphaned_apps.stop_app(self._engine, containers, DEFAULT_SHUTDOWN_TIMEOUT_S + GRACE_MARGIN_S)
            else:
                client.request_stop(folder)

    def build_asker(self, folder: AppFolder) -> "NodeAsker":
        """See `SupervisedScheduler`."""
        return NodeAsker(self._open_engine(folder))

    def open_in_node(self, app_id: str, role: str, index: int, words: Sequence[str]) -> NodePipe:
        """See `PluginScheduler`: `docker exec`."""
        with self._open_app(app_id) as folder:
            spec, _ = agent_requests.read_running(folder)
            return self.build_asker(folder).open(spec, ReplicaId(role, index), words)

    def end_node(self, app_id: str, role: str, index: int) -> bool:
        """See `PluginScheduler`. It stops the container, with the app's grace."""
        with self._open_app(app_id) as folder:
            spec = folder.read_spec()
            container = self.build_asker(folder).find_container(spec, ReplicaId(role, index))
            if container is None:
                raise ControlError(f"the container of {role}/{index} does not run", CommandExit.ENDED)
            self._open_engine(folder).stop_container(container, spec.longest_grace_s)
        return True

    def delete_app(self, app_id: str) -> None:
        """See `PluginScheduler`: nothing labelled with the app is left on the engine."""
        folder = self.find_folder(app_id)
        with self.translate_errors():
            engine = self._open_engine(folder)
            if folder is not None:
                client.delete(folder, self.find_registry(), app_id)
            creation.remove_app(engine, {Label.APP: app_id, Label.USER: build_user_id()})
            orphaned_apps.remove_killed(find_state_dir(os.environ), app_id)

    def delete_unfinished(self, app_id: str) -> bool:
        """See `PluginScheduler`: what `muster prune` lists of an app that has no container of a replica."""
        state_dir = find_state_dir(os.environ)
        with self.translate_errors():
            if orphaned_apps.remove_killed(state_dir, app_id):
                return True
            remains = orphaned_apps.list_remains(self._engine)
        # Submissions register first, then unmark.
        known = orphaned_apps.list_submitting(state_dir) | set(self.find_registry())
        if app_id not in remains or app_id in known:
            return False
        self.delete_app(app_id)
        return True

    def _open_engine(self, folder: AppFolder | None) -> Engine:
        """Return the engine that runs an app: this shell's DOCKER_HOST may name another one."""
        address = None if folder is None else folder.read_spec().description.get(ENGINE_KEY)
        if address in (None, sdk.pick_address(os.environ)):
            return self._engine
        return self._others.setdefault(str(address), Engine(address))

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """See `SupervisedScheduler`."""
        try:
            yield
        except (sdk.DockerError, GpuError, StateError) as error:
            raise EngineError(str(error)) from error
        except FileExistsError as error:
            raise SchedulerError(f"an app of this name exists already: {error.filename}") from error
        except BundleError as error:
            raise SchedulerError(str(error)) from error
        except OSError as error:
            raise EngineError(describe_os_error(error, str(find_state_dir(os.environ)))) from error


class NodeAsker:
    """A `supervision.agent_requests.AskNode`.

    Args:
        engine: the one that runs the containers. The caller closes it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, spec: AppSpec, replica: ReplicaId, words: Sequence[str], limit_s: float) -> tuple[int, str, str]:
        """Run the words in the replica's container: their exit code, standard output and standard error."""
        running = self.find_container(spec, replica)
        if running is None:
            return NO_AGENT, "", "its container does not run"
        command = build_ask_command(_find_command(spec, replica), words)
        try:
            return call_limited(lambda: self._engine.run_inside(running, command), limit_s)
        except (sdk.NotFound, sdk.Conflict) as error:  # it has ended
            return NO_AGENT, "", str(error)
        except TimeoutError as error:  # it was paused, or the engine hangs
            return 1, "", str(error)

    def find_container(self, spec: AppSpec, replica: ReplicaId) -> str | None:
        """Return the id of a replica's container, if it runs."""
        labels = {Label.APP: spec.app_id, Label.USER: build_user_id()}
        labels |= {Label.ROLE: replica.role, Label.REPLICA: str(replica.index)}
        return next(iter(self._engine.list_container_ids(labels, running_only=True)), None)

    def open(self, spec: AppSpec, replica: ReplicaId, words: Sequence[str]) -> NodePipe:
        """Start a Python in the replica's container.

        Raises:
            ControlError: it does not run, or has ended.
        """
        running = self.find_container(spec, replica)
        if running is None:
            raise ControlError(f"the container of {replica} does not run", CommandExit.ENDED)
        try:
            return self._engine.open_inside(running, [_find_command(spec, replica)[0], *words]).pump()
        except (sdk.NotFound, sdk.Conflict) as error:
            raise ControlError(str(error), CommandExit.ENDED) from error


def _find_command(spec: AppSpec, replica: ReplicaId) -> Sequence[str]:
    commands = {(each["role"], each["replica"]): each["command"] for each in spec.details["request"]["containers"]}
    command: Sequence[str] = commands[replica.role, replica.index]
    return command
