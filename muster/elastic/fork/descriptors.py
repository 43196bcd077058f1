"""Which of the program's descriptors its forks keep.

Workers keep nearly all, as multiprocessing's fork does, because closures refer to files, lmdb, sqlite. They do not keep
muster's own, or the sockets of a notebook's kernel: a message that a worker sent or took there would break the
kernel's.
"""

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Collection, Iterable

_KERNEL_PORTS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")


def close_all_but(kept: Collection[int]) -> None:
    """Close every descriptor above 2. A process that is about to exec calls it."""
    for fd in list_descriptors():
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)


def list_descriptors() -> list[int]:
    """Return the open descriptors, and perhaps the one that listed them."""
    return [int(name) for name in os.listdir("/proc/self/fd")]


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
    return [fd for fd in list_descriptors() if _find_local_port(fd) in ports]


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
