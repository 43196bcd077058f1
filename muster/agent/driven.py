"""An agent that a Python program starts and drives: `muster.elastic` is the other side.

The program runs `entry.py --muster-driven CONTROL CALLER FOLDER FLAGS ...` with two inherited descriptors::

    caller --starts--> intermediate --forks--> guard --forks--> agent
             waits for     ends

The guard is no child of the caller, so no `waitpid(-1)` of the caller can take it. It leads a process group of its own,
so a terminal's Ctrl-C reaches only the caller. It watches CALLER, a pidfd, and kills the job when the caller ends. A
death signal would not do, because it follows the *thread* that started the process. The end of file of CONTROL would
not do either, because other forks of the caller may hold that socket.

CONTROL carries one JSON object per line, from guard and agent to the caller. The first are {"guard": pid} and {"agent":
pid}, each with its own pidfd attached. The event log's records follow, or {"error": line, "code": n} if the agent could
not start. The last is {"ended": exit code} from the guard, when no process of the job is left. In the other direction
there are only signals, sent to the guard by its pidfd.
"""

import os
import signal
import socket

from muster._shared import guard, processes
from muster._shared.contract import Env
from muster.agent.control_socket import encode_message, send_message

REPORT_NAME = "report.json"
"""A failed job's report in FOLDER, which the caller made and removes. If the caller has ended, the guard removes it."""

RESET_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCHLD")


def main(args: list[str]) -> int:
    """Run the guard and the agent; return the exit code. Return only in the guard."""
    control_fd, caller_fd, folder, *flags = args
    if os.fork() != 0:
        os._exit(0)
    os.setpgid(0, 0)
    reset_dispositions()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a thread may block all signals
    control = socket.socket(fileno=int(control_fd))
    send_identity(control, "guard")
    code = guard.run_guarded(lambda lease: run_agent(control, folder, flags, lease), caller_fd=int(caller_fd))
    send_end(control.fileno(), int(caller_fd), folder, code)
    return code


def send_end(control_fd: int, caller_fd: int, folder: str, code: int) -> None:
    """Send the end; the guard calls this last of all."""
    send_message(control_fd, ended=code)
    if processes.wait_readable(caller_fd, 0.0):  # otherwise nobody reads the report
        from muster._shared.folders import remove_folder

        remove_folder(folder, ignores_errors=True)


def reset_dispositions() -> None:
    """Reset the signal dispositions, because those of the caller are its own."""
    for name in RESET_SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_DFL)


def send_identity(control: socket.socket, who: str) -> None:
    """Send this process's id, and a descriptor by which it is signalled and watched without a race."""
    fd = os.pidfd_open(os.getpid())
    try:
        socket.send_fds(control, [encode_message({who: os.getpid()})], [fd])
    except OSError:
        os._exit(1)  # the caller has gone
    finally:
        os.close(fd)


def run_agent(control: socket.socket, folder: str, flags: list[str], lease: guard.GuardLease) -> int:
    """Run the agent in the guarded process; return its exit code."""
    from muster.agent import launch

    send_identity(control, "agent")
    return launch.run_agent(flags, {**os.environ, **build_own_env(control, folder)}, lease)


def build_own_env(control: socket.socket, folder: str) -> dict[str, str]:
    """Return the variables that only the agent's environment has."""
    return {Env.CONTROL_FD: str(control.fileno()), Env.REPORT_FILE: os.path.join(folder, REPORT_NAME)}


GUARD, AGENT = "guard", "agent"
_SEPARATOR = ","


def encode_fds(fds: tuple[int, ...]) -> str:
    """Encode descriptors as one word."""
    return _SEPARATOR.join(map(str, fds))


def main_adopted(args: list[str]) -> int:
    """Run the guard or the agent of a program that is the template of its own workers; return the exit code.

    The other side is `muster.elastic.fork.tree` (`start_method="fork"`), which forks this tree before any of it runs
    other code::

        caller --forks--> intermediate --forks--> guard --forks--> agent --forks--> image
               waits for      ends               execs            execs        forks workers

    Guard and agent start again by exec, so that neither keeps the program's memory. What a fork would have shared
    between them is passed as descriptors. Each child was forked before its parent's exec, so it is adopted here instead
    of started.

        entry.py --muster-adopted guard CONTROL CALLER LEASE FOLDER PID
        entry.py --muster-adopted agent CONTROL IMAGE LEASE FOLDER GUARD FLAGS ...
    """
    who, *rest = args
    return _run_adopted_guard(*rest) if who == GUARD else _run_adopted_agent(*rest)


def _run_adopted_guard(control_fd: str, caller_fd: str, lease_fds: str, folder: str, pid: str) -> int:
    reset_dispositions()
    code = guard.Guard(_open_lease(lease_fds), int(caller_fd)).adopt(int(pid))
    send_end(int(control_fd), int(caller_fd), folder, code)
    return code


def _run_adopted_agent(control_fd: str, image: str, lease_fds: str, folder: str, guard_pid: str, *flags: str) -> int:
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
