"""The supervisor process of one app: one event queue, one loop, the only place that acts.

It leads a session of its own, because the terminal's Ctrl-C is for the command line, and is a subreaper. It watches the
command that submitted the app by pidfd, because a death signal would fire when a pipeline's pool thread ends. At its
end it kills its remaining descendants. If it is killed itself, the replicas of local_cwd end with it. A command that
waits for the app, or `muster recover`, starts it again.
"""

import contextlib
import fcntl
import importlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster._shared import processes
from muster._shared.records import replace as replace_fields
from muster.schedulers.supervision import decisions
from muster.schedulers.supervision.app_folder import (
    DRAIN_WORD,
    INTERRUPT_WORD,
    RESIZE_WORD,
    AppFolder,
    AppRecord,
    AppSpec,
    ProcessId,
)
from muster.schedulers.supervision.decisions import ReplicaEnded
from muster.schedulers.supervision.driver import DriverFactory, EventQueue, Handle, ReplicaDriver, StartError
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.state import AppPhase, Outcome, ReplicaId
from muster.schedulers.wording.reasons import Code, Reason

SWEEP_LIMIT_S = 10.0
"""How long the last sweep waits for processes that the kernel cannot end."""

SAVE_LIMIT_S = 60.0
"""How long the supervisor tries to record the outcome on a full disk."""

_PIPE_BYTES = 1 << 20
"""More than a pipe holds."""


