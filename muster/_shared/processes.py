"""How processes are started, found and ended; cores; and the two Linux calls the standard library lacks.

It is standard library only, because it also goes with programs to nodes, see `schedulers.node_program`.

Source: prctl(2), timerfd_create(2), proc(5).
"""

import contextlib
import ctypes
import errno
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Final, NoReturn, TypeAlias

LINUX = sys.platform.startswith("linux")
"""Jobs run on Linux: only what submits them asks, and the guard."""

IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that the interpreter ignores from its start. A program that it execs would inherit that."""

READ: Final = select.POLLIN
WRITE: Final = select.POLLOUT
"""What `wait_events` waits for."""

_HANDLED: Final = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCHLD")
)
"""Signals that a process which starts others may handle or ignore."""
_EXEC_FAILED: Final = 127
_EXEC_LIMIT_S: Final = 10.0
_REPORT_BYTES: Final = 4096
_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2
_PR_SET_CHILD_SUBREAPER = 36
_CLOCK_BOOTTIME = 7
_TFD_TIMER_ABSTIME = 1
_NVIDIA_DRIVERS: Final = ("/dev/nvidiactl", "/dev/dxg")
"""The files of NVIDIA's driver, and of its own in Windows' subsystem for Linux."""


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Make orphans among this process's descendants its children."""
    _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_death_signal(signum: int) -> None:
    """Get `signum` when the *thread* that made this process ends. This survives exec, not fork.

    Check `os.getppid()` after it: a parent that ended before sends no signal.
    """
    _libc().prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def read_death_signal() -> int:
    """Return the signal this process gets when its parent ends, 0 for none."""
    value = ctypes.c_int(0)
    _libc().prctl(_PR_GET_PDEATHSIG, ctypes.byref(value), 0, 0, 0)
    return value.value


