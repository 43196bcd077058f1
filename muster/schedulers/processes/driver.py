"""Runs replicas as processes of this machine: the `ReplicaDriver` of local_cwd, and of adapters that start programs.

Every replica runs under a guard (an agent brings its own), which ends with the supervisor and kills its descendants
before it ends. If the guard is killed itself, the supervisor, a subreaper, becomes the parent of its orphans and kills
them.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster._shared import processes
from muster._shared.contract import AGENT_BUNDLE_NAME, NEVER_RETRY, Env, ExitCode
from muster.schedulers.failure_report import USAGE_LINE_LIMIT_BYTES, explain_report, find_usage_line
from muster.schedulers.naming import LOOPBACK, derive_token
from muster.schedulers.processes.agent_files import read_report, read_tail
from muster.schedulers.processes.capture import Capture, log_path
from muster.schedulers.role_variables import build_role_env
from muster.schedulers.supervision.app_folder import AppFolder, AppSpec, ProcessId
from muster.schedulers.supervision.decisions import ReplicaEnded
from muster.schedulers.supervision.driver import EventQueue, Handle, StartError
from muster.schedulers.supervision.state import ReplicaId, ReplicaStatus
from muster.schedulers.wording.reasons import Code, Reason, Reasons

ADOPTED_LIMIT_S = 5.0
"""How long replicas of a dead supervisor may take to end. They got their death signal."""
ORPHAN_LIMIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A process to start."""

    command: Sequence[str]
    """Program (absolute path) and arguments."""
    env: Mapping[str, str]
    cwd: str
    keep_fds: Sequence[int] = ()
    """Descriptors that it inherits under the same numbers."""


@dataclass(frozen=True, kw_only=True)
class _Running:
    pid: int
    pidfd: int
    capture: Capture | None
    """None for a replica that an earlier supervisor started: that process held its pipes."""


