"""The TorchX scheduler `slurm`."""

import base64
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torchx.schedulers.api import ListAppResponse
from torchx.specs import AppDef, AppDryRunInfo, AppState, Role, is_terminal
from torchx.workspace.api import WorkspaceMixin

from muster._shared.folders import remove_folder
from muster.schedulers import adapter
from muster.schedulers.slurm import client, reasons, running_apps
from muster.schedulers.slurm.node import LOG_NAME, SCRIPT_NAME, SIZES_NAME, STOP_WORD, read_sizes, record_job
from muster.schedulers.slurm.options import SlurmOptions
from muster.schedulers.slurm.request import (
    PAYLOAD_MARK,
    PAYLOAD_NAME,
    SCRIPT_LIMIT_BYTES,
    SRUN,
    WORK_DIR,
    WORKSPACE_KEY,
    SlurmRequest,
    SubmissionSite,
    build_payload,
    build_request,
    list_files,
)
from muster.schedulers.supervision.app_folder import write_text

_START_LINES: Final = 10
"""So many lines of what srun has said show why no task could start."""
_LOOK_S: Final = 2.0
"""How often all readers of one app's logs together ask Slurm whether it has ended."""
_END_LIMIT_S: Final = 120.0
_ASK_MARGIN_S: Final = 30.0
_ASKED: Final = (0, 2, 3, client.TIMED_OUT)
"""Exit codes of the agent's command, and of one that was given up.

Others are of an `srun` that could not run it.
"""
_LEAST_PAUSE_S: Final = 0.2
_MOST_PAUSE_S: Final = 5.0
_NOT_INHERITED: Final = ("MUSTER_", "SLURM_", "SBATCH_", "SRUN_")

logger = logging.getLogger(__name__)


