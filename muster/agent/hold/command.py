"""`muster-agent`: the agent, on this user's default hold if that has an agent that can become it."""

import os
import sys

from muster import __version__
from muster._shared.holds import default as default_hold

_NOT_JOBS = ("ask", "--help", "-h", "--version")
_OF_PROGRAMS = ("MUSTER_CONTROL_FD", "MUSTER_IMAGE")
"""`Env.CONTROL_FD` and `Env.IMAGE`: a program started it, and is the template or passes more than can be sent."""


def main() -> int:
    """Run an agent under its guard and return the exit code."""
    args = sys.argv[1:]
    idle_limit_s = default_hold.read_idle_limit_s(os.environ)
    if idle_limit_s is not None and _is_plain_job(args):
        code = _run_on_default(args, idle_limit_s)
        if code is not None:
            return code
    from muster.agent.__main__ import main as run

    return run()


def _is_plain_job(args: list[str]) -> bool:
    """Return whether a client can send everything that the agent would have received."""
    is_job = bool(args) and args[0] not in _NOT_JOBS and not args[0].startswith("--muster-")
    is_plain = len(sys.orig_argv) - len(sys.argv) == 1  # without interpreter flags
    return is_job and is_plain and not any(name in os.environ for name in _OF_PROGRAMS) and _has_streams()


def _has_streams() -> bool:
    """Return whether no standard stream is closed; a descriptor of ours would get its number."""
    try:
        return all(os.fstat(number) for number in range(3))
    except OSError:
        return False


def _run_on_default(args: list[str], idle_limit_s: float) -> int | None:
    """Run on the hold, or start the hold. Return the exit code, or None if this process must run the agent."""
    entry = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "entry.py")
    words = [sys.executable, entry]
    folder = default_hold.find_folder(os.environ, words, __version__)
    if default_hold.may_have_agents(folder):
        from muster.agent.hold.client import run_on_default

        return run_on_default(folder, f"muster-agent-{os.getpid()}", len(words), [*words, *args])
    if default_hold.may_start(os.environ):
        _start(folder, words, args, idle_limit_s)
    return None


def _start(folder: str, words: list[str], args: list[str], idle_limit_s: float) -> None:
    """Start the hold, but not as a child of this process, whose guard would end it with the job."""
    order = {
        "name": f"muster-agent-{os.getpid()}",
        "command": words,
        "args": args,
        "env": dict(os.environ),
        "cpus": sorted(os.sched_getaffinity(0)),
    }
    try:
        orders_fd = default_hold.write_order([order], idle_limit_s=idle_limit_s, after_pid=os.getpid())
        pid = os.fork()
    except OSError:
        return
    if pid == 0:
        try:
            if os.fork() == 0:
                os.dup2(orders_fd, 0)
                command = default_hold.build_command(words, folder)
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)
                os.dup2(null, 2)
                env = default_hold.build_environment(os.environ)
                os.execve(command[0], command, env)  # noqa: S606  # no shell, on purpose
        finally:
            os._exit(0)
    os.close(orders_fd)
    os.waitpid(pid, 0)