class Supervisor:
    """Carries out the actions of `decisions.decide` and records the state. For one use."""

    def __init__(self, folder: AppFolder, spec: AppSpec, event_queue: EventQueue, driver: ReplicaDriver) -> None:
        self._folder = folder
        self._spec = spec
        self._event_queue = event_queue
        self._driver = driver
        self._started_s: dict[ReplicaId, float] = {}
        earlier = folder.read_record()
        here, own_id = Machine.here(), ProcessId.of(os.getpid())
        if earlier is None:
            app = decisions.build_state(spec.roles)
            self.record = AppRecord(app=app, machine=here, supervisor=own_id, submitted_s=time.time())
        else:
            # After a reboot pids are others'.
            handles = earlier.handles if here.shows_pids_of(earlier.machine) else {}
            hosts = earlier.find_hosts()
            self.record = replace(earlier, machine=here, supervisor=own_id, handles=handles, hosts=hosts)

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to do."""
        return self.record.app.phase is AppPhase.ENDED

    def begin(self, *, recovers: bool = False) -> None:
        """Adopt what an earlier supervisor started, handle requests made since, start replicas that wait.

        Args:
            recovers: replicas that have ended without a supervisor are started again, without a retry.
        """
        if self._folder.read_record() is not None:
            self._save()  # or the app would seem unsupervised
        gone = [each for each in self.record.app.running() if not self._adopt(each)]
        request = self._folder.read_request()
        if request is not None:
            self.handle_event(decisions.KillRequested() if request == "kill" else decisions.CancelRequested())
        self._handle_queued_events()  # the owner may have ended
        if recovers:
            self.handle_event(decisions.Recover(replicas=tuple(gone)))
            gone = []
        for each in gone:
            self.handle_event(ReplicaEnded(replica=each, exit_code=None, reasons=(Reason(code=Code.SUPERVISOR_DIED),)))
        self.handle_event(decisions.Begin())

    def run(self) -> None:
        """Handle events until the app has ended."""
        while not self.ended:
            self._event_queue.run_once()
            self._handle_queued_events()

    def _handle_queued_events(self) -> None:
        while (event := self._event_queue.pop()) is not None:
            self.handle_event(event)

    def handle_event(self, event: decisions.Event) -> None:
        """Decide about one event, record the new state, act."""
        if isinstance(event, ReplicaEnded):
            # Another supervisor may have started it, long ago.
            event = replace_fields(
                event, ran_s=self._event_queue.now_s() - self._started_s.pop(event.replica, -math.inf)
            )
        app, decided = decisions.decide(self._spec.roles, self.record.app, event)
        changed = app != self.record.app
        if self.record.app.phase is AppPhase.ENDING and app.phase is AppPhase.RUNNING:
            self._folder.request_file.unlink(missing_ok=True)
        self.record = replace(self.record, app=app)
        # Recorded first: then no replica runs unrecorded. The end comes last, with complete logs.
        if changed and not self.ended:
            self._save()
        for action in decided:
            self._act(action)

    def close(self) -> None:
        """Flush logs, kill remaining descendants and record the outcome, after the end."""
        self._driver.close(succeeded=self.record.app.outcome is Outcome.SUCCEEDED)
        sweep(time.monotonic() + SWEEP_LIMIT_S)
        self._folder.remove_secrets()
        self.record = replace(self.record, ended_s=time.time(), handles={}, hosts=self.record.find_hosts())
        deadline_s = time.monotonic() + SAVE_LIMIT_S
        while not self._save() and time.monotonic() < deadline_s:
            time.sleep(0.5)

    def _save(self) -> bool:
        """Record the app's state. A full disk must not end the job: the next transition tries again."""
        try:
            self._folder.write_record(self.record)
        except OSError as error:
            # Its log is on that disk too.
            processes.write_stderr(f"muster: cannot write {self._folder.state_file}: {error.strerror}\n")
            return False
        return True

    def _adopt(self, replica: ReplicaId) -> bool:
        handle = self.record.handles.get(replica)
        return handle is not None and self._driver.adopt(replica, handle)

    def _act(self, action: decisions.Action) -> None:
        if isinstance(action, decisions.Start):
            self._start(action.replicas)
        elif isinstance(action, decisions.Stop):
            self._limit_stop(action)
            for each in action.replicas:
                self._driver.stop(each, is_interrupt=action.is_interrupt)
        elif isinstance(action, decisions.Pause):
            self._set_timer(f"pause {action.replica}", action.delay_s, decisions.PausePassed(replica=action.replica))
        elif isinstance(action, decisions.Linger):
            self._set_timer("linger", action.delay_s, decisions.LingerExpired(number=action.number))
        elif isinstance(action, decisions.Kill):
            self._set_timer("kill", decisions.KILL_LIMIT_S, decisions.KillExpired(number=action.number))
            for each in action.replicas:
                self._driver.kill(each)

    def _limit_stop(self, action: decisions.Stop) -> None:
        roles: dict[float, tuple[str, ...]] = {}
        for role in self._spec.roles:
            grace_s = self._spec.find_grace_s(role.name)
            roles[grace_s] = (*roles.get(grace_s, ()), role.name)
        for grace_s, names in roles.items():
            expired = decisions.GraceExpired(number=action.number, roles=names)
            self._set_timer(f"grace {grace_s}", grace_s, expired)

    def _set_timer(self, name: str, delay_s: float, event: decisions.Event) -> None:
        self._event_queue.set_timer(name, delay_s, lambda: self._event_queue.post(event))

    def _start(self, replicas: tuple[ReplicaId, ...]) -> None:
        handles: dict[ReplicaId, Handle] = dict(self.record.handles)
        for each in replicas:
            handles.pop(each, None)
            self._started_s[each] = self._event_queue.now_s()
            try:
                handles[each] = self._driver.start(each, self.record.app.replicas[each].starts)
            except StartError as error:
                why = (Reason(code=Code.COULD_NOT_START, text=str(error)),)
                self._event_queue.post(ReplicaEnded(replica=each, exit_code=None, reasons=why, final=error.final))
        self.record = replace(self.record, handles=handles)
        self._save()


def sweep(deadline_s: float) -> None:
    """Kill and reap all descendants of this process until there are none, or until this monotonic time."""
    while time.monotonic() < deadline_s:
        killed = processes.kill_descendants(os.getpid())
        if not _reap() and not killed:
            return
        time.sleep(0.002)


