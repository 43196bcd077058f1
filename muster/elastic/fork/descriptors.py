"""Which of the program's descriptors its forks keep.

Workers keep nearly all, as multiprocessing's fork does, because closures refer to files, lmdb, sqlite. They do not keep
muster's own, or the sockets of a notebook's kernel: a message that a worker sent or took there would break the
kernel's.
"""

import os
import socket
import stat
import sys
from collections.abc import Iterable

from muster._shared import processes

_KERNEL_PORTS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")


def silence(fds: Iterable[int]) -> None:
    """Replace descriptors by /dev/null: an object that still has the number must not meet another file there."""
    null_fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in fds:
        os.dup2(null_fd, fd, inheritable=False)
    os.close(null_fd)


def find_kernel_sockets() -> list[int]:
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
