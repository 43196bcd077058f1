"""Follows torch's process groups in a worker, for the hang watch and so that the process can end.

`program` runs this file when the worker calls `init_process_group`, and not before. A program without process groups is
not affected. A failure here leaves the worker unchanged. The file uses only the standard library and torch. Torch's
objects are `Any`, because this file must not import torch for their types.

*For the hang watch*: it starts torch's worker server, which answers in its own threads without the interpreter's lock.
It also records in a memory file which ranks each group has, because gloo's recorder does not tell. The agent finds both
as descriptors of this process, under fixed high numbers. The socket's name has been removed by then, so nothing is left
on disk however the worker ends. A fork inherits the descriptors and must not be mistaken for the worker. The agent
gives each request a deadline.

*For the end*: a gloo group has threads that run its collectives. Such a thread releases a finished collective and its
tensors, and needs the interpreter's lock to do so. torch does not wait for that. The group's destructor holds the lock
while it waits for the thread, which is a deadlock. (It is enough that a DDP model has the last reference to its group.)
Once the interpreter has begun to end, a thread that waits for the lock calls `std::terminate`. So this file waits
without the lock until the threads of a group have released everything: before `destroy_process_group` drops the group,
and at exit. Like the destructor, it waits for collectives that are still pending. A program that is failing waits only
for `_FAILING_LIMIT_S`, because other ranks may need its end to give up their collectives. After that nothing destroys
the group.
"""

import atexit
import contextlib
import ctypes
import json
import os
import posix  # unwatched: `late_changes` searches modules per putenv
import sys
import tempfile
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

_ERROR_LEVEL = 2
"""Level of torch's native log. The server would print four warnings on the worker's stderr."""
_BUFFERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""How many collectives the recorder keeps; 0 by default before torch 2.11.

The second name is the older one: a torch that knows the first warns of it.
"""
_ENTRIES = "2000"
_FULL_BY_DEFAULT = (2, 11)
_DUMP_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Where the recorder's dumps go. The second name is the older one."""
_NEW_NAMES = (2, 8)
_FAILING_LIMIT_S = 2.0
_UNSEEN_S = 0.02
"""How long to wait for threads that cannot be observed."""
_GLOO_THREAD = "pt_gloo_runloop"
_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAIT_BITSET = 9
"""FUTEX_WAIT_BITSET: how glibc waits for a condition."""
_DUMP_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_DUMP_SWITCH = "TORCH_NCCL_DUMP_ON_TIMEOUT"


def begin_group(module: "ModuleType", *, is_watched: bool) -> None:
    """Replace torch's table of groups, once per process, when the worker calls `init_process_group`.

    Args:
        module: torch.distributed.distributed_c10d.
        is_watched: also start the server, once per process, and record the call.
    """
    groups: Any = getattr(module, "_pg_group_ranks", None)
    # Not isinstance: this file runs again for each call.
    if getattr(groups, "owner_pid", None) == os.getpid():
        groups.write({"init": True})
        return
    groups = _Groups(groups or {})
    module._pg_group_ranks = groups  # type: ignore[attr-defined]  # noqa: SLF001
    atexit.register(groups.settle)
    if is_watched:
        _set_defaults()
        groups.open_file()
        groups.write({"init": True})
        _start_server()  # last, because an old torch has none


class _Groups(dict):  # type: ignore[type-arg]  # torch's own is a plain dict
    """Torch's table of groups, which also waits for a group's threads before it drops the group.

    It also writes each new group to the memory file, as one line of JSON.
    """

    def __init__(self, groups: "dict[object, object]") -> None:
        super().__init__(groups)
        self.owner_pid = os.getpid()
        self.has_failed = False
        """Whether the program exits with another code than 0; `program` sets it."""
        self._fd = -1
        self._known = _list_threads()
        self._threads: dict[object, set[str]] = {}
        """For each group, the threads that have started since the group before it."""

    def __delitem__(self, group: object) -> None:
        self.settle([group])
        super().__delitem__(group)

    def clear(self) -> None:
        """Drop all groups."""
        self.settle()
        super().clear()

    def settle(self, groups: "list[object] | None" = None) -> None:
        """Wait until the groups' threads have released everything; see the top of this file.

        Args:
            groups: None means all.
        """
        groups = [group for group in (self if groups is None else groups) if group in self._threads]
        if not groups or os.getpid() != self.owner_pid:
            return  # done already, or a fork
        threads = [thread for group in groups for thread in self._threads.get(group, ())]
        until_s = time.monotonic() + _FAILING_LIMIT_S if self._is_failing() else None
        if not _wait_idle(threads, until_s):
            for group in groups:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        for group in groups:
            self._threads.pop(group, None)

    def _is_failing(self) -> bool:
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        return self.has_failed or not (error is None or (isinstance(error, SystemExit) and not error.code))

    def open_file(self) -> None:
        """Create the memory file."""
        self._fd = _move_descriptor(os.memfd_create("muster-groups"), choose_number(1))

    def __setitem__(self, group: "Any", ranks: "Any") -> None:
        super().__setitem__(group, ranks)
        threads = _list_threads()
        self._threads.setdefault(group, set()).update(threads - self._known)
        self._known = threads
        try:
            line: dict[str, object] = {"group": str(group.group_name), "ranks": [int(rank) for rank in ranks]}
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return  # another torch: fewer known groups
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
            backend = group._get_backend(sys.modules["torch"].device("cuda"))  # noqa: SLF001
            line["device_timeout_s"] = backend.options._timeout.total_seconds()  # noqa: SLF001
        self.write(line)

    def write(self, line: "dict[str, object]") -> None:
        """Append one line."""
        if os.getpid() != self.owner_pid or self._fd < 0:
            return
        try:
            os.write(self._fd, f"{json.dumps(line)}\n".encode())
        except OSError:
            return  # closed by the program