class SlurmScheduler(adapter.PluginScheduler, WorkspaceMixin[None]):  # type: ignore[misc]
    """Runs an app as one job of a Slurm cluster, with one task per node.

    Args:
        name: the scheduler's.
        session_name: TorchX's name of the session. It is part of the default path of the app's folder.
    """

    option_record = SlurmOptions

    def __init__(self, name: str, session_name: str) -> None:
        super().__init__(name, session_name)
        self._lock = threading.Lock()
        self._looks: dict[str, tuple[float, bool]] = {}

    # -- submitting ---------------------------------------------------------------------------------------------------

    def build_workspace_and_update_role(self, role: Role, workspace: str, cfg: Mapping[str, Any]) -> None:
        """Note the folder, which travels with `job_dir`, as with TorchX's adapter, or without a shared folder."""
        if cfg.get("job_dir") or not self.shares_folders(cfg):
            self.note_workspace(role, workspace, WORKSPACE_KEY, is_quiet=bool(cfg.get("quiet")))

    def shares_folders(self, cfg: Mapping[str, Any]) -> bool:
        """See `PluginScheduler`."""
        return str(cfg.get("shared", "true")).lower() != "false"

    def find_named(self, word: str) -> tuple[Sequence[str], str]:
        """See `PluginScheduler`: a number that squeue shows."""
        app_id = running_apps.find_app_of_job(word, self._find_registry())
        return [] if app_id is None else [app_id], f"no job that was submitted here has the Slurm job id {word}"

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo:
        from muster.schedulers.local.submission import find_interpreter

        options = adapter.parse_options(SlurmOptions, self._run_opts(), cfg)
        name = adapter.build_app_name(app.name, adapter.make_suffix())
        default = adapter.find_state_dir(os.environ) / "logs" / (self.session_name or "torchx") / name
        folder = os.path.abspath(os.path.expanduser(options.job_dir or default))
        python = options.python or find_interpreter(os.environ, sys.executable)
        site = SubmissionSite(folder=folder, cwd=os.getcwd(), python=python)
        request = build_request(
            adapter.share_workspace(app, WORKSPACE_KEY), options, name=name, token=adapter.make_secret(), site=site
        )
        return AppDryRunInfo(request, str)

    def schedule(self, dryrun_info: AppDryRunInfo) -> str:
        """Make the app's folder and submit its job. Nothing is left of it if that fails."""
        from muster.schedulers.local.submission import check_programs

        request: SlurmRequest = dryrun_info.request
        if request.runs_in_place:  # a container, or a program before the agent, may see other folders
            check_programs(request.spec, scripts_only=True)
        if request.spec.details["continues"] == "expedite":
            client.check_version((25, 11), "continues=expedite")
        if client.can_wait_for_children():
            request = replace(request, script=request.script.replace(SRUN, f"{SRUN} {client.WAIT_FOR_CHILDREN}"))
        registry = self._find_registry()
        folder = registry.check(Path(request.folder))
        try:
            with contextlib.ExitStack() as undo:
                folder.create(request.spec)
                undo.callback(remove_folder, folder.path, ignores_errors=True)
                registry.add(request.spec.app_id, folder.path)
                undo.callback(registry.remove, request.spec.app_id)
                script = _write_files(request, folder)
                # If sbatch's answer is lost, the name finds it.
                undo.callback(_cancel_named, request.spec.app_id)
                job_id = client.submit_script(script, _build_env())
                record_job(folder, job_id)
                undo.pop_all()
        except FileExistsError as error:
            raise adapter.SchedulerError(f"{folder.path} exists already: an app needs a folder of its own") from error
        except adapter.BundleError as error:
            raise adapter.SchedulerError(str(error)) from error
        except OSError as error:
            raise adapter.EngineError(
                f"cannot submit {request.spec.app_id}: {adapter.describe_os_error(error, str(folder.path))}"
            ) from error
        self._submitted.add(request.spec.app_id)
        return request.spec.app_id

    # -- looking ------------------------------------------------------------------------------------------------------

    def _find_registry(self) -> adapter.AppRegistry:
        return adapter.AppRegistry(adapter.find_state_dir(os.environ), self.backend)

    def _find_app(self, app_id: str) -> running_apps.App | None:
        """Find an app. None: it is not known (any more)."""
        try:
            return self._read_app(app_id)
        except adapter.StateError as error:
            raise adapter.EngineError(str(error)) from error

    def _read_app(self, app_id: str) -> running_apps.App | None:
        folder = self._find_registry().open(app_id)
        try:
            return None if folder is None else running_apps.read_app(folder)
        except FileNotFoundError:  # another shell has deleted it
            return None

    def _read_all(self) -> Iterator[tuple[str, running_apps.App | None]]:
        """Read all apps. None: the files of this one are refused."""
        for app_id in self._find_registry():
            try:
                app = self._read_app(app_id)
            except adapter.StateError as error:  # noqa: PERF203  # it hides no other
                logger.warning("%s: %s", app_id, error)
                yield app_id, None
            else:
                if app is not None:
                    yield app_id, app

    def read_facts(self, app_id: str) -> adapter.AppFacts | None:
        """See `PluginScheduler`."""
        app = self._find_app(app_id)
        if app is None:
            return None
        if app.is_shared:
            reports = adapter.read_agent_reports(app.folder, app.spec)
        else:
            from muster.schedulers.slurm.logs import read_reports

            reports = read_reports(app)
        return running_apps.build_facts(app, reports, self._find_registry().find_added_s(app_id))

    def list_apps(self, cfg: Mapping[str, Any]) -> list[ListAppResponse]:
        """See `PluginScheduler`: the apps that this user has submitted here."""
        del cfg
        added = self._find_registry().find_added_s
        return [
            adapter.ListedApp(
                app_id=name, state=AppState.UNKNOWN if app is None else app.state, submitted_s=added(name)
            )
            for name, app in self._read_all()
        ]

    def find_run_dir(self, app_id: str, role: str) -> Path | None:
        """See `PluginScheduler`."""
        folder = self._find_registry().open(app_id)
        return None if folder is None else adapter.find_newest_run(folder.role_dir(role))

    def find_leftovers(self) -> Iterable[adapter.Leftover]:
        """See `PluginScheduler`."""
        registry = self._find_registry()
        for app_id, app in self._read_all():
            added_s = registry.find_added_s(app_id)
            ended_s = None if app is None or added_s is None else running_apps.find_end_s(app, added_s)
            if app is not None and ended_s is not None:
                yield adapter.Leftover(
                    name=f"{self.backend}://{app_id}",
                    what=f"{app.state.name.lower()}: its logs and state",
                    size_bytes=adapter.measure_folder(app.folder.path),
                    ended_s=ended_s,
                    remove=lambda app_id=app_id: self.delete_app(app_id),  # type: ignore[misc]
                )

    def read_log(self, app_id: str, request: adapter.LogRequest) -> Iterator[str]:
        """See `PluginScheduler`. All runs of the job are in one log."""
        app = self._find_app(app_id)
        if app is None:
            raise self._build_unknown(app_id)
        counts = {role: len(plans) for role, plans in app.spec.details["replicas"].items()}
        adapter.check_replica(app_id, counts, request.role, request.index)
        replica = adapter.ReplicaId(request.role, request.index)
        source: Any
        if app.is_shared:
            source = adapter.FileSource(app.folder.replica_dir(replica), request.stream.value, app.folder.state_dir)
        else:
            from muster.schedulers.slurm.logs import NodeSource

            source = NodeSource(app, replica, request.stream.value)
        lines = adapter.read_lines(
            source,
            lambda: self._has_ended(app_id),
            pattern=request.pattern,
            since_s=request.since_s,
            until_s=request.until_s,
            follow=request.follow,
        )
        is_first = replica == adapter.ReplicaId(app.spec.roles[0].name, 0)
        return self._add_start_errors(app_id, lines, request) if is_first else lines

    def _add_start_errors(self, app_id: str, lines: Iterator[str], request: adapter.LogRequest) -> Iterator[str]:
        """Let what srun has said follow, if the job has ended and none of its tasks could start."""
        yield from lines
        app = self._find_app(app_id)
        if app is not None and app.is_shared and not app.runs and is_terminal(app.state):
            for line in running_apps.read_last_lines(app.folder)[-_START_LINES:]:
                text = f"{LOG_NAME}: {line}\n"
                if request.matches(text):
                    yield text

    def _has_ended(self, app_id: str) -> bool:
        """Return whether nothing follows in an app's logs. A controller that is restarted is waited for."""
        with self._lock:
            looked_s, ended = self._looks.get(app_id, (-_LOOK_S, False))
            if ended or time.monotonic() - looked_s < _LOOK_S:
                return ended
            try:
                app = self._find_app(app_id)
                ended = app is None or is_terminal(app.state) or app.state is AppState.UNKNOWN
            except adapter.EngineError:
                ended = False
            self._looks[app_id] = (time.monotonic(), ended)
            return ended

    # -- asking and ending --------------------------------------------------------------------------------------------

    def _open_app(self, app_id: str) -> running_apps.App:
        """Return an app that has not ended.

        Raises:
            ControlError: there is none, or it has.
        """
        app = self._find_app(app_id)
        if app is None:
            raise adapter.ControlError(f"{self.backend} knows no app {app_id!r}", adapter.CommandExit.UNKNOWN)
        if is_terminal(app.state) or app.state is AppState.UNKNOWN or app.entry is None:
            why = adapter.word_all(running_apps.explain_end(app, app.state)[:1])
            raise adapter.ControlError(
                f"{app_id} has ended already ({app.state.name}{why and ': ' + why})", adapter.CommandExit.ENDED
            )
        if app.is_cancelled:
            raise adapter.ControlError(f"{app_id} is being stopped already", adapter.CommandExit.REFUSED)
        return app

    def ask_app(self, app_id: str, kind: adapter.AskKind, limit_s: float) -> adapter.Answer:
        """See `PluginScheduler`. The question travels through `srun --overlap`."""
        app = self._open_app(app_id)
        if app.state is AppState.PENDING:
            assert app.entry is not None  # noqa: S101  # it waits
            raise adapter.ControlError(
                f"{app_id} is PENDING: {adapter.word(reasons.explain_wait(app.entry))}",
                adapter.CommandExit.REFUSED,
            )
        return _ask(app, kind, limit_s)

    def open_in_node(self, app_id: str, role: str, index: int, words: Sequence[str]) -> adapter.NodePipe:
        """See `PluginScheduler`. It is a step of the job, by `srun --overlap`."""
        app, replica = self._open_app(app_id), adapter.ReplicaId(role, index)
        node = app.find_running(role).get(replica)
        if node is None:
            raise adapter.ControlError(f"node {index} of {role} does not run", adapter.CommandExit.ENDED)
        assert app.entry is not None  # noqa: S101  # it runs
        python = app.spec.details["replicas"][role][index]["command"][0]
        supervisor = app.nodes[replica].record.supervisor if replica in app.nodes else None
        return adapter.start_pipe(
            client.build_step(app.entry.job_id, node, [], [python, *words]),
            _build_env(),
            root=0 if supervisor is None else supervisor.pid,
        )

    def stop_app(self, app_id: str, limit_s: float) -> adapter.Answer:
        """See `PluginScheduler`."""
        app = self._open_app(app_id)
        began_s = time.monotonic()
        _record_cancel(app, STOP_WORD)
        was = _describe_rest(app)
        if was:
            return self._cancel_waiting(app, was, began_s)
        runs_agents = any(role.runs_agent for role in app.spec.roles)
        if app.state is AppState.RUNNING and runs_agents:
            asked = _ask(app, adapter.AskKind.STOP, limit_s)
        else:
            asked = adapter.Answer(outcome=adapter.AskOutcome.REFUSED, line="it ran no agents of muster")
        if asked.outcome is adapter.AskOutcome.UNREACHED and not self._has_left(app, limit_s):
            _withdraw_cancel(app)
            return asked
        if asked.outcome is not adapter.AskOutcome.DONE or not self._wait_ended(app_id, app.spec.grace_s):
            _cancel_jobs(app)
        is_over = self._wait_ended(app_id, app.spec.grace_s + _END_LIMIT_S)
        return adapter.close_stop(asked, "replicas", time.monotonic() - began_s, has_ended=is_over)

    def _cancel_waiting(self, app: running_apps.App, was: str, began_s: float) -> adapter.Answer:
        """End an app of which nothing runs: it has never started, or waits to go on."""
        _cancel_jobs(app)
        is_over = self._wait_ended(app.spec.app_id, app.spec.grace_s + _END_LIMIT_S)
        took_s = time.monotonic() - began_s
        if not is_over:
            return adapter.close_stop(
                adapter.Answer(outcome=adapter.AskOutcome.REFUSED, line=was), "replicas", took_s, has_ended=False
            )
        saved = running_apps.find_checkpoint(app)
        line = f"{was} and is cancelled" + (f"; its last checkpoint is {saved}" if saved else "")
        return adapter.Answer(outcome=adapter.AskOutcome.DONE, line=line, took_s=took_s)

    def _wait(self, app_id: str, is_done: Callable[[running_apps.App], bool], limit_s: float) -> bool:
        """Wait until an app is not known any more, or has what is waited for. False: that takes longer than the limit.

        The controller serves a whole cluster, so it is asked less and less often.
        """
        deadline_s, pauses = time.monotonic() + limit_s, list_pauses()
        while (app := self._find_app(app_id)) is not None and not is_done(app):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(next(pauses))
        return True

    def _wait_ended(self, app_id: str, limit_s: float) -> bool:
        return self._wait(app_id, lambda app: app.entry is None or is_terminal(app.state), limit_s)

    def _has_left(self, app: running_apps.App, limit_s: float) -> bool:
        """Return whether a node ends within the limit, because its agent has got a request without an answer."""
        before = app.find_running()
        return self._wait(app.spec.app_id, lambda now: now.find_running() != before, limit_s)

    def resize_app(self, app_id: str, nodes: int, role: str | None) -> adapter.Answer:
        """See `PluginScheduler`. A job of Slurm's can only shrink."""
        app = self._open_app(app_id)
        chosen = adapter.find_elastic_role(app_id, app.spec.roles, role, nodes)
        sizes = read_sizes(app.folder.state_dir)
        before = sizes.get(chosen.name, chosen.replicas)
        if nodes > before:
            line = f"{app_id} has {adapter.count_nodes(before)} and cannot get {nodes}: a Slurm job can only shrink"
            raise adapter.ControlError(f"{line}; submit it with spares=N for lost nodes", adapter.CommandExit.REFUSED)
        if not app.is_shared:
            raise adapter.ControlError(
                f"{app_id} has no folder that its nodes share: it cannot be resized", adapter.CommandExit.REFUSED
            )
        sizes[chosen.name] = nodes
        write_text(app.folder.state_dir / SIZES_NAME, "".join(f"{name} {size}\n" for name, size in sizes.items()))
        leaving = {each: node for each, node in app.find_running(chosen.name).items() if each.index >= nodes}
        for each, node in leaving.items():
            supervisor = app.nodes[each].record.supervisor
            assert supervisor is not None  # noqa: S101  # it runs
            pid = str(supervisor.pid)
            _run_there(app, node, ["kill", f"-{signal.Signals.SIGHUP.name[3:]}", pid], {}, _ASK_MARGIN_S)
        late: list[adapter.ReplicaId] = []

        def have_left(now: running_apps.App) -> bool:
            late[:] = [each for each in leaving if each in now.find_running()]
            return not late

        has_left = self._wait(app_id, have_left, app.spec.grace_s + _ASK_MARGIN_S)
        if has_left and leaving:
            assert app.entry is not None  # noqa: S101  # it runs
            left = ",".join(each for each in app.entry.nodes if each not in leaving.values())
            client.update_job(app.entry.job_id, f"NodeList={left}")  # refused: the others stay until the job ends
        names = ", ".join(map(str, leaving)) or "no node"
        line = f"{app_id} has {adapter.count_nodes(nodes)} from now on"
        if not has_left:
            return adapter.Answer(
                outcome=adapter.AskOutcome.LATE, line=f"{line}; still running: {', '.join(map(str, late))}"
            )
        return adapter.Answer(outcome=adapter.AskOutcome.DONE, line=f"{line}: {names} ended")

    def _cancel_existing(self, app_id: str) -> None:
        """Let all ranks save at one step: `scancel` would send SIGTERM to the workers, too. A second cancel does."""
        app = self._find_app(app_id)
        if app is None or app.entry is None or is_terminal(app.state):
            return
        was_cancelled = app.is_cancelled
        _record_cancel(app)
        if app.has_started() and not was_cancelled:
            client.cancel(app.entry.job_id, "--signal=USR1")  # its tasks save and end
        else:
            _cancel_jobs(app)

    def delete_app(self, app_id: str) -> None:
        """See `PluginScheduler`. Removes the app's logs too."""
        app = self._find_app(app_id)
        if app is None:
            return
        if app.entry is not None and not is_terminal(reasons.STATES.get(app.entry.state, AppState.UNKNOWN)):
            self._cancel_existing(app_id)
            if not self._wait_ended(app_id, app.spec.grace_s + _ASK_MARGIN_S):
                self._cancel_existing(app_id)
            if not self._wait_ended(app_id, app.spec.grace_s + _END_LIMIT_S):
                raise adapter.EngineError(
                    f"{app_id} did not end within {app.spec.grace_s + _END_LIMIT_S:g} s; not deleted"
                )
        remove_folder(app.folder.path)
        self._find_registry().remove(app_id)


