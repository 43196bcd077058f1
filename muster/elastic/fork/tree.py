"""Forks guard, agent and image from this program, each as the parent of the next.

`agent.driven` describes the tree. The image must descend from the guard, or the guard would not adopt the workers'
orphans. It must also be a fork of this program. So guard and agent begin as forks of this program, too, and exec once
their child exists.

It calls `posix`, not `os`, whose functions debuggers replace: debugpy has each Python process that is started connect
to it, and a guard that waits for a debugger guards nothing. Workers are forked by `os.fork`, so that they can be
debugged.
"""

import contextlib
import os
import posix
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from muster._shared import guard, processes
from muster._shared.contract import ADOPTED_FLAG
from muster._shared.records import record
from muster.agent.driven import AGENT, GUARD, encode_fds, send_identity
from muster.agent.errors import SpawnError
from muster.agent.workers import stall_watch
from muster.elastic.fork.hazards import ForkedCall
from muster.elastic.fork.image import run_image, silence
from muster.elastic.jobs.process import AgentStart


@record
class _Tree:
    """What all of its processes know."""

    start: AgentStart
    call: ForkedCall
    own_fds: Sequence[int]
    lease_fds: tuple[int, ...]


def fork_tree(call: ForkedCall, start: AgentStart, own_fds: Sequence[int]) -> None:
    """Fork, and return in this process once the guard is no longer its child.

    Args:
        call: what the workers call.
        start: of guard and agent.
        own_fds: this process's ends of what it shares with the job. Workers do not keep them.

    Raises:
        OSError: no process, descriptor or memory is left.
        SpawnError: a fork stood still and was killed.
    """
    for stream in (sys.stdout, sys.stderr):  # or each fork would print the buffer
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    lease_fds: tuple[int, ...] = ()
    try:
        lease_fds = guard.make_lease_fds()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # threads are harmless here, see `hazards`
            pid = posix.fork()
        if pid == 0:
            _run(lambda: _run_intermediate(_Tree(start=start, call=call, own_fds=own_fds, lease_fds=lease_fds)))
        _wait_for_end(pid)
    finally:
        for fd in lease_fds:
            os.close(fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _wait_for_end(pid: int) -> None:
    """Wait for the end of the intermediate, which has only forks to do, and collect it."""
    looks, activity = 0, None
    fd = os.pidfd_open(pid)
    try:
        while not processes.wait_readable(fd, stall_watch.LOOK_S):
            before, activity = activity, stall_watch.read_activity(pid, ())
            looks = looks + 1 if activity == before else 0
            if looks * stall_watch.LOOK_S >= stall_watch.ANSWER_LIMIT_S:
                processes.send_signal(activity, signal.SIGKILL)
                raise SpawnError(
                    f"cannot fork the job's processes from this program: a fork of it stood still for "
                    f"{stall_watch.ANSWER_LIMIT_S:.0f} s; a handler that a module gave to os.register_at_fork may wait "
                    "for a lock"
                )
    finally:
        os.close(fd)
        with contextlib.suppress(ChildProcessError):  # another thread has taken its status
            os.waitpid(pid, 0)


def _run(body: Callable[[], object]) -> NoReturn:
    """Run in a fork, and never return into the program."""
    try:
        body()
    except BaseException:  # noqa: BLE001  # whatever it is, the program's own frames must not see it here
        processes.write_stderr(f"muster: cannot fork the job's processes:\n{traceback.format_exc()}")
    finally:
        os._exit(1)


def _run_intermediate(tree: _Tree) -> NoReturn:
    if posix.fork() == 0:
        _run(lambda: _become_guard(tree))
    os._exit(0)


def _become_guard(tree: _Tree) -> None:
    os.setpgid(0, 0)  # Ctrl-C is for the program only
    processes.become_subreaper()
    send_identity(tree.start.control, GUARD)
    _redirect(tree.start)
    pid = posix.fork()
    if pid == 0:
        _run(lambda: _become_agent(tree))
    kept = (tree.start.control.fileno(), tree.start.caller_fd, *tree.lease_fds)
    argv = [str(kept[0]), str(kept[1]), encode_fds(tree.lease_fds), tree.start.folder, str(pid)]
    _exec(tree.start, [GUARD, *argv], kept)


def _redirect(start: AgentStart) -> None:
    null_fd = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((null_fd, 0), (start.stdout_fd, 1), (start.stderr_fd, 2)):
        if fd is not None:
            os.dup2(fd, number)
    if null_fd > 2:
        os.close(null_fd)


def _become_agent(tree: _Tree) -> None:
    guard_pid, agent_pid = os.getppid(), os.getpid()
    processes.set_death_signal(signal.SIGTERM)
    processes.become_subreaper()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = posix.fork()
    if pid == 0:
        silence((ours.fileno(), tree.start.control.fileno(), tree.start.caller_fd, *tree.lease_fds, *tree.own_fds))
        _run(lambda: run_image(theirs, agent_pid, tree.call))
    kept = (tree.start.control.fileno(), ours.fileno(), *tree.lease_fds)
    argv = [str(kept[0]), f"{pid}:{kept[1]}", encode_fds(tree.lease_fds), tree.start.folder, str(guard_pid)]
    _exec(tree.start, [AGENT, *argv, *tree.start.flags], kept)


def _exec(start: AgentStart, args: Sequence[str], kept: Sequence[int]) -> None:
    """Become guard or agent. All signals stay blocked: it says when it can take them.

    Without the modules that installed packages have Python import at its start (`-S`): see `_shared.programs`.
    """
    processes.close_all_but(kept)
    processes.reset_ignored()
    *interpreter, entry = start.python
    argv = [*interpreter, "-S", entry, ADOPTED_FLAG, *args]
    execute = posix.execve if os.sep in argv[0] else os.execvpe
    execute(argv[0], argv, dict(start.environ))  # no shell, on purpose
