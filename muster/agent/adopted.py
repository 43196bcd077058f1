"""Guard and agent of a program that is the template of its own workers (`start_method="fork"`).

The other side is `muster.elastic.fork.tree`, which forks this tree before any of it runs other code::

    caller --forks--> intermediate --forks--> guard --forks--> agent --forks--> image
           waits for      ends               execs            execs        forks workers

Guard and agent start again by exec, so that neither keeps the program's memory. What a fork would have shared between
them is passed as descriptors. Each child was forked before its parent's exec, so it is adopted here instead of started.

    entry.py --muster-adopted guard CONTROL CALLER LEASE FOLDER PID
    entry.py --muster-adopted agent CONTROL IMAGE LEASE FOLDER GUARD FLAGS ...
"""

import os
import socket

from muster._shared import guard
from muster._shared.contract import Env
from muster.agent.driven import reset_dispositions, run_agent, send_end

GUARD, AGENT = "guard", "agent"
_SEPARATOR = ","


def encode_fds(fds: tuple[int, ...]) -> str:
    """Encode descriptors as one word."""
    return _SEPARATOR.join(map(str, fds))


def main(args: list[str]) -> int:
    """Run the guard or the agent, and return the exit code."""
    who, *rest = args
    return _run_guard(*rest) if who == GUARD else _run_agent(*rest)


def _run_guard(control_fd: str, caller_fd: str, lease_fds: str, folder: str, pid: str) -> int:
    reset_dispositions()
    code = guard.Guard(_open_lease(lease_fds), int(caller_fd)).adopt(int(pid))
    send_end(int(control_fd), int(caller_fd), folder, code)
    return code


def _run_agent(control_fd: str, image: str, lease_fds: str, folder: str, guard_pid: str, *flags: str) -> int:
    control = socket.socket(fileno=int(control_fd))  # until this process ends

    def body() -> int:
        os.environ[Env.IMAGE] = image
        for fd in (int(control_fd), int(image.partition(":")[2])):
            os.set_inheritable(fd, False)
        return run_agent(control, folder, list(flags), _open_lease(lease_fds))

    reset_dispositions()
    guard.run_guarded_process(int(guard_pid), (), body)


def _open_lease(fds: str) -> guard.GuardLease:
    numbers = [int(fd) for fd in fds.split(_SEPARATOR)]
    for fd in numbers:
        os.set_inheritable(fd, False)
    return guard.GuardLease(numbers)