def list_pauses() -> Iterator[float]:
    """Return the seconds between two questions to the controller: longer and longer."""
    pause_s = _LEAST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(_MOST_PAUSE_S, 1.4 * pause_s)


def _write_files(request: SlurmRequest, folder: adapter.AppFolder) -> str:
    """Write what the nodes need, and return the path of the script."""
    script, spec = request.script, request.spec
    agent = adapter.build_agent_bundle() if any(role.runs_agent for role in spec.roles) else None
    source = next(iter(spec.details["workspaces"].values()), None)
    if spec.details["shared"]:
        (folder.state_dir / PAYLOAD_NAME).write_bytes(build_payload({}))
        if agent is not None:
            (folder.state_dir / adapter.AGENT_BUNDLE_NAME).write_bytes(agent)
        if source is not None:
            (folder.path / WORK_DIR).mkdir()
            adapter.copy_workspace(source, str(folder.path / WORK_DIR))
    else:
        workspace = None if source is None else adapter.build_workspace_bundle(source)
        packed = build_payload(list_files(spec, agent, workspace))
        encoded = base64.encodebytes(packed).decode("ascii")
        if len(encoded) > SCRIPT_LIMIT_BYTES:
            size = f"{len(encoded) / 1e6:.1f} MB as text, and Slurm takes scripts of at most 4 MB"
            raise adapter.SchedulerError(
                f"what the nodes need is {size}: leave files out by .torchxignore, or use shared=true"
            )
        script = script.replace(PAYLOAD_MARK, encoded)
    path = folder.state_dir / SCRIPT_NAME
    path.write_text(script)
    path.chmod(0o600)
    return str(path)


