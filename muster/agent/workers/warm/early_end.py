"""Ends a warm worker early: tears down what the program made, and not what the template had imported.

The interpreter's own end clears every module and then runs the static destructors of every library: for torch that is
some 0.3 s of CPU per worker, and all workers of a node end at once. Nothing that a user could see depends on it. So the
last exit handler (it was registered first, in the template) does for the program's modules what the interpreter would
do for all, in the same order, and then leaves with `os._exit`:

    collect; clear `sys`'s attributes and `sys.modules`; collect; clear the modules that are still referenced, the last
    imported first; collect; flush

Objects of the program that are kept alive by the template's modules (a registry of torch, say) would not be destroyed.
If one of them has anything to do at its end (`__del__`, a file open for writing, a suspended generator), and wherever
else the two ends could differ (threads, libraries loaded since, devices, profilers), this process takes the slow way:
it returns, and the interpreter goes on as it always does.

Source: Py_FinalizeEx and finalize_modules in CPython's Python/pylifecycle.c.
"""

import atexit
import ctypes
import gc
import io
import os
import sys
import types
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Final, TextIO, cast

_CLEARED_IN_SYS: Final = (
    *("path", "argv", "ps1", "ps2", "last_exc", "last_type", "last_value", "last_traceback"),
    *("path_hooks", "path_importer_cache", "meta_path", "__interactivehook__"),
)
"""Source: sys_deletes in CPython's Python/pylifecycle.c."""

_TOOLS: Final = (
    *("LD_PRELOAD", "LD_AUDIT", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "OMP_TOOL_LIBRARIES"),
    *("KINETO_USE_DAEMON", "LLVM_PROFILE_FILE", "GCOV_PREFIX"),
)
"""Variables by which profilers enter a process; they write what they have seen when its libraries end."""

_NAME_SERVICE: Final = (b"libnss_", b"libresolv.", b"libcap.", b"libbsd.", b"libmd.")
"""The libraries of the name service, and what they bring: /etc/nsswitch.conf says which, and any look-up of a host or
a user loads them, `init_process_group` too. At their end they close what they have to their own services."""

_DEVICE_MODULES: Final = ("torch.cuda", "torch.xpu", "torch.mtia", "torch.hpu", "torch.npu")
_GENERATORS: Final = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


class EarlyEnd:
    """The last exit handler of a warm worker. Without an exit code (`record_code`) it does nothing."""

    def __init__(self) -> None:
        """Register the handler: before any other, so that it runs after all of them.

        Where a start-up hook (sitecustomize) was faster, the interpreter ends every worker: its handlers come after.
        """
        self._is_first = atexit._ncallbacks() == 0  # noqa: SLF001
        self._code: int | None = None
        self.template_modules: dict[str, ModuleType] = {}
        """Imported before the program began. Recorded in the template: in a worker that copies all their pages."""
        self._libraries: frozenset[bytes] = frozenset()
        self._streams: tuple[TextIO | None, ...] = ()
        self._finalizers: list[weakref.finalize[..., object]] = []
        self._before: Callable[[], object] = bool
        atexit.register(self._end)

    def record_template(self) -> None:
        """Record what is there before the program begins; in the template, when all is imported."""
        self.template_modules = dict(sys.modules)
        self._libraries = _list_libraries()
        self._finalizers = _list_finalizers()

    def record_start(self, before: Callable[[], object]) -> None:
        """Record the program's standard streams, and what to call first at the end; in the worker."""
        self._before = before
        self._streams = (sys.stdout, sys.stderr)

    def record_code(self, code: int | None) -> None:
        """Record the exit code that the program has chosen, 0 to 255; None: only the interpreter can tell."""
        self._code = code
        for finalizer in self._finalizers:
            finalizer.atexit = code is None  # the program's own run with the other exit handlers, before `_end`

    def _end(self) -> None:
        try:
            self._before()
            is_early = self._code is not None and self._can_end_early()
        except Exception:  # noqa: BLE001  # no descriptors left, or whatever a program has made of `sys`
            is_early = False
        if self._code is None:
            return
        if is_early:
            own = self._remove_own_modules()
            if self._tear_down(own):
                os._exit(self._code)
            sys.modules.update(self.template_modules)  # the interpreter clears the rest
        for finalizer in reversed(self._finalizers):
            found = finalizer.detach()
            if found is not None:
                found[1](*found[2], **found[3])

    # -- before -------------------------------------------------------------------------------------------------------

    def _can_end_early(self) -> bool:
        return (
            self._is_first
            and (sys.stdout, sys.stderr) == self._streams
            and len(sys._current_frames()) == 1  # noqa: SLF001  # daemon threads run on until the interpreter ends
            and sys.gettrace() is sys.getprofile() is None
            and not (sys.warnoptions or sys.flags.dev_mode or gc.get_debug() or gc.callbacks)
            and not (sys.flags.inspect or os.environ.get("PYTHONINSPECT"))  # whose prompt ends it with another code
            and not any(name in os.environ for name in _TOOLS)
            and not any(getattr(sys.modules.get(name), "_initialized", False) for name in _DEVICE_MODULES)
            and not any("interpreters" in name for name in sys.modules.keys() - self.template_modules.keys())
            and self._loaded_no_library()
            and _flush(self._streams)
            and _leave_process_groups()
        )

    def _loaded_no_library(self) -> bool:
        """Whether no library came with the program: its static destructors may have something to do.

        Those of the standard library's own modules have not, nor have those of the name service.
        """
        own = tuple(f"{path}/".encode() for path in sys.path if str(path).endswith("lib-dynload"))
        loaded = _list_libraries() - self._libraries
        return all(path.startswith(own) or os.path.basename(path).startswith(_NAME_SERVICE) for path in loaded)

    # -- tearing down -------------------------------------------------------------------------------------------------

    def _remove_own_modules(self) -> "list[weakref.ref[ModuleType]]":
        """Remove all modules from `sys`, as the interpreter does; returns those of the program, oldest first."""
        if gc.isenabled():
            gc.collect()
        for name in _CLEARED_IN_SYS:
            if hasattr(sys, name):
                setattr(sys, name, None)
        sys.is_finalizing = lambda: True
        known = self.template_modules
        own = [
            weakref.ref(module)
            for name, module in sys.modules.items()
            if isinstance(module, ModuleType) and (name == "__main__" or known.get(name) is not module)
        ]
        known.pop("__main__", None)
        sys.modules.clear()
        return own

    def _tear_down(self, own: "list[weakref.ref[ModuleType]]") -> bool:
        """Whether everything the program made that has something to do at its end has done it."""
        gc.collect()
        for reference in reversed(own):
            module = reference()
            if module is not None:
                _clear_module(module)
                del module
        gc.collect()
        try:
            if any(map(_has_an_end_of_its_own, gc.get_objects())):
                return False
        except Exception:  # noqa: BLE001  # an object's own code, or a stream that was detached
            return False
        return _flush(self._streams)


