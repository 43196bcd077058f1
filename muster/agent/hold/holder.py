"""Holds one node: keeps a waiting agent with its template, and gives it to the next run.

    guard -> holder -> waiting guard -> agent -> template         between runs
    guard -> holder -> the run's guard -> agent -> workers        the same processes, once a run has come

Another agent waits after the end of each run. Runs arrive over a socket in a folder that only this user can enter. Each
connection is one `client`, which sends one message with a memory file and its descriptors, and then signals. It gets
one answer, and the exit code in the end. When it ends, its run ends. There is one run at a time: a second one is
refused with the name of the first, unless the first is ending or has no agent yet. A run from another machine first
claims the node, before its files travel. The holder adds what its order does not say. Waiting agents begin as forks of
one process that has imported: `original` says how.

On one machine node 0 decides that the hold is idle, and the others end with it, by a connection that they keep. On
several machines each node decides, node 0 first, because a run claims all nodes of a hold, even those that it does not
use.
"""

import contextlib
import errno
import json
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from muster._shared import guard, holder_socket, processes
from muster._shared.contract import WAITING_FLAG, Env, ExitCode, HoldKey, WaitingRole, find_hold_dir
from muster._shared.guard import STOP_LIMIT_VARIABLE
from muster.agent.hold import facts
from muster.agent.hold.listening import MESSAGE_BYTES, Listener, Message, Order, close_all, send

_END_LIMIT_S: Final = 1.0


