"""In a worker: lets the agent read torch's flight recorder, and counts the steps of optimizers.

`program` runs this file when the worker calls `init_process_group`, and when an optimizer has stepped, and not before;
a program that does neither is left alone.

It starts torch's worker server, which answers without the interpreter's lock, in threads of its own, and keeps in a
memory file which ranks each group has: gloo's recorder does not say it.

The agent finds both as descriptors of this process, under fixed high numbers. The socket has no name any more by then:
nothing is left on disk however the worker ends. A fork inherits the descriptors and must not be taken for the worker;
the agent gives each request a deadline.

Steps are counted in the status page, for scripts that do not report them through `muster.worker`: for progress and as
a sign of life only, never for an agreement. The page's layout stands here again, because `muster` may be another
package in this process.

Whatever fails here leaves the worker as it was. The standard library and torch only. `Any` is what torch's objects are
here: this file must not import torch for their types.
"""

import contextlib
import ctypes
import json
import mmap
import os
import posix  # its putenv is none that others watch: `late_changes` looks at all modules for each call
import sys
import tempfile
import time
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

_ERROR_LEVEL = 2
"""Of torch's native log: the server would print four warnings on the worker's stderr."""
_BUFFERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""How many collectives the recorder keeps: 0 by default before torch 2.11. The second name is the older one: a torch
that knows the first warns of it."""
_ENTRIES = "2000"
_FULL_BY_DEFAULT = (2, 11)
_DUMP_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Likewise."""
_NEW_NAMES = (2, 8)
_DUMP_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_DUMP_SWITCH = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_PAGE_MAGIC = 0x6D75737465720002
_BLOCK_BYTES = 4096
_MAGIC_WORD, _SLOTS, _ROUND, _ATTEMPT = 0, 1, 2, 3
_STEP, _CHANGED_NS, _OPTIMIZER_STEPS = 1, 4, 6
"""Of `_contract.StatusPageLayout`."""


def begin_group(module: "ModuleType") -> None:
    """The worker calls `init_process_group` now: start the server, once per process; record the call.

    Args:
        module: torch.distributed.distributed_c10d.
    """
    recorder: Any = getattr(module, "_pg_group_ranks", None)
    # Not by its class: this file is run again for each call.
    if getattr(recorder, "owner_pid", None) != os.getpid():
        _set_defaults()
        recorder = _GroupRecorder(recorder or {})
        module._pg_group_ranks = recorder  # type: ignore[attr-defined]  # noqa: SLF001
        recorder.write({"init": True})
        _start_server()  # last: an old torch has none, and its groups are worth knowing all the same
    else:
        recorder.write({"init": True})


class _GroupRecorder(dict):  # type: ignore[type-arg]  # torch's own is a plain dict
    """Torch's table of groups, which also writes each new group to the memory file, as one line of JSON."""

    def __init__(self, groups: "dict[object, object]") -> None:
        super().__init__(groups)
        self.owner_pid = os.getpid()
        self._fd = _move_descriptor(os.memfd_create("muster-groups"), choose_number(1))

    def __setitem__(self, group: "Any", ranks: "Any") -> None:
        super().__setitem__(group, ranks)
        try:
            line: dict[str, object] = {"group": str(group.group_name), "ranks": [int(rank) for rank in ranks]}
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return  # another torch: the agent knows fewer groups
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):  # no backend for such devices
            backend = group._get_backend(sys.modules["torch"].device("cuda"))  # noqa: SLF001
            line["device_timeout_s"] = backend.options._timeout.total_seconds()  # noqa: SLF001
        self.write(line)

    def write(self, line: "dict[str, object]") -> None:
        """Append one line."""
        if os.getpid() != self.owner_pid:
            return
        try:
            os.write(self._fd, f"{json.dumps(line)}\n".encode())
        except OSError:
            return  # the program has closed it


def choose_number(place: int) -> int:
    """The number of the server's socket (0) or of the groups' file (1), below that of the stack file."""
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
        if taken and "muster-" not in taken:  # else it is that of the process that this one was forked from
            raise OSError(f"descriptor {number} is taken")
        os.dup2(fd, number, inheritable=False)
    finally:
        os.close(fd)
    return number


def _set_defaults() -> None:
    """Set what the recorder reads from the environment, where the user has not. `os.environ` stays as it is.

    NCCL's dumps go to the rank's log folder: torch's default is a folder of the home, which goes with a container.
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
    """(2, 13) of "2.13.0+cpu"."""
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
    """Start the server on a socket whose name is removed at once; returns a descriptor of it.

    The folder is the rank's own: the name would stay behind if the worker were killed just now.
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
            # Not the folder's path: a socket's has at most 107 bytes.
            server = start(f"/proc/self/fd/{fd}/{name}")
            # Its destructor waits for its threads, at a moment when they may wait for the interpreter: it never runs.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
            return os.open(name, os.O_PATH, dir_fd=fd)
        except (OSError, RuntimeError) as error:
            failed = OSError(str(error))
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=fd)
            os.close(fd)
    raise failed


# -- the count of steps -----------------------------------------------------------------------------------------------


def build_step_counter() -> "Callable[[Any], object]":
    """What to call with an optimizer after each of its steps. It writes into this rank's slot of the status page.

    The most that one optimizer has done counts: a GAN has two, which step in turn. While the script reports steps
    itself, and in forks of this process, it does nothing.

    Raises:
        OSError: there is no page.
        ValueError: likewise, or it is of another round.
    """
    words = _map_slot(os.environ["MUSTER_STATUS_PAGE"])
    counts: dict[int, list[Any]] = {}
    """By the optimizer's id: its steps, and a reference that removes the entry with it, before the id is used again."""
    is_fork = False

    def stop() -> None:
        nonlocal is_fork
        is_fork = True

    def count(optimizer: "Any") -> None:
        if is_fork or words[_STEP]:
            return
        key = id(optimizer)
        entry = counts.get(key)
        if entry is None:
            entry = counts[key] = [0, weakref.ref(optimizer, lambda _: counts.pop(key, None))]
        entry[0] += 1
        if entry[0] > words[_OPTIMIZER_STEPS]:
            words[_OPTIMIZER_STEPS] = entry[0]
        words[_CHANGED_NS] = time.monotonic_ns()  # of any: a new optimizer has few steps, and is a sign of life

    os.register_at_fork(after_in_child=stop)
    return count


def _map_slot(where: str) -> "memoryview[int]":
    """Map the slot at `FILE:ROUND:SLOT`, without claiming it: another process of the rank may be the one that speaks.

    Raises:
        OSError: see `build_step_counter`.
        ValueError: likewise.
    """
    path, round_number, slot = where.rsplit(":", 2)
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        view = memoryview(mmap.mmap(opened, os.fstat(opened).st_size))
    finally:
        os.close(opened)
    header, number = view[:_BLOCK_BYTES].cast("q"), int(slot)
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    found = header[_MAGIC_WORD], header[_ROUND], header[_ATTEMPT]
    if found != (_PAGE_MAGIC, int(round_number), attempt) or not 0 <= number < header[_SLOTS]:
        raise ValueError(f"{where} is not this rank's")
    return view[(number + 1) * _BLOCK_BYTES : (number + 2) * _BLOCK_BYTES].cast("q")