def _list_threads() -> "set[str]":
    try:
        return set(os.listdir("/proc/self/task"))
    except OSError:
        return set()


def _wait_idle(threads: "list[str]", until_s: "float | None") -> bool:
    """Wait, without the interpreter's lock, until the gloo threads among these have nothing left to do.

    Args:
        threads: their ids.
        until_s: by the monotonic clock; None means without a limit, as torch waits.

    Returns:
        False if `until_s` has passed.
    """
    pause_s = 0.0005
    try:
        threads = [thread for thread in threads if _read_about_thread(thread, "comm") == _GLOO_THREAD]
        if not threads:  # or unnamed, before torch 2.6
            time.sleep(_UNSEEN_S)
        while not all(map(_is_idle, threads)):
            if until_s is not None and time.monotonic() >= until_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
    except (OSError, LookupError, ValueError):  # not Linux, or another CPU
        time.sleep(_UNSEEN_S)
    return True


def _is_idle(thread: str) -> bool:
    """Return whether a thread waits for its next collective: on a condition, without a time limit.

    For the interpreter's lock and for other ranks it waits with a limit; for a mutex it uses another operation.

    Source: futex(2), and `syscall` in proc(5): the call's number and its arguments, or "running".
    """
    fields = _read_about_thread(thread, "syscall").split()
    if fields[:1] == ["running"]:
        return False
    if not fields:
        return True
    is_condition = int(fields[0]) == _FUTEX[os.uname().machine] and int(fields[2], 16) & 0x7F == _WAIT_BITSET
    return is_condition and int(fields[4], 16) == 0


def _read_about_thread(thread: str, name: str) -> str:
    """Read a file about a thread of this process; empty when the thread has ended."""
    try:
        with open(f"/proc/self/task/{thread}/{name}", encoding="ascii") as file:
            return file.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        if os.path.exists(f"/proc/self/task/{thread}"):
            raise
        return ""


def choose_number(place: int) -> int:
    """Return the number for the server's socket (0) or the groups' file (1), below that of the stack file."""
    return min(os.sysconf("SC_OPEN_MAX"), 1024) - 2 - place


def _move_descriptor(fd: int, number: int) -> int:
    """Give a descriptor its number.

    Raises:
        OSError: the program has a file of that number.
    """
    try:
        taken = os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:
        taken = ""
    try:
        if taken and "muster-" not in taken:  # otherwise inherited by a fork
            raise OSError(f"descriptor {number} is taken")
        os.dup2(fd, number, inheritable=False)
    finally:
        os.close(fd)
    return number


def _set_defaults() -> None:
    """Set what the recorder reads from the environment, unless the user has. `os.environ` stays unchanged.

    NCCL's dumps go to the rank's log folder. torch's default is a folder in the home directory, which is lost with a
    container.
    """
    version = _read_version()
    has_new_names = version >= _NEW_NAMES
    if version < _FULL_BY_DEFAULT and not any(name in os.environ for name in _BUFFERS):
        posix.putenv(_BUFFERS[0 if has_new_names else 1], _ENTRIES)
    folder = os.path.dirname(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if not folder:
        return
    path = os.path.join(folder, "collectives_")  # torch appends the rank
    if not any(name in os.environ for name in _DUMP_FILES):
        posix.putenv(_DUMP_FILES[0 if has_new_names else 1], path)
    for name, value in ((_DUMP_PIPE, path), (_DUMP_SWITCH, "1")):
        if name not in os.environ:
            posix.putenv(name, value)


def _read_version() -> "tuple[int, ...]":
    """Read the version: "2.13.0+cpu" gives (2, 13)."""
    return tuple(int(part) for part in sys.modules["torch"].__version__.split(".")[:2])


def _start_server() -> None:
    from torch._C._distributed_c10d import _WorkerServer

    torch_file = sys.modules["torch"].__file__ or ""
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch_file), "lib", "libc10.so"))
    level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    before, level.value = level.value, max(level.value, _ERROR_LEVEL)
    try:
        _move_descriptor(_listen(_WorkerServer), choose_number(0))
    finally:
        level.value = before


def _listen(start: "Callable[[str], object]") -> int:
    """Start the server on a socket whose name is removed at once, and return a descriptor of the socket.

    The socket is made in the rank's own folder, because its name would remain if the worker were killed just now.
    """
    name = f"muster-{os.getpid()}.sock"
    log_folder = os.path.dirname(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    failed = OSError("no folder for a socket")
    for folder in filter(None, (log_folder, tempfile.gettempdir(), "/dev/shm")):  # noqa: S108  # some hold no sockets
        try:
            fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            failed = error
            continue
        try:
            # A socket's path has at most 107 bytes.
            server = start(f"/proc/self/fd/{fd}/{name}")
            # Never destroyed: the destructor's threads may wait for the interpreter.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
            return os.open(name, os.O_PATH, dir_fd=fd)
        except (OSError, RuntimeError) as error:
            failed = OSError(str(error))
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=fd)
            os.close(fd)
    raise failed