class BoottimeTimer:
    """A timerfd on CLOCK_BOOTTIME. Shared with children made by fork: either side can set it, both can poll it."""

    class _Spec(ctypes.Structure):
        _fields_ = (
            ("interval_s", ctypes.c_long),
            ("interval_ns", ctypes.c_long),
            ("value_s", ctypes.c_long),
            ("value_ns", ctypes.c_long),
        )

    def __init__(self, fd: int | None = None) -> None:
        """Make one, or take over one that another process has made (`fd`)."""
        self._libc = _libc()
        self.fd: int = fd or self._libc.timerfd_create(_CLOCK_BOOTTIME, os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def set(self, due_s: float) -> None:
        """Become readable at `due_s` of CLOCK_BOOTTIME. 0 disarms."""
        whole_s = int(due_s)
        spec = self._Spec(0, 0, whole_s, int((due_s - whole_s) * 1e9))
        if self._libc.timerfd_settime(self.fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def read_left_s(self) -> float:
        """Return the seconds until it is due. Return 0 if it is disarmed or has expired."""
        spec = self._Spec()
        if self._libc.timerfd_gettime(self.fd, ctypes.byref(spec)) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_gettime")
        return float(spec.value_s + spec.value_ns / 1e9)

    def acknowledge(self) -> bool:
        """Consume the expiry. Return False if the timer has been set again since it expired."""
        try:
            return bool(os.read(self.fd, 8))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Release the descriptor."""
        os.close(self.fd)


# -- starts ------------------------------------------------------------------------------------------------------------


def spawn(
    become: Callable[[], object],
    streams: Sequence[int],
    keep_fds: Sequence[int] = (),
    *,
    death_signal: int,
    limit_s: float = _EXEC_LIMIT_S,
    keeps_ignored: bool = False,
) -> int:
    """Start a program in a session of its own, and return its process id. The caller collects it.

    `subprocess` does not fit for three reasons. It collects the child itself, while agents and supervisors also collect
    orphans that they did not start, with `waitpid(-1)`. It waits without a limit for an exec, whose disk may hang. And
    code that runs between fork and exec cannot report what failed.

    Args:
        become: runs in the child, and execs the program. What the program inherits is arranged by then.
        streams: become its descriptors 0, 1 and 2.
        keep_fds: what it inherits besides, under the same numbers.
        death_signal: it gets this signal when the *thread* that calls this function ends.
        limit_s: how long to wait for the exec. If it fails later, the process exits with 127.
        keeps_ignored: see `strip_process`.

    Raises:
        OSError: without a file's name, if nothing could be forked; with one ("": none), if the child has failed.
    """
    report_read, report_write = os.pipe()  # closed by an exec
    parent_pid = os.getpid()

    def begin() -> None:
        os.setsid()
        set_death_signal(death_signal)
        if os.getppid() != parent_pid:
            os._exit(_EXEC_FAILED)
        strip_process(streams, keep_fds, report_write, keeps_ignored=keeps_ignored)
        become()

    try:
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of threads: ours hold no lock that the child needs before exec.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _exec_or_report(begin, report_write)
        finally:
            os.close(report_write)
        failed = os.read(report_read, _REPORT_BYTES) if wait_readable(report_read, limit_s) else b""
    finally:
        os.close(report_read)
    if failed:
        os.waitpid(pid, 0)
        number, _, name = failed.partition(b" ")
        raise OSError(int(number), os.strerror(int(number)), os.fsdecode(name))
    return pid


def spawn_program(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    streams: Sequence[int],
    keep_fds: Sequence[int] = (),
    *,
    death_signal: int,
    prepare: Callable[[], object] = lambda: None,
) -> int:
    """Start a program in a folder. See `spawn`.

    Args:
        argv: the program, which is searched in the PATH of `env` unless it has a slash, and its arguments.
        env: all of its variables.
        cwd: the folder.
        streams: see `spawn`.
        keep_fds: see `spawn`.
        death_signal: see `spawn`.
        prepare: runs in the child, in a session of its own, before the exec.

    Raises:
        OSError: without a file's name, if nothing could be forked; else its name is that of the folder or the program.
    """

    def become() -> None:
        prepare()
        os.chdir(cwd)
        os.execvpe(argv[0], list(argv), dict(env))  # noqa: S606  # no shell, on purpose

    try:
        return spawn(become, streams, keep_fds, death_signal=death_signal)
    except OSError as error:
        if error.filename not in (None, cwd):  # a place where it was searched
            error.filename = argv[0]
        raise


def _exec_or_report(begin: Callable[[], None], report_fd: int) -> NoReturn:
    number, name = errno.EINVAL, ""
    try:
        begin()
    except OSError as error:
        number, name = error.errno or number, error.filename or ""
    finally:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # the parent may be gone
        with contextlib.suppress(OSError):
            os.write(report_fd, os.fsencode(f"{number} {name}")[:_REPORT_BYTES])
        os._exit(_EXEC_FAILED)


def strip_process(
    streams: Sequence[int], keep_fds: Sequence[int], own_fd: int = -1, *, keeps_ignored: bool = False
) -> None:
    """Keep nothing for a program but these descriptors: signals get their default, and none is blocked.

    Args:
        streams: become 0, 1 and 2.
        keep_fds: the program inherits them.
        own_fd: stays open until the exec.
        keeps_ignored: what is ignored stays so (nohup), except for what the interpreter ignores.
    """
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    close_all_but(keep_fds, own_fd)
    for signum in _HANDLED:
        if not keeps_ignored or signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, signal.SIG_DFL)
    reset_ignored()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def reset_ignored() -> None:
    """Give the signals that the interpreter ignores their default, for a program."""
    for signum in IGNORED_BY_PYTHON:
        signal.signal(signum, signal.SIG_DFL)


def list_descriptors() -> list[int]:
    """Return the open descriptors, and perhaps the one that listed them."""
    return [int(name) for name in os.listdir("/proc/self/fd")]


def close_all_but(inherited: Sequence[int], own_fd: int = -1) -> None:
    """Close every descriptor above 2 but `own_fd` and those that a program is to inherit.

    `os.closerange` tries a thousand million numbers where that is the limit, if Python knows no close_range(2).
    """
    for fd in list_descriptors():
        if fd > 2 and fd != own_fd and fd not in inherited:
            with contextlib.suppress(OSError):
                os.close(fd)
    for fd in inherited:
        os.set_inheritable(fd, True)


# -- trees -------------------------------------------------------------------------------------------------------------


def list_parents() -> dict[int, int]:
    """Return the parent of every live process the kernel shows. Zombies are left out.

    `/proc/<pid>/task/*/children` would be quicker, but needs a kernel option that is often off.
    """
    stats = {pid: stat for pid in list_pids() if (stat := read_stat(pid)) is not None}
    return {pid: int(stat[1]) for pid, stat in stats.items() if stat[0] not in ("Z", "X")}


def list_pids() -> list[int]:
    """Return the processes that the kernel shows, zombies too."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def read_stat(pid: int) -> list[str] | None:
    """Return fields of /proc/<pid>/stat from the state on.

    Index 0 is the state, 1 ppid, 3 session, 11 utime, 12 stime, 19 start.
    """
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return None
    try:
        # The command's name may hold spaces and brackets.
        return os.read(fd, 4096).rpartition(b")")[2].decode().split()
    except OSError:
        return None
    finally:
        os.close(fd)


def read_command(pid: int) -> bytes:
    """Return the words of a process's command line, each with a zero behind. Empty: it has ended, or is a kernel's."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
    return b""


def read_status(pid: int) -> dict[str, str]:
    """Return the rows of /proc/<pid>/status by their names; empty if the process has ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError:
        return {}


def list_descendants(root: int, *, keep: Container[int] = (), spare: Container[int] = ()) -> list[int]:
    """List live descendants of `root`.

    Args:
        root: a process.
        keep: processes that are not listed, while their descendants are.
        spare: processes that are not listed, nor are their descendants.
    """
    children: dict[int, list[int]] = {}
    for pid, parent in list_parents().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    stack = [root]
    while stack:
        for pid in children.get(stack.pop(), ()):
            if pid in spare:
                continue
            stack.append(pid)
            if pid not in keep:
                found.append(pid)
    return found


def read_peak_bytes() -> int:
    """Return the peak resident memory of the largest descendant that has ended, or 0 if none has."""
    import resource

    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def open_wake_pipe(signums: Iterable[int] = ()) -> int:
    """Return a descriptor from which the numbers of signals are read, once they have come. It never blocks.

    Args:
        signums: get a handler that does nothing. Those that have one already count, too.
    """
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    for signum in signums:
        signal.signal(signum, lambda _signum, _frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    return wake_read


def read_wake_pipe(fd: int) -> bytes:
    """Return the numbers of the signals that have come."""
    with contextlib.suppress(BlockingIOError):
        return os.read(fd, 4096)
    return b""


def wait_readable(fd: int, limit_s: float | None) -> bool:
    """Wait until a descriptor is readable or its other end closed. Return False after `limit_s` (None: no limit)."""
    return bool(wait_events({fd: READ}, limit_s))


def wait_events(wanted: Mapping[int, int], limit_s: float | None = None) -> dict[int, int]:
    """Wait for descriptors, at most `limit_s` (None: without limit), and return the events of those that are ready.

    With `poll`, because `select` takes no descriptor above 1023, and programs that start jobs may have many.

    Args:
        wanted: `READ`, `WRITE`, both or 0 by descriptor. The end of the other side counts always.
        limit_s: see above.
    """
    poller = select.poll()
    for fd, events in wanted.items():
        poller.register(fd, events)
    return dict(poller.poll(None if limit_s is None else max(0.0, limit_s) * 1000))


def write_stderr(text: str, limit_s: float = 2.0) -> None:
    """Write to descriptor 2, unless it accepts nothing for `limit_s`: a full or closed console must not keep a process.

    A pipe that is writable has room for at least 4096 bytes, so the write of a line does not block.
    """
    with contextlib.suppress(OSError):
        if wait_events({2: WRITE}, limit_s):
            from muster._shared.contract import show_controls

            os.write(2, show_controls(text).encode()[:4096])


def send_signal(pids: Iterable[int], signum: int) -> None:
    """Signal every process. Ones that are gone or must not be signalled (a set-uid grandchild) are skipped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def kill_descendants(root: int) -> list[int]:
    """Send SIGKILL to all live descendants of `root`, once, and return them."""
    pids = list_descendants(root)
    send_signal(pids, signal.SIGKILL)
    return pids


# -- cores -------------------------------------------------------------------------------------------------------------


def count_allowed_cores() -> int:
    """Count the cores this process may run on, as torchrun does for `cpu`.

    Source: torch/_utils.py (`cpu_count`) of torch 2.13.
    """
    return len(os.sched_getaffinity(0))


def count_usable_cores(
    *, cgroup: str | os.PathLike[str] = "/sys/fs/cgroup", count_allowed: Callable[[], int] = count_allowed_cores
) -> int:
    """Count the cores the workers can use together: those allowed, or fewer where a cgroup limits CPU time (a pod).

    Reads cpu.max of cgroup v2 and the CFS quota of v1, as a container sees them at the mount's root.
    """
    allowed = count_allowed()
    quota = _read_quota(os.fspath(cgroup))
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def _read_quota(cgroup: str) -> float | None:
    fields = _read_fields(f"{cgroup}/cpu.max")
    if not fields:
        fields = _read_fields(f"{cgroup}/cpu/cpu.cfs_quota_us") + _read_fields(f"{cgroup}/cpu/cpu.cfs_period_us")
    try:
        quota, period = fields
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None  # "max", or unreadable
    return cores if cores > 0 else None  # -1 in v1: no limit


def _read_fields(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().split()
    except OSError:
        return []


TerminalSettings: TypeAlias = list[int | list[bytes | int]]
"""As `termios.tcgetattr` returns them."""


def read_terminal_settings(fd: int) -> TerminalSettings | None:
    """Read a terminal's settings. None: the descriptor is no terminal."""
    if not os.isatty(fd):
        return None
    import termios

    try:
        return termios.tcgetattr(fd)
    except termios.error:  # hung up
        return None


def restore_terminal(fd: int, settings: TerminalSettings) -> None:
    """Give the terminal its settings again: guard and agent block SIGTTOU. It may have been hung up."""
    import termios

    with contextlib.suppress(termios.error):
        termios.tcsetattr(fd, termios.TCSADRAIN, settings)


def find_nvml(environ: Mapping[str, str]) -> str | None:
    """Return NVML's library if the machine has NVIDIA's driver. None: nothing for devices is loaded or opened."""
    from muster._shared.contract import Env

    named = environ.get(Env.NVML)
    if named:
        return named
    return "libnvidia-ml.so.1" if any(map(os.path.exists, _NVIDIA_DRIVERS)) else None