class WaitingAgent:
    """A guard with its agent, before or during its run, or until it turns out that it could not be started."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.pid = 0
        """The guard's; 0: not known yet."""
        self.pidfd = -1
        self.is_ready = False

    def receive(self) -> dict[str, object] | None:
        """Return what the agent tells when it is ready; empty: the guard has told its pid. None: nothing more comes."""
        try:
            data, fds, _flags, _address = socket.recv_fds(self.control, MESSAGE_BYTES, 1)
        except OSError:
            return None
        if not data:
            return None
        message: dict[str, object] = json.loads(data)
        if not fds:
            self.is_ready = True
            return message
        self.pid, (self.pidfd,) = int(str(message["guard"])), fds
        return {}

    def end(self) -> None:
        """Close the connection: the guard sees its end, and kills all below it."""
        self.control.close()

    def collect(self) -> int:
        """Collect the guard when it has ended; its exit code, negative where a signal ended it."""
        self.control.close()
        os.close(self.pidfd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Original:
    """The process whose forks wait. It ends with this one."""

    def __init__(self, command: Sequence[str], flags: Sequence[str], env: Mapping[str, str]) -> None:
        """Start it.

        Args:
            command: of agents, without flags.
            flags: of agents, without a program.
            env: theirs.
        """
        self._order_fd = os.memfd_create("order")
        os.write(self._order_fd, json.dumps({"command": command, "flags": flags, "env": dict(env)}).encode())
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [*command, WAITING_FLAG, WaitingRole.ORIGINAL, str(theirs.fileno()), *flags]
        with theirs:
            self.pid = processes.spawn(
                lambda: os.execve(argv[0], argv, dict(env)),  # noqa: S606  # no shell, on purpose
                (0, 1, 2),
                [theirs.fileno()],
                death_signal=signal.SIGTERM,
                keeps_ignored=True,
            )

    def has_ended(self) -> bool:
        """Return whether it has; it never says anything."""
        return processes.wait_readable(self.control.fileno(), 0.0)

    def start_waiting(self) -> WaitingAgent:
        """Have a guard with an agent forked, when it has imported."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lease = guard.make_lease_fds()
        with theirs, contextlib.suppress(OSError):  # it has ended, so the connection does
            socket.send_fds(self.control, [b"+"], [self._order_fd, theirs.fileno(), 0, 1, 2, *lease])
        for fd in lease:
            os.close(fd)
        return WaitingAgent(ours)

    def end(self) -> None:
        """Close the connection, and collect it."""
        self.control.close()
        os.close(self._order_fd)
        processes.send_signal([self.pid], signal.SIGKILL)
        os.waitpid(self.pid, 0)


def end_orphans(known: Collection[int]) -> None:
    """Kill and collect what the guard of a job has left behind, if that was killed: it is this process's now.

    Args:
        known: children that are none.
    """
    deadline_s = time.monotonic() + _END_LIMIT_S
    while orphans := _list_children().difference(known):
        for pid in orphans:
            processes.kill_descendants(pid)
        processes.send_signal(orphans, signal.SIGKILL)
        for pid in orphans:
            os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline_s:
            return  # the kernel cannot end it now
        time.sleep(0.001)


def _list_children() -> set[int]:
    """Return this process's children, also those that have ended."""
    return {
        pid
        for pid in processes.list_pids()
        if (stat := processes.read_stat(pid)) is not None and int(stat[1]) == os.getpid()
    }


_FAILED_STARTS: Final = 3
"""After this many agents that ended before they were ready, runs start cold."""
_JOIN_S: Final = 60.0
_LOOK_S: Final = 0.5
_BEHIND_S: Final = 0.12
"""How long the next agent's start leaves the CPUs to the end of a run's command, unless another run has come."""
_LAST_S: Final = 20.0
"""How much later than node 0 the other nodes on several machines are idle, because a run claims node 0 first."""
_GUARD_VARIABLES: Final = (STOP_LIMIT_VARIABLE, Env.STOPS_TOGETHER)
"""What a guard reads when it starts; only a run of an adapter has the second variable."""


class Holder:
    """One node of a hold. Use it once."""

    def __init__(self, index: int, idle_s: float, flags: list[str]) -> None:
        """Make the folder and listen.

        Args:
            index: the node's.
            idle_s: node 0 ends the hold after this time without a run.
            flags: the agent's, without a program.

        Raises:
            OSError: the folder cannot be made, or is another user's.
        """
        self._index = index
        self._is_local = os.environ.get(Env.LOGS_HERE) == "1"
        self._idle_s = idle_s if self._is_local or index == 0 else idle_s + _LAST_S
        self._flags = flags
        self._facts = facts.read_facts()
        count = len(sys.argv) - 1
        self._prefix = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - count]]
        self._folder = _make_folder(index)
        self._loop = Listener(self._folder, self._handle)
        self._original: Original | None = None
        self._waiting: WaitingAgent | None = None
        self._failed = 0
        self._about: dict[str, object] = {}
        """What the waiting agent has reported."""
        self._connection: socket.socket | None = None
        """The connection of the run on this node, even while the run ends; then None with `_run` set."""
        self._run = ""
        self._is_cold = False
        self._claim: tuple[socket.socket, str] | None = None
        """A run that has come for this node, but whose order has not."""
        self._queue: deque[tuple[socket.socket, str, list[int]]] = deque()
        self._members: list[socket.socket] = []
        self._since_s = time.monotonic()
        self._start_at_s = 0.0
        """When the next agent starts. 0: it has started."""
        self._code: int | None = None
        self._last_code: int | None = None
        """The exit code after the run on this node; None if another agent waits then."""

    def run(self) -> int:
        """Hold the node until it is released or idle; return the exit code."""
        processes.become_subreaper()  # guards become children of this process
        self._loop.watch_signals((signal.SIGTERM, signal.SIGINT, signal.SIGCHLD), self._hear_signals)
        decides = self._index == 0 or not self._is_local
        if not decides:
            self._join()
        self._start_waiting()
        while self._code is None:
            self._loop.wait(_BEHIND_S if self._start_at_s else _LOOK_S if decides else None)
            if self._start_at_s and self._code is None and self._is_due():
                self._start_waiting()
            if decides and self._is_idle() and time.monotonic() - self._since_s >= self._idle_s:
                processes.write_stderr(f"muster: this hold was idle for {self._idle_s / 60:g} min and ends\n")
                self._code = int(ExitCode.SUCCEEDED)
        self._write_state("ended")
        os.unlink(os.path.join(self._folder, holder_socket.SOCKET))
        if self._waiting is not None:
            self._waiting.end()
            if self._waiting.pid:
                self._waiting.collect()
        if self._original is not None:
            self._original.end()
        return self._code

    def _hear_signals(self, signums: bytes) -> None:
        if signal.SIGCHLD in signums:
            self._end_orphans()
        if others := bytes(set(signums) - {signal.SIGCHLD}):
            self._stop(others)

    def _end_orphans(self) -> None:
        guard_pid = -1 if self._waiting is None else self._waiting.pid
        if guard_pid:  # else it may be a child already
            end_orphans([guard_pid, -1 if self._original is None else self._original.pid])

    def _stop(self, signums: bytes) -> None:
        """Stop a run on the hold like any job, with the grace that the hold's supervisor gives."""
        if self._run and self._waiting is not None and not self._is_cold:
            for signum in signums:
                processes.send_signal([self._waiting.pid], signum)
            self._last_code = ExitCode.of_signal(signums[0])
            return
        self._code = ExitCode.of_signal(signums[0])

    def _join(self) -> None:
        """Join node 0, which may start later and whose end is the hold's end."""
        folder = find_hold_dir(os.environ[Env.LOG_DIR], 0)
        deadline_s = time.monotonic() + _JOIN_S
        while True:
            try:
                first = holder_socket.connect(folder)
                break
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
        first.send(b'{"member": true}')
        self._members.append(first)

        def end() -> None:
            self._loop.unwatch(first)
            self._code = int(ExitCode.SUCCEEDED)

        self._loop.watch(first, end)

    # -- the agent that waits ---------------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        return bool(self._queue) or self._claim is not None or time.monotonic() >= self._start_at_s

    def _start_waiting(self) -> None:
        self._start_at_s = 0.0
        if self._failed >= _FAILED_STARTS:
            self._write_state("cold")
            self._serve_next()
            return
        if self._original is not None and self._original.has_ended():
            self._lose_original()
        if self._original is None:
            self._original = Original(self._prefix, self._flags, os.environ)
            self._loop.watch(self._original.control, self._lose_original)
        self._waiting = self._original.start_waiting()
        self._loop.watch(self._waiting.control, self._hear_waiting)
        self._write_state(self._name_state())

    def _lose_original(self) -> None:
        """Collect it: it has ended, and the next agent's start makes another one."""
        assert self._original is not None  # noqa: S101  # its connection is watched
        self._loop.unwatch(self._original.control)
        self._original.end()
        self._original = None

    def _hear_waiting(self) -> None:
        made = self._waiting
        assert made is not None  # noqa: S101  # its socket is watched
        about = made.receive()
        if about is None:
            self._loop.unwatch(made.control)  # about to end
            if not made.pid:
                made.end()
                self._waiting = None
                self._failed += 1
                self._start_waiting()
            return
        if not made.is_ready:
            self._loop.watch(made.pidfd, self._handle_end)
            self._end_orphans()
            return
        self._about = about
        self._failed = 0
        self._since_s = time.monotonic()  # nothing could run here, so it was not idle
        self._write_state(self._name_state())
        self._serve_next()

    def _handle_end(self) -> None:
        """Tell the run its exit code, and let another agent start soon."""
        made, self._waiting = self._waiting, None
        assert made is not None  # noqa: S101  # its pidfd is watched
        self._loop.unwatch(made.pidfd)
        self._loop.unwatch(made.control)
        code = made.collect()
        if self._run and not self._is_cold:
            send(self._connection, {"exit": code if code >= 0 else 128 - code})
            self._free()
        elif not made.is_ready:
            self._failed += 1
        if self._last_code is not None:
            self._code = self._last_code
        else:
            self._start_at_s = time.monotonic() + _BEHIND_S

    # -- runs -------------------------------------------------------------------------------------------------------

    def _handle(self, connection: socket.socket, message: Message, fds: list[int]) -> None:
        if "run" in message and fds and connection is not self._connection:
            self._receive_run(connection, message["run"], fds)
            return
        close_all(fds)
        if "member" in message:
            self._members.append(connection)
        elif "claim" in message:
            self._receive_claim(connection, message["claim"])
        elif "signal" in message and connection is not self._connection:
            if message["signal"] not in (signal.SIGTSTP, signal.SIGCONT):  # it waits for an agent
                send(connection, {"exit": ExitCode.of_signal(message["signal"])})
        elif "signal" in message and self._waiting is not None and not self._is_cold:
            processes.send_signal([self._waiting.pid], message["signal"])
        elif not message:
            self._lose_client(connection)

    def _lose_client(self, connection: socket.socket) -> None:
        """End the run, because its client has ended."""
        self._loop.unwatch(connection)
        connection.close()
        for each in [each for each in self._queue if each[0] is connection]:
            self._queue.remove(each)
            close_all(each[2])
        if connection in self._members:
            self._members.remove(connection)
        if self._claim is not None and connection is self._claim[0]:
            self._claim = None
            self._since_s = time.monotonic()
            self._write_state(self._name_state())
        if connection is not self._connection:
            return
        self._connection = None
        if self._is_cold or self._waiting is None:
            self._free()
            self._serve_next()
        else:
            self._loop.unwatch(self._waiting.control)
            self._waiting.end()

    def _find_other(self) -> str:
        """Return the name of a run that has this node, or has come for it; "" if there is none."""
        if self._claim is not None:
            return self._claim[1]
        if self._connection is None and not self._queue:
            return ""
        return self._run or self._queue[0][1]

    def _refuse(self, connection: socket.socket, other: str) -> None:
        line = f"this hold runs {other} now; with -cfg wait=true a run waits for it"
        send(connection, {"refused": line, "run": other})

    def _receive_claim(self, connection: socket.socket, name: str) -> None:
        if other := self._find_other():
            self._refuse(connection, other)
            return
        self._claim = connection, name
        self._write_state(self._name_state())
        send(connection, {"claimed": name})

    def _receive_run(self, connection: socket.socket, name: str, fds: list[int]) -> None:
        if self._claim is not None and self._claim[0] is connection:
            self._claim = None
        if other := self._find_other():
            self._refuse(connection, other)
            close_all(fds)
            return
        self._queue.append((connection, name, fds))
        self._serve_next()

    def _serve_next(self) -> None:
        """Give the waiting agent to the next run, if both are there."""
        if not (self._queue and self._is_free()):
            return
        connection, self._run, fds = self._queue.popleft()
        self._connection = connection
        with os.fdopen(os.dup(fds[0]), "rb") as file:
            file.seek(0)
            order: Order = json.loads(file.read())
        if "facts" not in order:
            self._complete(fds[0], order)
        reason = "no agent can wait here" if self._failed >= _FAILED_STARTS else self._find_difference(order)
        self._is_cold = bool(reason)
        if reason:
            send(connection, {"cold": reason})
        elif self._waiting is not None:
            try:
                socket.send_fds(self._waiting.control, [b"!"], fds)
            except OSError:  # it was killed just now: the run gets the next one
                self._queue.appendleft((connection, self._run, fds))
                self._waiting.is_ready, self._run, self._connection = False, "", None
                return
        close_all(fds)
        self._write_state("busy")

    def _complete(self, fd: int, order: Order) -> None:
        """Add to the order of another machine's run what its processes get from this one."""
        content = json.dumps({**facts.read_settings(facts.read_facts()), **order}).encode()
        os.ftruncate(fd, 0)
        os.pwrite(fd, content, 0)

    def _is_idle(self) -> bool:
        return self._is_free() and self._claim is None

    def _is_free(self) -> bool:
        """Return whether a run could begin now."""
        can_start = self._failed >= _FAILED_STARTS or (self._waiting is not None and self._waiting.is_ready)
        return not self._run and can_start

    def _free(self) -> None:
        self._run, self._connection, self._is_cold = "", None, False
        self._since_s = time.monotonic()
        self._write_state(self._name_state())

    def _find_difference(self, order: Order) -> str:
        """Return why a process here cannot become what the client's would be; "" if it can."""
        if "facts" not in order:  # from another machine
            return ""
        reason = facts.find_difference(order, self._facts, self._prefix)
        if reason:
            return reason
        env = order["env"]
        for name in _GUARD_VARIABLES[:1] if "driven" in order else _GUARD_VARIABLES:
            if env.get(name) != os.environ.get(name):
                return f"{name} is not the hold's"
        return ""

    # -- telling ----------------------------------------------------------------------------------------------------

    def _name_state(self) -> str:
        if self._run or self._claim is not None:
            return "busy"
        return "ready" if self._waiting and self._waiting.is_ready else "starting"

    def _write_state(self, state: str) -> None:
        run = self._run or (self._claim[1] if self._claim is not None else "")
        self._loop.write_state(
            {
                HoldKey.STATE: state,
                HoldKey.RUN: run,
                HoldKey.IDLE_SINCE_S: None if run else time.time() - (time.monotonic() - self._since_s),
                HoldKey.IDLE_LIMIT_S: self._idle_s,
                HoldKey.PID: os.getpid(),
                **self._about,
            }
        )


def hold(args: list[str]) -> int:
    """Hold this node and return the exit code.

    Args:
        args: the node's index and the idle limit in seconds as `INDEX:SECONDS`, and the agent's flags without a
            program.
    """
    index, _, idle_s = args[0].partition(":")
    flags = args[1:]
    listener = os.environ.pop(Env.RDZV_FD, None)
    if listener is not None:
        os.close(int(listener))  # agents of a hold never lead
    try:
        return Holder(int(index), float(idle_s), flags).run()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        processes.write_stderr(f"muster: cannot hold this node: {where}{error.strerror}\n")
        return int(ExitCode.WORKERS_FAILED)


def _make_folder(index: int) -> str:
    """Make the folder of the socket, for this user only."""
    folder = find_hold_dir(os.environ[Env.LOG_DIR], index)
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    status = os.lstat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & 0o170077 != 0o040000:
        raise PermissionError(errno.EPERM, "it must be a folder of this user alone", folder)
    return folder