def _build_env() -> dict[str, str]:
    """Return what the job inherits of this process's environment.

    Variables of a job in which this process runs are left out.
    """
    return {
        name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED) or name == "SLURM_CONF"
    }


def _cancel_named(name: str) -> None:
    """End the jobs of an app whose submission has failed."""
    with contextlib.suppress(adapter.EngineError):
        client.run(["scancel", "--name", name], waits=False)


def _record_cancel(app: running_apps.App, request: str = "cancel") -> None:
    """Record the cancel: from now on nothing queues or starts the app again.

    Slurm 22.05 refuses the update, with one reason or another, for a job that has lost a node. Then only the mark in
    the app's folder is left, which the nodes look for.
    """
    app.folder.write_request(request)
    assert app.entry is not None  # noqa: S101  # it has not ended
    client.update_job(app.entry.job_id, "Requeue=0")


def _withdraw_cancel(app: running_apps.App) -> None:
    """Undo `_record_cancel`."""
    app.folder.request_file.unlink(missing_ok=True)
    assert app.entry is not None  # noqa: S101  # it has not ended
    if app.spec.details["continues"] != "no":
        client.update_job(app.entry.job_id, "Requeue=1")


def _cancel_jobs(app: running_apps.App) -> None:
    for entry in client.list_jobs(app.spec.app_id, running_apps.read_jobs(app.folder)):
        if not is_terminal(reasons.STATES.get(entry.state, AppState.UNKNOWN)):
            client.cancel(entry.job_id)


