"""Agents that wait for their run, with the guards above them: see `waiting`.

They begin as forks of one process that has imported: `original` says how.
"""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from muster._shared import guard, processes
from muster._shared.contract import WAITING_FLAG, WaitingRole
from muster.agent.hold.listening import MESSAGE_BYTES

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
        words = [*command, WAITING_FLAG, WaitingRole.ORIGINAL, str(theirs.fileno()), *flags]
        with theirs:
            self.pid = processes.spawn(
                lambda: os.execve(words[0], words, dict(env)),  # noqa: S606  # no shell, on purpose
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
