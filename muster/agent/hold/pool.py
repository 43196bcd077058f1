"""The default hold of a user: keeps agents with torch imported for everyday jobs on this machine, several at a time.

    pool -> waiting guard -> agent -> template           between jobs
    pool -> a job's guard -> agent -> workers            the same processes, once a job has come

Clients reach it as they reach a holder (`client --default`), but what follows is the opposite. Once a client has an
agent, the agent's guard has the client's connection, and the pool has no part in the job any more. So jobs continue
when the pool ends, however that happens, and nothing waits for it.

An agent can only become a process that was started with the same command, the same variables that are read at imports,
and as many cores (`wishes`). A client without such an agent starts cold, and the pool keeps agents of that kind ready
later. It keeps as many as one of the last jobs had nodes, the most recent kinds first, and never more in total than
there are cores. It does not import while a client's job has just begun, because the job comes first. Of a client's
environment it keeps only variables that are read at imports.

The pool is no descendant of any job. From the process that started it, it keeps only uid, groups, namespaces, cgroup
and hard limits. Clients for which these differ start cold, and one line says so. It begins again, as the same process,
when packages were installed or removed. `_shared.holds.default` says where it is.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from muster._shared import processes
from muster._shared.contract import HOLD_STATE_NAME, HoldKey
from muster._shared.holds import connection as hold_socket
from muster._shared.holds import default as default_hold
from muster.agent.hold import difference, facts
from muster.agent.hold.agents import Original, WaitingAgent, end_orphans
from muster.agent.hold.listening import Listener, Message, Order, StartedWith, close_all, send
from muster.agent.hold.waiting import HANDED
from muster.agent.hold.wishes import FAILED_STARTS, Wish, is_other_cgroup, read_stamps, read_wish

LOG_NAME: Final = "log"
_MOST_AGENTS: Final = 8
_HOLD_BACK_S: Final = 10.0
"""How long after the start of a job that still runs nothing is imported."""
_STOP_S: Final = 10.0
_CONTROLLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class Pool:
    """The default hold. Use it once."""

    def __init__(self, folder: str, command: Sequence[str], started_with: StartedWith) -> None:
        """Listen.

        Args:
            folder: a folder that exists and is locked by this process.
            command: the command that starts an agent, without flags.
            started_with: what its starter has written.

        Raises:
            OSError: the socket cannot be made.
        """
        self._folder = folder
        self._command = list(command)
        self._idle_s = started_with["idle_limit_s"]
        self._stamps = read_stamps()
        self._facts = facts.read_facts()
        self._most = min(_MOST_AGENTS, max(1, processes.count_allowed_cores()))
        self._wishes: OrderedDict[str, Wish] = OrderedDict()
        """Wishes by key, the most recent last."""
        self._originals: dict[Wish, Original] = {}
        self._agents: dict[WaitingAgent, Wish] = {}
        self._running: set[int] = set()
        """Guards of jobs."""
        self._cold: set[socket.socket] = set()
        """Connections of clients that have started cold. They close with the job."""
        self._about: dict[str, object] = {}
        self._loop = Listener(folder, self._handle)
        self._first_fd = self._watch_first(started_with["after_pid"])
        self._begun_s = time.monotonic()
        """When the last job began."""
        self._since_s = time.monotonic()
        self._is_over = False
        for pid in started_with.get("running", ()):
            self._watch_guard(pid, os.pidfd_open(pid))
        for order in started_with["orders"]:
            self._note(read_wish(order), order["name"])

    def run(self) -> None:
        """Hold until the user does not want it any more, or it was idle for too long."""
        self._loop.watch_signals(_CONTROLLED, self._hear_signals)
        self._end_orphans()
        while not self._is_over:
            self._fill()
            self._write_state()
            self._loop.wait(self._find_pause_s())
            if self._is_idle() and time.monotonic() >= self._since_s + self._idle_s:
                self._is_over = True
        self._end()

    def _find_pause_s(self) -> float | None:
        now_s = time.monotonic()
        if self._is_idle():
            return max(0.0, self._since_s + self._idle_s - now_s)
        left_s = self._begun_s + _HOLD_BACK_S - now_s
        return left_s + 0.01 if left_s > 0 else None

    def _is_idle(self) -> bool:
        return not (self._running or self._cold or self._first_fd >= 0)

    def _hear_signals(self, signums: bytes) -> None:
        if signal.SIGCHLD in signums:
            self._end_orphans()
        if set(signums) - {signal.SIGCHLD}:
            self._is_over = True

    def _watch_first(self, pid: int) -> int:
        """Watch the process whose job has started this one, and return its pidfd; -1 if there is none."""
        try:
            fd = os.pidfd_open(pid) if pid else -1
        except OSError:
            return -1
        if fd >= 0:
            self._loop.watch(fd, self._lose_first)
        return fd

    def _lose_first(self) -> None:
        self._loop.unwatch(self._first_fd)
        os.close(self._first_fd)
        self._first_fd = -1
        self._since_s = time.monotonic()

    # -- agents that wait -------------------------------------------------------------------------------------------

    def _note(self, wish: Wish | None, job: str) -> Wish | None:
        """Note that a job has wished for an agent, and return the wish that is kept."""
        if wish is None:
            return None
        kept = self._wishes.setdefault(wish.key, wish)
        self._wishes.move_to_end(wish.key)
        kept.add(job)
        return kept

    def _fill(self) -> None:
        """Start missing agents, and end those for which there is no room."""
        if not self._is_idle() and time.monotonic() < self._begun_s + _HOLD_BACK_S:
            return
        room = self._most
        for wish in reversed([*self._wishes.values()]):
            waiting = [each for each, its in self._agents.items() if its is wish]
            count = min(wish.count, room)
            room -= count
            for each in waiting[count:]:
                self._end_agent(each)
            if count > len(waiting) and read_stamps() != self._stamps:
                self._begin_again()
            for _ in range(count - len(waiting)):
                self._start_agent(wish)
            if not count:
                self._end_original(wish)
            if not count and not wish.failed:
                del self._wishes[wish.key]

    def _start_agent(self, wish: Wish) -> None:
        original = self._originals.get(wish)
        if original is not None and original.has_ended():
            self._end_original(wish)
            original = None
        if original is None:
            original = self._originals[wish] = Original(wish.command, wish.flags, wish.env, wish.cpus)
            self._loop.watch(original.control, lambda: self._end_original(wish))
        made = original.start_waiting()
        self._agents[made] = wish
        self._loop.watch(made.control, lambda: self._hear_agent(made))

    def _end_original(self, wish: Wish) -> None:
        original = self._originals.pop(wish, None)
        if original is not None:
            self._loop.unwatch(original.control)
            original.end()

    def _hear_agent(self, agent: WaitingAgent) -> None:
        about = agent.receive()
        if about is None:
            self._loop.unwatch(agent.control)  # about to end
            if not agent.pid:
                agent.end()
                self._agents.pop(agent).failed += 1
        elif agent.is_ready:
            self._about = about
            self._agents[agent].failed = 0
        else:
            self._watch_guard(agent.pid, agent.pidfd, agent)
            self._end_orphans()

    def _watch_guard(self, pid: int, pidfd: int, agent: WaitingAgent | None = None) -> None:
        """Collect a guard when it has ended; without an agent, it is a job's now."""
        if agent is None:
            self._running.add(pid)

        def collect() -> None:
            self._loop.unwatch(pidfd)
            os.close(pidfd)
            os.waitpid(pid, 0)
            if agent in self._agents:
                self._forget_control(agent)
                self._agents.pop(agent).failed += not agent.is_ready
            if pid in self._running:
                self._running.discard(pid)
                self._since_s = time.monotonic()

        self._loop.watch(pidfd, collect)

    def _end_agent(self, agent: WaitingAgent) -> None:
        """Close the agent's connection: its guard sees that, and kills all below it."""
        agent.is_ready = True  # not its fault
        self._forget_control(agent)
        if not agent.pid:
            del self._agents[agent]

    def _forget_control(self, agent: WaitingAgent) -> None:
        self._loop.unwatch(agent.control)
        agent.end()

    def _end_orphans(self) -> None:
        if all(each.pid for each in self._agents):  # else one may be a child already
            originals = (each.pid for each in self._originals.values())
            end_orphans([*self._running, *(each.pid for each in self._agents), *originals])

    # -- clients ----------------------------------------------------------------------------------------------------

    def _handle(self, connection: socket.socket, message: Message, fds: list[int]) -> None:
        if "run" in message and fds:
            self._serve(connection, message["run"], fds)
        elif "end" in message:
            self._is_over = True  # closes once all is sent
        elif "idle_limit_s" in message:
            self._idle_s = message["idle_limit_s"]
        elif not message:
            self._lose_client(connection)
        close_all(fds)

    def _lose_client(self, connection: socket.socket) -> None:
        self._loop.unwatch(connection)
        connection.close()
        if connection in self._cold:
            self._cold.discard(connection)
            self._since_s = time.monotonic()

    def _serve(self, connection: socket.socket, job: str, fds: list[int]) -> None:
        """Hand an agent to a client, or tell the client to start cold."""
        order: Order = json.loads(os.pread(fds[0], os.fstat(fds[0]).st_size, 0))
        self._begun_s = self._since_s = time.monotonic()
        stamps = read_stamps()
        if stamps != self._stamps:
            changed = min(path for path in {*stamps, *self._stamps} if stamps.get(path) != self._stamps.get(path))
            what = "muster has changed" if changed.endswith(".py") else f"packages in {changed} have changed"
            send(connection, {"cold": f"{what}, and it begins again"})
            self._note(read_wish(order), job)
            self._begin_again()
        reason = self._find_difference(order)
        wish = None if reason else self._note(read_wish(order), job)
        agents = [each for each, its in self._agents.items() if its is wish and each.can_start]
        if wish is not None and wish.failed >= FAILED_STARTS:
            reason = f"no agent can wait there; {os.path.join(self._folder, LOG_NAME)} may say why"
        if reason or not agents:
            self._cold.add(connection)
            send(connection, {"cold": reason})
            return
        self._hand(agents[0], connection, fds)

    def _find_difference(self, order: Order) -> str:
        if is_other_cgroup(order["facts"]["cgroup"], self._facts["cgroup"]):
            return "its cgroup is not the hold's"
        return difference.find_difference(order, self._facts, self._command)

    def _hand(self, agent: WaitingAgent, connection: socket.socket, fds: list[int]) -> None:
        del self._agents[agent]
        self._running.add(agent.pid)
        with contextlib.suppress(OSError):  # just killed: the client sees the end
            socket.send_fds(agent.control, [HANDED], [*fds, connection.fileno()])
        self._forget_control(agent)
        self._loop.unwatch(connection)
        connection.close()

    # -- the end ----------------------------------------------------------------------------------------------------

    def _begin_again(self) -> None:
        """Become a new pool with the same wishes, because the imports of this one may be of another version."""
        orders = [order for wish in self._wishes.values() for order in wish.build_orders()]
        for agent in self._agents:
            agent.end()
        running = [*self._running, *(each.pid for each in self._agents if each.pid)]  # waiting agents end too
        started_with = StartedWith(orders=orders, idle_limit_s=self._idle_s, after_pid=0, running=running)
        fd = os.memfd_create("orders")
        os.write(fd, json.dumps(started_with).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        os.dup2(fd, 0)
        signal.set_wakeup_fd(-1)
        command = [self._command[0], "-I", default_hold.POOL, default_hold.POOL_AGAIN, self._folder, *self._command]
        try:
            os.execve(command[0], command, os.environ)  # noqa: S606  # no shell, on purpose
        except OSError as error:  # this Python is gone
            processes.write_stderr(f"muster: {command[0]}: {error.strerror}\n")
            os._exit(1)

    def _end(self) -> None:
        for name in (hold_socket.SOCKET, HOLD_STATE_NAME, LOG_NAME):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, name))
        for path in (self._folder, os.path.dirname(self._folder)):
            with contextlib.suppress(OSError):  # the outer one may differ
                os.rmdir(path)
        for wish in [*self._originals]:
            self._end_original(wish)
        for agent in self._agents:
            self._forget_control(agent)
        deadline_s = time.monotonic() + _STOP_S
        for agent in self._agents:
            if agent.pid and not processes.wait_readable(agent.pidfd, deadline_s - time.monotonic()):
                processes.kill_descendants(agent.pid)
                processes.send_signal([agent.pid], signal.SIGKILL)
        end_orphans(self._running)

    def _write_state(self) -> None:
        starting = [each for each in self._agents if not each.is_ready]
        content: dict[str, object] = {
            HoldKey.STATE: "starting" if starting else "ready" if self._agents else "waiting",
            HoldKey.IDLE_SINCE_S: time.time() - (time.monotonic() - self._since_s) if self._is_idle() else None,
            HoldKey.IDLE_LIMIT_S: self._idle_s,
            HoldKey.PID: os.getpid(),
            "python": self._command[0],
            "agents": len(self._agents) - len(starting),
            "jobs": sorted(self._running),
        }
        about = {name: self._about[name] for name in (HoldKey.MODULES, HoldKey.IMPORT_S) if name in self._about}
        self._loop.write_state(content | about)


