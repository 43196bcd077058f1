"""The original of a held node's templates: it imports once, and is never anything but forked.

A template must descend from the guard that ends all of its run, and have the original's memory. So guard and agent
begin as forks of it, too, and exec once their child exists (`elastic.fork.tree` does the same with a program)::

    holder --starts--> original --forks--> intermediate --forks--> guard --forks--> agent --forks--> template
                       waits for           ends                    execs            execs

The holder is a subreaper: the guard becomes its child. It sends one message for each agent that is to wait, with a
memory file (the command, flags and environment of agents), the guard's connection to the holder, standard streams, and
the lease's descriptors. The guard answers on its connection. Where none can be forked, that closes.

When packages were installed or removed, the original begins again by exec.
"""

import json
import os
import posix
import signal
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypedDict

from muster._shared import processes
from muster._shared.contract import WAITING_FLAG, WaitingRole
from muster._shared.records import record
from muster.agent.hold import thread_counts
from muster.agent.workers.spec import Program, ProgramKind
from muster.agent.workers.warm import fork_safety

if TYPE_CHECKING:
    from muster.agent.workers.warm.preload import EarlyImports

_MOST_FDS: Final = 8


class TreeOrder(TypedDict):
    """How guard and agent go on."""

    command: list[str]
    """Without flags."""
    flags: list[str]
    env: dict[str, str]


@record
class Copy:
    """What a template has that was forked from the original."""

    control: socket.socket
    """To the agent."""
    agent_pid: int
    known: frozenset[int]
    """Its descriptors."""
    hazard: str | None
    """Why no worker may be forked: a thread of the original's, say, which forks do not have."""


@record
class _Request:
    """For the tree of one agent."""

    fds: Sequence[int]
    """As they have come: order, connection, three streams, three of the lease."""
    control: socket.socket
    """The original's."""
    holder_pid: int
    mask: Collection[int]
    known: frozenset[int]
    hazard: str | None


def serve(control: socket.socket, early: "EarlyImports", known: frozenset[int]) -> Copy:
    """Fork on demand, and return in each template.

    Args:
        control: to the holder.
        early: what was imported.
        known: the descriptors from before that.
    """
    from muster.agent.workers.warm.preload import find_changed

    holder_pid, hazard = os.getppid(), fork_safety.find_hazard_now()
    while True:
        if not control.recv(1, socket.MSG_PEEK):
            os._exit(0)
        if find_changed(early) is not None:
            _begin_again(control)
        _message, fds, _flags, _address = socket.recv_fds(control, 4, _MOST_FDS)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        request = _Request(fds=fds, control=control, holder_pid=holder_pid, mask=mask, known=known, hazard=hazard)
        go_read, go_write = os.pipe()
        try:
            pid = posix.fork() if len(fds) == _MOST_FDS else -1  # else no descriptors were left
        except OSError:
            pid = -1
        if pid == 0:
            os.close(go_write)
            try:
                return _become_tree(request, go_read)
            except BaseException:  # noqa: BLE001  # whatever it is, it is not the original
                os._exit(1)
        for fd in (*fds, go_read):
            os.close(fd)
        if pid > 0:
            os.waitpid(pid, 0)
        os.close(go_write)  # only now is the guard the holder's child
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _begin_again(control: socket.socket) -> NoReturn:
    """Start again, as the same process."""
    for number in (1, 2):  # what the imports have printed
        os.ftruncate(number, 0)
        os.lseek(number, 0, os.SEEK_SET)
    os.set_inheritable(control.fileno(), True)
    processes.reset_ignored()
    with open("/proc/self/environ", "rb") as file:
        pairs = (os.fsdecode(each).partition("=") for each in file.read().split(b"\0") if b"=" in each)
        env = {name: value for name, _, value in pairs}
    os.execve(sys.executable, sys.orig_argv, env)  # noqa: S606  # no shell, on purpose