class ProcessDriver:
    """A `ReplicaDriver` of processes of this machine. Use it in the supervisor's main thread only.

    The kernel sends the processes their death signal when the thread that started them ends.

    The app's spec has in `details` what `adapter.process_plan` puts there. A subclass changes what a replica runs by
    `build_launch`: it may put a command before it, such as `ssh HOST`, or choose the folder.

    Args:
        spec: of the app.
        event_queue: the supervisor's.
    """

    LISTENS = True
    """Whether all replicas share this machine's loopback: a port is bound for each role of agents, and node 0 gets its
    socket. False: the agents' variables say where node 0 is, see `AgentPlace.port`."""

    def __init__(self, *, spec: AppSpec, event_queue: EventQueue) -> None:
        self.spec = spec
        self.folder = AppFolder(spec.folder)
        self._event_queue = event_queue
        self._agents = {role.name for role in spec.roles if role.runs_agent}
        self._running: dict[ReplicaId, _Running] = {}
        # Kept open: no other process takes the port, and a replaced agent 0 finds early members in its backlog.
        self._listeners = {role: _listen() for role in self._agents if self.LISTENS}
        if spec.details.get("needs_bundle"):
            from muster.schedulers.bundle import build_agent_bundle  # the submission waits for our imports

            (self.folder.state_dir / AGENT_BUNDLE_NAME).write_bytes(build_agent_bundle())

    def build_launch(self, replica: ReplicaId, start_number: int) -> Launch:
        """Build what a replica runs: its command, under a guard if it is not an agent, which brings its own.

        Args:
            replica: the one to start.
            start_number: see `ReplicaDriver.start`.

        Raises:
            StartError: it cannot be started.
        """
        plan = self._find_plan(replica)
        listener = self._listeners.get(replica.role)
        keeps = listener is not None and replica.index == 0
        return Launch(
            command=plan["command"] if self.runs_agent(replica) else _guard_command(self.spec, plan["command"]),
            env=self.build_env(plan, replica, start_number, listener),
            cwd=plan["cwd"],
            keep_fds=[listener.fileno()] if listener is not None and keeps else (),
        )

    def runs_agent(self, replica: ReplicaId) -> bool:
        """Return whether a replica runs the agent."""
        return replica.role in self._agents

    def start(self, replica: ReplicaId, start_number: int) -> Handle:
        """See `ReplicaDriver`."""
        return self.launch(replica, lambda: self.build_launch(replica, start_number))

    def launch(self, replica: ReplicaId, build: Callable[[], Launch]) -> Handle:
        """Start a process for a replica, capture its output and watch for its end.

        Args:
            replica: the one that it is, or stands for.
            build: returns what to start. Its errors become a `StartError`, too.

        Raises:
            StartError: nothing was started.
        """
        try:
            capture = Capture(self._event_queue, self.folder.replica_dir(replica))
        except OSError as error:  # a full disk, or no descriptors left
            raise StartError(f"{error.filename or self.folder.path}: {error.strerror}") from error
        try:
            pid = spawn(build(), *capture.write_fds)
        except (StartError, OSError) as error:
            capture.close()
            raise error if isinstance(error, StartError) else StartError(str(error)) from error
        capture.close_write_ends()
        self._watch(replica, pid, os.pidfd_open(pid), capture)
        process = ProcessId.of(pid)
        return {"pid": pid, "start_ticks": "" if process is None else process.start_ticks}

    def adopt(self, replica: ReplicaId, handle: Handle) -> bool:
        """See `ReplicaDriver`. Replicas of an earlier supervisor are about to end: they got their death signal."""
        process = ProcessId(pid=handle["pid"], start_ticks=handle["start_ticks"])
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return False
        # The descriptor now means this process for good.
        if not process.is_alive():
            os.close(pidfd)
            return False
        self._watch(replica, process.pid, pidfd, None)
        self._event_queue.set_timer(f"adopted {replica}", ADOPTED_LIMIT_S, lambda: self._kill_tree(replica))
        return True

    def stop(self, replica: ReplicaId, *, is_interrupt: bool = False) -> None:
        """See `ReplicaDriver`. A suspended guard handles the signal only when it continues."""
        is_interrupt = is_interrupt and self.runs_agent(replica) and replica in self._running
        # A starting Python may lose SIGINT, or print a traceback.
        is_interrupt = is_interrupt and _catches_sigterm(self._running[replica].pid)
        self.send_signal(replica, signal.SIGINT if is_interrupt else signal.SIGTERM)
        self.send_signal(replica, signal.SIGCONT)

    def print_line(self, replica: ReplicaId, text: str) -> None:
        """Add a line to a replica's log, if it runs."""
        running = self._running.get(replica)
        if running is not None and running.capture is not None:
            running.capture.write_line(text)

    def suspend(self, *, suspended: bool) -> None:
        """See `ReplicaDriver`. Each guard stops all below it, and then itself."""
        for replica in self._running:
            self.send_signal(replica, signal.SIGTSTP if suspended else signal.SIGCONT)

    def kill(self, replica: ReplicaId) -> None:
        """See `ReplicaDriver`. The guard's descendants become children of this process, which kills them at its end."""
        self.send_signal(replica, signal.SIGKILL)

    def close(self, *, succeeded: bool) -> None:  # noqa: ARG002  # all files stay
        """See `ReplicaDriver`."""
        for listener in self._listeners.values():
            listener.close()

    def build_env(
        self, plan: Mapping[str, Any], replica: ReplicaId, start_number: int, listener: socket.socket | None = None
    ) -> dict[str, str]:
        """Build all variables of a replica.

        Args:
            plan: its `ReplicaPlan`.
            replica: the one to start.
            start_number: see `ReplicaDriver.start`.
            listener: its role's, if the driver has one.
        """
        roles = build_role_env(self.spec.roles, self.spec.app_id, replica.role, self.find_hosts())
        env = {**self.spec.details["base_env"], **roles, **plan["env"]}
        if start_number > 1 and Env.AFTER in env and self._has_ended(env[Env.AFTER].rpartition(" ")[0]):
            del env[Env.AFTER]  # it would wait for ever
        if self.runs_agent(replica):
            # Alone, no member remembers the last round.
            has_others = any(each.role == replica.role and each != replica for each in self._running)
            if start_number > 1 and has_others:
                env[Env.INCARNATION] = str(start_number - 1)
            elif start_number > 1:
                env[Env.JOB_INCARNATION] = str(start_number)
            env[Env.TOKEN] = derive_token(self.spec.details["token"], replica.role)
        if self.LISTENS:
            env[Env.RANK0_HOST] = LOOPBACK
        if listener is not None:
            env[Env.RDZV_PORT] = str(listener.getsockname()[1])
            if replica.index == 0:
                env[Env.RDZV_FD] = str(listener.fileno())
        return env

    def _has_ended(self, role: str) -> bool:
        """Return whether a role has ended, by the app's record."""
        record = self.folder.read_record()
        left = (ReplicaStatus.WAITING, ReplicaStatus.RUNNING)
        known = {} if record is None else record.app.replicas
        return bool(known) and not any(each.role == role and state.status in left for each, state in known.items())

    def find_hosts(self) -> Mapping[str, Sequence[str]]:
        """Return of each role the host names of its replicas, by index."""
        return {role.name: [LOOPBACK] * role.replicas for role in self.spec.roles}

    def _find_plan(self, replica: ReplicaId) -> Mapping[str, Any]:
        plan: Mapping[str, Any] = self.spec.details["replicas"][replica.role][replica.index]
        return plan

    def _watch(self, replica: ReplicaId, pid: int, pidfd: int, capture: Capture | None) -> None:
        self._running[replica] = _Running(pid=pid, pidfd=pidfd, capture=capture)
        self._event_queue.watch_readable(pidfd, lambda: self._handle_end(replica))

    def _handle_end(self, replica: ReplicaId) -> None:
        running = self._running.pop(replica)
        self._event_queue.unwatch(running.pidfd)
        self._event_queue.clear_timer(f"adopted {replica}")
        os.close(running.pidfd)
        if running.capture is None:
            why = (Reason(code=Code.SUPERVISOR_DIED),)
            self._event_queue.post(ReplicaEnded(replica=replica, exit_code=None, reasons=why))
            return
        code = os.waitstatus_to_exitcode(os.waitpid(running.pid, 0)[1])
        kill_orphans({each.pid for each in self._running.values()})
        running.capture.close()  # after the last writer
        exit_code, reasons = self.explain_end(replica, code if code >= 0 else 128 - code)
        self._event_queue.post(ReplicaEnded(replica=replica, exit_code=exit_code, reasons=reasons))

    def explain_end(self, replica: ReplicaId, code: int) -> tuple[int | None, Reasons]:
        """Say what the end of a replica's process means.

        Args:
            replica: which has ended.
            code: of its process. 128 + n stands for signal n.

        Returns:
            The replica's exit code, None if it is lost, and why. Empty: nothing more is known.
        """
        return code, self._read_reasons(replica, code) if code in NEVER_RETRY else ()

    def find_log_dir(self, replica: ReplicaId) -> Path | None:
        """Return the folder here with what a replica's agent has reported. None: there is none."""
        path = self._find_plan(replica)["env"].get(Env.LOG_DIR)
        return None if path is None else Path(path)

    def _read_reasons(self, replica: ReplicaId, code: int) -> Reasons:
        """Return why the job failed, as its agents reported it. Empty: they left no report."""
        log_dir = self.find_log_dir(replica)
        if not self.runs_agent(replica) or log_dir is None:
            return ()
        if code == ExitCode.USAGE:
            return find_usage_line(
                read_tail(log_path(self.folder.replica_dir(replica), "stderr"), USAGE_LINE_LIMIT_BYTES)
            )
        report = read_report(log_dir)
        return () if report is None else (explain_report(report),)

    def send_signal(self, replica: ReplicaId, signum: int) -> None:
        """Send a signal to a replica's process, if it runs."""
        running = self._running.get(replica)
        if running is not None:
            try:
                signal.pidfd_send_signal(running.pidfd, signum)
            except ProcessLookupError:
                return  # it has ended; `_handle_end` runs soon

    def _kill_tree(self, replica: ReplicaId) -> None:
        running = self._running.get(replica)
        if running is not None:
            processes.kill_descendants(running.pid)
            self.send_signal(replica, signal.SIGKILL)