def _describe_rest(app: running_apps.App) -> str:
    """Say how an app is of which nothing runs, though it has not ended. "": it runs, as far as is known."""
    if app.state is AppState.PENDING:
        return "it was waiting in the queue"
    is_between = app.entry is not None and app.entry.state == "COMPLETING" and bool(app.nodes)
    return "it was between two runs" if is_between and not app.find_running() else ""


def _ask(app: running_apps.App, kind: adapter.AskKind, limit_s: float) -> adapter.Answer:
    def find_nodes(role: str) -> adapter.RoleNodes:
        running = {str(each): (each, node) for each, node in app.find_running(role).items()}

        def ask(name: str, question: Any) -> tuple[int, str, str]:
            replica, node = running[name]
            plan = app.spec.details["replicas"][role][replica.index]
            env = {**plan["env"], adapter.Env.TOKEN: adapter.derive_token(app.spec.details["token"], role)}
            command = adapter.build_ask_command(plan["command"], question)
            code, output, errors = _run_there(app, node, command, env, limit_s + _ASK_MARGIN_S)
            return code if code in _ASKED else adapter.NOT_REACHED, output, errors

        none = f"no agent of {role} answers: its workers have not run for a second yet, or its node is lost"
        return adapter.RoleNodes(names=list(running), ask=ask, none=none)

    roles = {role.name: find_nodes(role.name) for role in app.spec.roles if role.runs_agent}
    return adapter.ask_roles(app.spec.app_id, roles, kind, limit_s)


def _run_there(
    app: running_apps.App, node: str, command: Any, env: Mapping[str, str], limit_s: float
) -> tuple[int, str, str]:
    assert app.entry is not None  # noqa: S101  # it runs
    return client.run_on_node(app.entry.job_id, node, command, {**_build_env(), **env}, limit_s)