def _clear_module(module: ModuleType) -> None:
    """Set the module's names to None: first those with one underscore, then the others, `__builtins__` never.

    Source: _PyModule_ClearDict in CPython's Objects/moduleobject.c.
    """
    names = module.__dict__
    for is_private in (True, False):
        for name in list(names):
            starts = isinstance(name, str) and name.startswith("_") and name[1:2] != "_"
            if names[name] is not None and (starts if is_private else name != "__builtins__"):
                names[name] = None


def _has_an_end_of_its_own(thing: object) -> bool:
    """Whether something happens when this object is destroyed that a user could see.

    Asks for its type, not by `isinstance`: that also asks the object for its class, and a weak proxy its referent.
    """
    kind = type(thing)
    if issubclass(kind, io.IOBase):
        stream = cast("io.IOBase", thing)
        return not stream.closed and stream.writable() and not _is_standard(stream)
    if issubclass(kind, _GENERATORS):
        return any(getattr(thing, name, None) is not None for name in ("gi_frame", "cr_frame", "ag_frame"))
    return hasattr(kind, "__del__") and not issubclass(kind, type)


def _is_standard(stream: io.IOBase) -> bool:
    try:
        return stream.fileno() in (0, 1, 2)
    except (OSError, ValueError):
        return False


# -- what the process has ---------------------------------------------------------------------------------------------


def _list_finalizers() -> "list[weakref.finalize[..., object]]":
    """The exit handlers of torch's own operators, oldest first: over half of the CPU of a worker's end.

    They take the operators out of torch's tables, which nothing reads any more.
    """
    return [
        finalizer
        for finalizer, about in getattr(weakref.finalize, "_registry", {}).items()
        if (about.func.__module__, about.func.__qualname__) == ("torch.library", "_del_library") and finalizer.atexit
    ]


def _list_libraries() -> frozenset[bytes]:
    """Paths of all files that this process executes code from."""
    with open("/proc/self/maps", "rb") as file:
        fields = (line.split(maxsplit=5) for line in file)
        return frozenset(words[5].rstrip() for words in fields if len(words) == 6 and words[1][2:3] == b"x")


def _flush(streams: tuple[TextIO | None, ...]) -> bool:
    """Flush Python's and C's streams; False where the interpreter has an error to report."""
    try:
        for stream in streams:
            if stream is not None:
                stream.flush()
    except Exception:  # noqa: BLE001  # whatever it is, the interpreter meets it again and reports it
        return False
    ctypes.PyDLL(None).fflush(None)
    return True


def _leave_process_groups() -> bool:
    """Destroy gloo's process groups: their destructors wait for what is still being sent. False for other backends."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc is not None and getattr(rpc, "_is_current_rpc_agent_set", bool)():
        return False
    if c10d is None or not c10d.is_initialized():
        return True
    if any(config not in ("cpu:gloo,cuda:gloo", "cpu:gloo", "gloo") for config in _list_backends(c10d)):
        return False
    try:
        c10d.destroy_process_group()
    except Exception:  # noqa: BLE001  # the interpreter's way may fail too, and then reports it
        return False
    return True


def _list_backends(c10d: ModuleType) -> list[str]:
    return [str(config) for config in c10d._world.pg_backend_config.values()]  # noqa: SLF001