def spawn(launch: Launch, stdout_fd: int, stderr_fd: int) -> int:
    """Start a process that leads its own session and gets SIGTERM when the calling thread ends.

    Args:
        launch: what to start.
        stdout_fd: becomes its standard output.
        stderr_fd: becomes its standard error.

    Returns:
        Its pid. The caller waits for it.

    Raises:
        StartError: the folder or the program is not there.
        OSError: no process or descriptor is left.
    """
    with open(os.devnull, "rb") as null:
        streams = (null.fileno(), stdout_fd, stderr_fd)
        try:
            return processes.spawn_program(
                launch.command, launch.env, launch.cwd, streams, launch.keep_fds, death_signal=signal.SIGTERM
            )
        except OSError as error:
            if error.filename is None:
                raise
            raise StartError(f"{error.filename!r}: {error.strerror}") from error


def _catches_sigterm(pid: int) -> bool:
    """Return whether a guard handles signals already.

    It sets all handlers together, and Python itself sets none for SIGTERM.
    """
    caught = processes.read_status(pid).get("SigCgt", "0")
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def kill_orphans(guards: set[int]) -> None:
    """Kill and reap the children of this process that are not live guards, and all their descendants.

    Commands that a thread of this process has started, and waits for, are no orphans. They are in this process's
    session, which nothing below a guard can be in: see `spawn`.
    """
    session = str(os.getsid(0))
    deadline_s = time.monotonic() + ORPHAN_LIMIT_S
    while time.monotonic() < deadline_s:
        stats = {pid: stat for pid in processes.list_pids() if (stat := processes.read_stat(pid)) is not None}
        children = [pid for pid, stat in stats.items() if int(stat[1]) == os.getpid() and pid not in guards]
        ours = [pid for pid in children if stats[pid][3] != session]  # also ended ones, until they are reaped
        if not ours:
            return
        for pid in ours:
            processes.kill_descendants(pid)
            processes.send_signal([pid], signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def create_driver(*, spec: AppSpec, event_queue: EventQueue) -> ProcessDriver:
    """Return the `driver.DriverFactory` of programs of this machine."""
    return ProcessDriver(spec=spec, event_queue=event_queue)


def _listen() -> socket.socket:
    listener = socket.create_server((LOOPBACK, 0), backlog=4096)
    listener.setblocking(False)
    return listener


def _guard_command(spec: AppSpec, command: list[str]) -> list[str]:
    """Build the command that runs `command` under the guard, without imports from the working directory."""
    program = (
        f"import sys; sys.path[:] = [*(path for path in sys.path if path), {spec.import_root!r}]\n"
        "from muster._shared.guard import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    return [sys.executable, "-c", program, "--", *command]
