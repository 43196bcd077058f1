"""Starts a job's guard and agent as the processes that wait on a hold.

`muster.agent.hold.waiting` describes what they are told.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from muster._shared.contract import print_line
from muster._shared.holder_socket import connect
from muster._shared.processes import READ, wait_events
from muster.agent.driven import RESET_SIGNALS
from muster.agent.errors import EnvironmentFault, UsageError
from muster.agent.hold.facts import read_facts, read_settings
from muster.elastic.jobs.process import AgentStart

if TYPE_CHECKING:
    from muster.schedulers.held.holds import LentNode

_MESSAGE_BYTES = 65536


class HeldNode:
    """The node of a hold, for one job. Close it when the job has ended."""

    def __init__(self, held: str | bool, name: str, nproc: int) -> None:
        """Take the hold.

        Args:
            held: its handle, id or the beginning of that. True: the only one.
            name: the job's name, for other programs that want the hold.
            nproc: the job's workers.

        Raises:
            UsageError: there is no such hold, or the job does not fit.
            EnvironmentFault: the hold runs another job, or TorchX is not installed.
        """
        self._name = f"{name} of process {os.getpid()}"
        try:
            from muster.schedulers.errors import EngineError, SchedulerError
            from muster.schedulers.held.holds import lend_node
        except ModuleNotFoundError as error:
            line = f"held={held!r}: holds need TorchX: pip install 'torchx-muster[torchx]' ({error})"
            raise EnvironmentFault(line) from error
        try:
            chosen = None if held is True else str(held)
            self._node: LentNode | None = lend_node(chosen, self._name, nproc)
        except EngineError as error:
            raise EnvironmentFault(f"held={held!r}: {error}") from error
        except SchedulerError as error:
            raise UsageError(f"held={held!r}: {error}") from error
        self._holder: socket.socket | None = None

    def start(self, start: AgentStart, has_answered: Callable[[], bool]) -> bool:
        """Give the job to the agent that waits, and return when its guard has answered.

        Args:
            start: what the guard and the agent would be started with.
            has_answered: called when the connection to the guard is readable. True: the guard has sent its identity.

        Returns:
            False: the job must start cold. One line says why. The hold stays taken.

        Raises:
            EnvironmentFault: the hold has ended, or is in use.
        """
        assert self._node is not None  # noqa: S101  # it is not closed
        try:
            self._holder = connect(self._node.folder)
            self._send(start)
        except OSError as error:
            raise EnvironmentFault(f"{self._node.handle} has ended: {error.strerror}") from error
        watched = dict.fromkeys((start.agent_fd, self._holder.fileno()), READ)
        while True:
            ready = wait_events(watched)
            if start.agent_fd in ready and has_answered():
                return True
            if self._holder.fileno() in ready:
                answer = self._receive()
                if "cold" not in answer:
                    reason = answer.get("refused", "its agent has ended")
                    raise EnvironmentFault(f"{self._node.handle}: {reason}")
                line = f"muster: this job starts cold, not from the hold: {answer['cold']}"
                print_line(line)
                return False

    def _send(self, start: AgentStart) -> None:
        assert self._node is not None  # noqa: S101  # it is not closed
        assert self._holder is not None  # noqa: S101  # it is connected
        found = _read_facts()
        order = {
            "command": [start.python[0], start.python[-1]],
            "python_flags": list(start.python[1:-1]),
            "args": list(start.flags),
            "env": dict(start.environ),
            **read_settings(found),
            "facts": found,
            "driven": start.folder,
        }
        with contextlib.ExitStack() as stack:
            order_fd = os.memfd_create("order")
            stack.callback(os.close, order_fd)
            with open(order_fd, "wb", closefd=False) as file:
                file.write(json.dumps(order).encode())
            null_fd = os.open(os.devnull, os.O_RDWR)
            stack.callback(os.close, null_fd)
            streams = [
                1 if start.stdout_fd is None else start.stdout_fd,
                2 if start.stderr_fd is None else start.stderr_fd,
            ]
            fds = [order_fd, null_fd, *streams, start.control.fileno(), start.caller_fd, self._node.lock_fd]
            socket.send_fds(self._holder, [json.dumps({"run": self._name}).encode()], fds)

    def _receive(self) -> dict[str, Any]:
        assert self._holder is not None  # noqa: S101  # it is connected
        try:
            message = self._holder.recv(_MESSAGE_BYTES)
        except OSError:
            message = b""
        answer: dict[str, Any] = json.loads(message or b"{}")
        return answer

    def close(self) -> None:
        """Release the hold. What still runs of the job on it is killed. Idempotent."""
        if self._holder is not None:
            self._holder.close()
            self._holder = None
        node, self._node = self._node, None
        if node is not None:
            fcntl.flock(node.lock_fd, fcntl.LOCK_UN)  # forks may have the descriptor
            os.close(node.lock_fd)


def _read_facts() -> dict[str, str]:
    """Return what a guard that this program starts would inherit, after `driven` has reset the dispositions."""
    found = read_facts()
    python = (signal.SIGPIPE, signal.SIGXFSZ)  # the holder ignores them until a program runs
    reset = {getattr(signal, name) for name in RESET_SIGNALS}
    ignored = int(found["SigIgn"], 16)
    for signum in reset:
        ignored &= ~(1 << (signum - 1))
    for signum in python:
        ignored |= 1 << (signum - 1)
    found["SigIgn"] = f"{ignored:016x}"
    found["SigBlk"] = f"{0:016x}"
    return found
