"""The image: a fork of the program, kept as it was when the job started, from which the agent has workers forked.

To the agent it is a template (`agent.workers.warm.template`) that has imported everything already. Its first workers
are forked while the agent still starts, because a fork copies the page tables of all that the program has: 47 ms per
GiB.
"""

import contextlib
import gc
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterable
from typing import NoReturn

from muster._shared import processes
from muster.agent.workers import program
from muster.agent.workers.warm import forking
from muster.elastic.fork import worker
from muster.elastic.fork.hazards import ForkedCall

_KERNEL_PORTS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")


def run_image(control: socket.socket, agent_pid: int, call: ForkedCall) -> NoReturn:
    """Fork workers on demand. Each of them runs the image. Ends with the agent."""
    forking.exit_with_agent(agent_pid)
    os.setsid()
    _reset_signals()
    silence(_find_kernel_sockets())
    worker.forget_program()
    program.rename_process(["muster-image", *sys.orig_argv])
    # Uncollected pages stay shared.
    gc.freeze()
    forking.send(control, {"brings_torch": False})
    forking.send(control, {"ready": {"modules": [], "pid": os.getpid(), "memory": {}}})
    spares = _Spares(call.nproc, agent_pid)
    parked = spares.own or forking.fork_on_demand(control, agent_pid, spares.hand_out)
    control.close()
    spares.close()
    if spares.own is not None:
        parked = _wait_for_socket(spares.own)
    worker.run(call, forking.wait_for_release(parked, program.rename_process))


class _Spares:
    """Workers that are forked while the agent still starts. It gets them with its first request."""

    def __init__(self, count: int, agent_pid: int) -> None:
        """Fork the workers. In each of them this returns too, with `own`."""
        pairs = [socket.socketpair() for _ in range(count)]
        self._ours = [ours for ours, _ in pairs]
        answer = forking.fork_batch([theirs for _, theirs in pairs], agent_pid)
        self.own = answer if isinstance(answer, socket.socket) else None
        """The socket of a spare worker, in that worker."""
        self._forked = None if isinstance(answer, socket.socket) else answer
        for _, theirs in pairs:
            if theirs is not self.own:
                theirs.close()

    def hand_out(self, sockets: list[socket.socket]) -> forking.Forked | None:
        """Give each a socket from the agent. Return None if their number differs, or if they were given away before."""
        forked, self._forked = self._forked, None
        if forked is None or forked["error"] or len(forked["forked"]) != len(sockets):
            self.close()  # ends those there
            return None
        for ours, one in zip(self._ours, sockets, strict=True):
            with contextlib.suppress(OSError):  # it was killed, as the agent sees
                socket.send_fds(ours, [b"!"], [one.fileno()])
        self.close()
        return forked

    def close(self) -> None:
        for one in self._ours:
            one.close()
        self._ours = []


def _wait_for_socket(own: socket.socket) -> socket.socket:
    message, fds, _flags, _address = socket.recv_fds(own, 1, 1)
    if not message or not fds:
        os._exit(0)  # not needed
    own.close()
    return socket.socket(fileno=fds[0])


def _reset_signals() -> None:
    """Remove the program's handlers. What the program ignores stays ignored, as after an exec."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


# -- which of the program's descriptors its forks keep ----------------------------------------------------------------
#
# Workers keep nearly all, as multiprocessing's fork does, because closures refer to files, lmdb, sqlite. They do not
# keep muster's own, or the sockets of a notebook's kernel: a message that a worker sent or took there would break the
# kernel's.


def silence(fds: Iterable[int]) -> None:
    """Replace descriptors by /dev/null: an object that still has the number must not meet another file there."""
    null_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in fds:
        os.dup2(null_fd, fd, inheritable=False)
    os.close(null_fd)


def _find_kernel_sockets() -> list[int]:
    """Return the sockets by which a notebook's kernel talks to its clients. In other programs, return none."""
    application = sys.modules.get("ipykernel.kernelapp")
    if application is None or not application.IPKernelApp.initialized():
        return []
    kernel = application.IPKernelApp.instance()
    ports = {getattr(kernel, name, None) for name in _KERNEL_PORTS}
    return [fd for fd in processes.list_descriptors() if _find_local_port(fd) in ports]


def _find_local_port(fd: int) -> object:
    """Return the port of a TCP socket, or the number at the end of a Unix socket's path. Return 0 for all else."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return 0
        with socket.socket(fileno=os.dup(fd)) as one:
            name = one.getsockname()
    except OSError:
        return 0
    if isinstance(name, tuple):
        return name[1]
    return int(text) if (text := str(name).rpartition("-")[2]).isdigit() else 0  # the "ipc" transport: PATH-PORT
