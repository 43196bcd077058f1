"""Guard and agent that wait for their run on a held node. The agent's template has imported torch.

The run arrives as one message with descriptors: the order of `client` in a memory file, its standard streams, and the
leader's listening socket, if it has one. The guard takes the streams and guards from then on. The agent takes all of it
and continues as if it had been started so. Both end when the holder closes the connection.

The order of a `muster.elastic` job has `driven`, which is the job's folder. Three descriptors replace the listening
socket: the connection to the program, a pidfd of it, and the hold's lock. Both sides then act as in `driven`.
"""

import contextlib
import fcntl
import json
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from muster._shared import guard, processes
from muster._shared.contract import Env, WaitingRole

if TYPE_CHECKING:  # the guard stays small
    from muster.agent.hold.listening import Order
    from muster.agent.hold.start import HeldStart

_FDS: Final = 8
_END_S: Final = 3.0


def main(args: list[str]) -> int:
    """Be the guard or the agent, or what they are forked from, see `original`; return the exit code.

    Args:
        args: a `WaitingRole`, process ids and descriptors, and the agent's flags.
    """
    role, text, *flags = args
    numbers = [int(word) for word in text.split(",")]
    if role == WaitingRole.GUARD:
        return _guard(*_open(numbers[1:]), numbers[0])
    from muster.agent.hold import start

    if role == WaitingRole.ORIGINAL:
        start.become_original(numbers[0], flags, os.environ)
    guard_pid, template_pid, *fds, template_fd, stderr_fd = numbers
    control, release, lease = _open(fds)
    template = (template_pid, template_fd, stderr_fd)

    def body() -> int:
        held = start.HeldStart(flags, os.environ, lease, template)
        return _wait_as_agent(held, control, release, lease)

    guard.run_guarded_process(guard_pid, (), body)


def _open(fds: Sequence[int]) -> tuple[socket.socket, socket.socket, guard.GuardLease]:
    """Open the connections to the holder and between guard and agent, and the lease."""
    for fd in fds:
        os.set_inheritable(fd, False)
    return socket.socket(fileno=fds[0]), socket.socket(fileno=fds[1]), guard.GuardLease(fds[2:])


def _guard(control: socket.socket, ours: socket.socket, lease: guard.GuardLease, pid: int) -> int:
    """Wait for the run, then guard its agent, and return the exit code. All signals are blocked until then."""
    own_pid = os.getpid()
    pidfd = os.pidfd_open(pid)
    if pidfd in processes.wait_events(dict.fromkeys((control.fileno(), pidfd), processes.READ)):
        control.shutdown(socket.SHUT_RD)  # a run that comes later gets another agent, see `Holder`
    os.close(pidfd)
    message, fds = _receive(control)
    if not message:  # released, or agent ended
        _end_descendants(own_pid)
        return 1
    with contextlib.suppress(OSError):  # it was killed just now: the guard says so, see below
        socket.send_fds(ours, [message], fds)
    ours.close()
    order = _read_order(fds[0])
    os.environ.clear()
    os.environ.update(order["env"])
    _take_streams(fds[1:4])
    for fd in fds[:4]:
        os.close(fd)
    if "driven" in order:
        return _guard_driven(lease, control, pid, fds[4:], order["driven"])
    for fd in fds[4:]:
        os.close(fd)
    return guard.Guard(lease, control.fileno(), "the agent of this node").adopt(pid)


def _end_descendants(own_pid: int) -> None:
    """Kill all below the guard, and wait for their end: the hold takes it that nothing is left when the guard ends."""
    deadline_s = time.monotonic() + _END_S
    while (pids := processes.kill_descendants(own_pid)) and time.monotonic() < deadline_s:
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended
                pidfd = os.pidfd_open(pid)
                processes.wait_readable(pidfd, deadline_s - time.monotonic())
                os.close(pidfd)


def _guard_driven(lease: guard.GuardLease, control: socket.socket, pid: int, fds: Sequence[int], folder: str) -> int:
    """Guard the agent of a job that a program of `muster.elastic` drives; return the exit code.

    Args:
        lease: the guard's.
        control: the connection to the holder.
        pid: the agent's.
        fds: the connection to the program, a pidfd of it, and the lock that keeps the hold.
        folder: the job's.
    """
    from muster.agent import driven  # does not travel

    connection, caller_fd, lock_fd = socket.socket(fileno=fds[0]), fds[1], fds[2]
    driven.send_identity(connection, "guard")
    ends = select.epoll()  # readable with any of them
    ends.register(control, select.EPOLLIN)
    ends.register(caller_fd, select.EPOLLIN)
    code = guard.Guard(lease, ends.fileno()).adopt(pid)
    fcntl.flock(lock_fd, fcntl.LOCK_UN)  # allows the program's next job
    driven.send_end(connection.fileno(), caller_fd, folder, code)
    return code


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    connection.setblocking(False)  # lost on Python 3.11
    try:
        message, fds, _flags, _address = socket.recv_fds(connection, 4, _FDS)
    except OSError:
        return b"", []
    return message, list(fds)


def _read_order(fd: int) -> "Order":
    order: Order = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    return order


def _take_streams(fds: Sequence[int]) -> None:
    for number, fd in enumerate(fds):
        os.dup2(fd, number)


def _wait_as_agent(held: "HeldStart", control: socket.socket, release: socket.socket, lease: guard.GuardLease) -> int:
    from muster.agent import launch

    about = held.read_ready()
    if about is None:
        return 1
    control.send(json.dumps(about).encode())
    control.close()
    held.import_ahead()
    ends = [held.template_fd] if held.template_fd >= 0 else []
    processes.wait_events(dict.fromkeys((release.fileno(), *ends), processes.READ))
    message, fds = _receive(release)
    release.close()
    if not message:
        return 1
    order = _read_order(fds[0])
    env, own = dict(order["env"]), dict[str, str]()
    if "driven" in order:
        from muster.agent import driven

        connection = socket.socket(fileno=fds[4])
        for fd in fds[5:]:
            os.close(fd)
        driven.send_identity(connection, "agent")
        own = driven.build_own_env(connection, order["driven"])
    elif len(fds) > 4:
        env[Env.RDZV_FD] = str(fds[4])
    _take_streams(fds[1:4])
    for fd in fds[:4]:
        os.close(fd)
    settings: Order = {
        "cwd": order["cwd"],
        "umask": order["umask"],
        "limits": order["limits"],
        "nice": order["nice"],
        "cpus": order["cpus"],
    }
    held.become_run(env, settings)
    return launch.run_agent(order["args"], {**os.environ, **own}, lease, held)