def _reap() -> bool:
    """Wait for ended children. Return False if there is no child at all."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def watch_owner(spec: AppSpec, event_queue: EventQueue) -> None:
    """Cancel the app when the process it belongs to ends for any reason."""
    if spec.owner is None:
        return
    gone = decisions.CancelRequested(reasons=(Reason(code=Code.SUBMITTER_ENDED, pid=spec.owner.pid),))
    try:
        pidfd = os.pidfd_open(spec.owner.pid)
    except ProcessLookupError:
        event_queue.post(gone)
        return

    def report_end() -> None:
        event_queue.unwatch(pidfd)
        os.close(pidfd)
        event_queue.post(gone)

    event_queue.watch_readable(pidfd, report_end)
    if not spec.owner.is_alive():  # reused pid, or just ended
        report_end()


def watch_requests(folder: AppFolder, event_queue: EventQueue, driver: ReplicaDriver) -> None:
    """Post the requests of other commands as events. "suspend" and "continue" change no state of the app."""
    # Our own writer prevents end of file.
    fd = os.open(folder.control_pipe, os.O_RDWR | os.O_NONBLOCK)

    def read_requests() -> None:
        with contextlib.suppress(BlockingIOError):
            # All that the pipe holds, so that no word is cut.
            words = os.read(fd, _PIPE_BYTES).decode(errors="replace").split()
            if "kill" in words:
                event_queue.post(decisions.KillRequested())
            elif "cancel" in words or INTERRUPT_WORD in words:
                event_queue.post(decisions.CancelRequested(is_interrupt=INTERRUPT_WORD in words))
            for word in words:
                if word in ("suspend", "continue"):
                    driver.suspend(suspended=word == "suspend")
                elif (event := _parse_request(word)) is not None:
                    event_queue.post(event)

    event_queue.watch_readable(fd, read_requests)


def _parse_request(word: str) -> decisions.DrainRequested | decisions.ResizeRequested | None:
    """Return the request with a number that a word is; None if it is none."""
    try:
        if word.startswith(DRAIN_WORD):
            limit_s = float(word.removeprefix(DRAIN_WORD))
            return decisions.DrainRequested(limit_s=limit_s) if math.isfinite(limit_s) else None
        if word.startswith(RESIZE_WORD):
            from urllib.parse import unquote  # most apps are never resized

            nodes, _, role = word.removeprefix(RESIZE_WORD).partition(":")
            return decisions.ResizeRequested(role=unquote(role), replicas=int(nodes))
    except ValueError:
        pass
    return None


def watch_signals(event_queue: EventQueue) -> None:
    """Stop the app politely at SIGTERM. Ignore SIGHUP and SIGINT, which are for the command line."""

    def stop(signum: int, _frame: Any) -> None:
        why = Reason(code=Code.SUPERVISOR_SIGNALLED, signal=signal.Signals(signum).name)
        event_queue.post(decisions.CancelRequested(reasons=(why,)))

    signal.signal(signal.SIGTERM, stop)
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)


def load_factory(name: str) -> DriverFactory:
    """Return the factory that `package.module:function` names."""
    module, _, function = name.partition(":")
    factory: DriverFactory = getattr(importlib.import_module(module), function)
    return factory


def supervise(folder: AppFolder, report_ready: Callable[[str], None], *, recovers: bool = False) -> None:
    """Run the app of a folder to its end.

    Args:
        folder: of an app that has been submitted.
        recovers: the app is continued by `muster recover`, and does not end with the command that submitted it.
        report_ready: called once with "ok" when all replicas have been started, or another supervisor runs the app.
    """
    with open(folder.lock_file, "w") as lock:
        os.utime(lock.fileno())  # shows commands the last start
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report_ready("ok")
            return
        earlier = folder.read_record()
        if earlier is not None and earlier.app.phase is AppPhase.ENDED:
            report_ready("ok")
            return
        processes.become_subreaper()
        spec = folder.read_spec()
        event_queue = EventQueue()
        watch_signals(event_queue)
        driver = load_factory(spec.driver)(spec=spec, event_queue=event_queue)
        watch_requests(folder, event_queue, driver)
        supervisor = Supervisor(folder, spec, event_queue, driver)
        if not recovers:
            watch_owner(spec, event_queue)
        supervisor.begin(recovers=recovers)
        report_ready("ok")
        supervisor.run()
        supervisor.close()
        event_queue.close()


def main(path: str, ready_fd: int, word: str = "") -> None:
    """Become the supervisor of the app in the folder `path`. `client.start_supervisor` starts it here.

    Forks and returns in the parent at once, so that no living process has to wait for the supervisor.

    Args:
        path: the app's folder.
        ready_fd: write end of a pipe that gets "ok" when all replicas have started. On failure it is closed without, or
            gets why there is no log.
        word: `client.RECOVERS`, or none.
    """
    if os.fork() != 0:
        os.close(ready_fd)
        return
    os.set_inheritable(ready_fd, False)  # or replicas hold up the submission
    os.setsid()
    folder = AppFolder(Path(path))
    try:
        _redirect(folder.log_file)
    except OSError as error:
        os.write(ready_fd, f"{error.filename}: {error.strerror}".encode())
        return

    def report_ready(word: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the command that started us has ended
            os.write(ready_fd, word.encode())
        os.close(ready_fd)

    supervise(folder, report_ready, recovers=bool(word))


def _redirect(log_file: Path) -> None:
    """Redirect standard input to /dev/null and the output, for instance a traceback, to a file."""
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.flush()
    os.close(null)
    os.close(log)