def _become_tree(request: _Request, go_read: int) -> Copy:
    """Fork the guard, and end; return in the template."""
    if posix.fork():
        os._exit(0)
    os.read(go_read, 1)
    os.close(go_read)
    processes.set_death_signal(signal.SIGTERM)
    if os.getppid() != request.holder_pid:
        os._exit(1)
    os.setsid()
    processes.become_subreaper()
    order_fd, connection_fd, *streams = request.fds[:5]
    order: TreeOrder = json.loads(os.pread(order_fd, os.fstat(order_fd).st_size, 0))
    printed = [_copy_file(number) for number in (1, 2)]
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    with socket.socket(fileno=os.dup(connection_fd)) as connection:
        pidfd = os.pidfd_open(os.getpid())
        socket.send_fds(connection, [json.dumps({"guard": os.getpid()}).encode()], [pidfd])
        os.close(pidfd)
    release, agents_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lease = request.fds[5:]
    pid = posix.fork()
    if pid == 0:
        release.close()
        return _become_agent(request, order, printed, agents_end)
    _exec(order, WaitingRole.GUARD, (connection_fd, release.fileno(), *lease), pid)


def _copy_file(number: int) -> int:
    """Copy a memory file: what a run's imports print is not the original's."""
    made = os.memfd_create("printed")
    data = os.pread(number, os.fstat(number).st_size, 0)
    while data:
        data = data[os.write(made, data) :]
    return made


def _become_agent(request: _Request, order: TreeOrder, printed: Sequence[int], release: socket.socket) -> Copy:
    guard_pid, agent_pid = os.getppid(), os.getpid()
    processes.set_death_signal(signal.SIGTERM)
    processes.become_subreaper()
    control, templates_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = posix.fork()
    if pid == 0:
        os.setsid()
        for number, fd in zip((1, 2), printed, strict=True):
            os.dup2(fd, number)
        for fd in (*printed, *request.fds, control.detach(), release.detach()):
            os.close(fd)
        known = request.known - {request.control.fileno()} | {templates_end.fileno()}
        request.control.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, request.mask)
        return Copy(control=templates_end, agent_pid=agent_pid, known=known, hazard=request.hazard)
    kept = (request.fds[1], release.fileno(), *request.fds[5:], control.fileno(), printed[1])
    _exec(order, WaitingRole.AGENT, kept, guard_pid, pid)


def _exec(order: TreeOrder, role: str, kept: Sequence[int], *pids: int) -> NoReturn:
    """Become guard or agent. All signals stay blocked: it says when it can take them."""
    processes.close_all_but(kept)
    processes.reset_ignored()
    own_args = [WAITING_FLAG, role, ",".join(map(str, (*pids, *kept)))]
    command = [*order["command"], *own_args, *order["flags"]]
    os.execve(command[0], command, order["env"])  # noqa: S606  # no shell, on purpose


def adopt_order(
    control: socket.socket, before: thread_counts.ThreadSettings, early: "EarlyImports"
) -> tuple[str, Program]:
    """Wait for a program, and take over what its processes inherit."""
    from muster.agent.workers.warm import forked_worker
    from muster.agent.workers.warm.forking import send

    send(control, {"held": list(early.modules), "import_s": early.duration_s})
    order, program = _receive_order(control)
    forked_worker.replace_environment(order["env"])
    apply_settings(order["settings"])
    obstacle = thread_counts.adopt_settings(before, early.modules)
    if obstacle is not None:
        send(control, {"refused": obstacle})
        os._exit(0)
    return order["preload"], program


def _receive_order(control: socket.socket) -> tuple[dict[str, Any], Program]:
    """Wait for the program of a template that has imported early; return its run's settings and the program."""
    _message, fds, _flags, _address = socket.recv_fds(control, 4, 2)
    if len(fds) < 2:
        os._exit(0)  # released, or a cold start
    os.dup2(fds[1], 0)
    os.close(fds[1])
    with os.fdopen(fds[0], "rb") as file:
        file.seek(0)
        order: dict[str, Any] = json.loads(file.read())
    kind, target, *args = order["program"]
    return order, Program(kind=ProgramKind(kind), target=target, args=tuple(args))


def apply_settings(settings: Mapping[str, Any]) -> None:
    """Set what a process of a run on a hold would have inherited: folder, umask, limits, priority and affinity.

    Args:
        settings: see `hold.client`.
    """
    import resource

    for name, limits in settings["limits"].items():
        number = getattr(resource, name, None)
        if number is not None and tuple(limits) != resource.getrlimit(number):
            resource.setrlimit(number, tuple(limits))
    os.umask(settings["umask"])
    if settings["nice"] != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, settings["nice"])
    if set(settings["cpus"]) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, settings["cpus"])
    os.chdir(settings["cwd"])