def lock_folder(folder: str) -> int | None:
    """Make the folder and lock it; return a descriptor that keeps the lock, or None if another pool has it.

    Raises:
        OSError: the folder cannot be made, or is not this user's alone.
    """
    while True:
        default_hold.make_folder(folder)
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # another has just ended
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(folder), os.fstat(fd)):
                return fd
        os.close(fd)


def detach(folder: str) -> None:
    """Keep nothing of the process that has started this one, except its standard input, which has been read."""
    with contextlib.suppress(PermissionError):  # begun again, so already a leader
        os.setsid()
    os.chdir("/")
    log = os.open(os.path.join(folder, LOG_NAME), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, number)
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, *processes.IGNORED_BY_PYTHON}:
        with contextlib.suppress(OSError, ValueError):  # reserved by the C library
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def main(argv: Sequence[str]) -> int:
    """Be the hold of `FOLDER PYTHON ENTRY` until it ends; return 0 at once if that folder has one."""
    is_again = argv[:1] == [default_hold.POOL_AGAIN]
    folder, *command = argv[is_again:]
    text = os.pread(0, os.fstat(0).st_size, 0)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if lock_folder(folder) is None:
        return 0
    detach(folder)
    processes.become_subreaper()
    pool = Pool(folder, command, json.loads(text))
    del text  # a job's environment
    pool.run()
    os._exit(0)  # now: who ends the hold waits until its connection closes, and takes it that nothing is left
