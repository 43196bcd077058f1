"""Ends a warm worker early if a user could not see the difference from the interpreter's own end.

The interpreter's end destroys every object, clears every module and then runs the static destructors of every library.
For torch this takes some 0.3 s of CPU per worker, and all workers of a node end at once. The last exit handler, which
the template registered first, calls `os._exit` instead if nothing is left that has an end of its own. That means no
object that runs code when it is destroyed (`__del__`, an open file or socket, a suspended generator, a weak reference
with the program's callback), no other thread, no library loaded since, no device and no profiler. Otherwise the handler
returns, and the interpreter continues as usual. So an early end runs no code of the program's.

This is the only place that does part of what `Py_FinalizeEx` does, in this order:

    - flush standard output and standard error; a failure there is left to the interpreter
    - destroy gloo's process groups
    - collect garbage, unless the program has switched that off
    - clear the program's modules and collect, so that C libraries do what they do when their objects are destroyed
    - flush C's streams

Some things still differ. In the `__del__` of what that collection finds, `sys.is_finalizing()` is false, because the
interpreter has not begun to end. If only a module of the template or a context variable holds an object of a C library,
that object is not destroyed, because no list of such objects exists. (For example, a program may keep a connection to a
database in `json`.) Torch's own operators stay in torch's tables, which no code reads any more.

`tests/end_programs.py` shows which programs end in which way, and that each ends as in plain Python.

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
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Final, TextIO, cast

_TOOLS: Final = (
    *("LD_PRELOAD", "LD_AUDIT", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "OMP_TOOL_LIBRARIES"),
    *("KINETO_USE_DAEMON", "LLVM_PROFILE_FILE", "GCOV_PREFIX"),
)
"""Variables by which profilers enter a process. Profilers write what they have seen when their libraries end."""

_NAME_SERVICE: Final = (b"libnss_", b"libresolv.", b"libcap.", b"libbsd.", b"libmd.")
"""The libraries of the name service, and what they load. /etc/nsswitch.conf names them, and any look-up of a host or
user loads them, as `init_process_group` does. At their end they close their connections to their own services."""

_DEVICE_MODULES: Final = ("torch.cuda", "torch.xpu", "torch.mtia", "torch.hpu", "torch.npu")
_GENERATORS: Final = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_IN_MEMORY: Final = (io.StringIO, io.BytesIO)
_HAS_COLLECTOR: Final = 1 << 14
"""Py_TPFLAGS_HAVE_GC: the collector knows the instances of a class with this flag."""
_LAST_ERROR: Final = ("last_exc", "last_type", "last_value", "last_traceback")


class EarlyEnd:
    """The last exit handler of a warm worker. Without an exit code (`record_code`) it does nothing."""

    def __init__(self) -> None:
        """Register the handler: before any other, so that it runs after all of them.

        If a start-up hook (sitecustomize) registered handlers earlier, they run later, so the interpreter ends every
        worker.
        """
        self._is_first = atexit._ncallbacks() == 0  # noqa: SLF001
        self._code: int | None = None
        self.template_modules: dict[str, ModuleType] = {}
        """Modules imported before the program began. The template records them: recording in a worker would copy all
        their pages."""
        self._libraries: frozenset[bytes] = frozenset()
        self._streams: tuple[TextIO | None, ...] = ()
        self._witness: list[object] = []
        """Made when the program begins. The collector lists it unless the program has frozen the existing objects."""
        self._finalizers: list[weakref.finalize[..., object]] = []
        self._before: Callable[[], object] = bool
        atexit.register(self._end)

    def record_template(self) -> None:
        """Record what exists before the program begins; called in the template, after all imports."""
        self.template_modules = dict(sys.modules)
        self._libraries = _list_libraries()
        self._finalizers = _list_finalizers()

    def record_start(self, before: Callable[[], object]) -> None:
        """Record the program's standard streams, and what to call first at the end; called in the worker."""
        self._before = before
        self._streams = (sys.stdout, sys.stderr)
        self._witness = []

    def record_code(self, code: int | None) -> None:
        """Record the exit code that the program has chosen, 0 to 255; None means that only the interpreter can tell."""
        self._code = code
        for finalizer in self._finalizers:
            finalizer.atexit = code is None  # runs with the other exit handlers, before `_end`

    def _end(self) -> None:
        try:
            self._before()
            is_early = self._code is not None and self._can_end_early()
        except Exception:  # noqa: BLE001  # no descriptors left, or whatever a program has made of `sys`
            is_early = False
        if is_early and self._code is not None:
            self._destroy_own_objects()
            ctypes.PyDLL(None).fflush(None)
            os._exit(self._code)
        self.template_modules.clear()  # unreferenced modules are destroyed, the others' names cleared
        if self._code is None:
            return
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
            and not (sys.flags.inspect or os.environ.get("PYTHONINSPECT"))  # changes the exit code
            and not any(name in os.environ for name in _TOOLS)
            and not any(getattr(sys.modules.get(name), "_initialized", False) for name in _DEVICE_MODULES)
            and not any("interpreters" in name for name in sys.modules.keys() - self.template_modules.keys())
            and self._loaded_no_library()
            and _flush(self._streams)
            and _leave_process_groups()
            and not self._has_an_end()
        )

    def _loaded_no_library(self) -> bool:
        """Return whether the program loaded no library, whose static destructors might have something to do.

        Destructors of the standard library's own modules and of the name service have nothing to do.
        """
        own = tuple(f"{path}/".encode() for path in sys.path if str(path).endswith("lib-dynload"))
        loaded = _list_libraries() - self._libraries
        return all(path.startswith(own) or os.path.basename(path).startswith(_NAME_SERVICE) for path in loaded)

    def _has_an_end(self) -> bool:
        """Return whether there is an object whose destruction a user could see.

        Objects that are older than the program do not count.
        """
        if gc.isenabled():
            gc.collect()
        things = gc.get_objects()
        if not any(thing is self._witness for thing in things):
            return True
        kinds = {
            kind
            for kind in set(map(type, things))
            if hasattr(kind, "__del__") or issubclass(kind, (type, weakref.ReferenceType))
        }
        standard = {id(layer) for stream in self._streams for layer in _list_layers(stream)}
        return any(
            type(thing) in kinds and id(thing) not in standard and self._has_an_end_of_its_own(thing)
            for thing in things
        )

    def _has_an_end_of_its_own(self, thing: object) -> bool:
        """Return whether a user could see the destruction of this object.

        It checks the type instead of `isinstance`, which would also ask the object for its class, and a weak proxy for
        its referent's.
        """
        kind = type(thing)
        if issubclass(kind, type):
            return hasattr(thing, "__del__") and not cast("type", thing).__flags__ & _HAS_COLLECTOR
        if issubclass(kind, weakref.ReferenceType):
            return self._is_visible(cast("weakref.ref[object]", thing).__callback__)
        if issubclass(kind, _GENERATORS):
            return any(getattr(thing, name, None) is not None for name in ("gi_frame", "cr_frame", "ag_frame"))
        if issubclass(kind, io.IOBase):
            return kind not in _IN_MEMORY and not cast("io.IOBase", thing).closed
        return True

    def _is_visible(self, callback: object) -> bool:
        """Return whether a weak reference's callback is the program's, and not that of a package of the template."""
        if type(callback) is BuiltinFunctionType:
            # Methods of an abstract class's registry or of `threading.local`.
            return type(callback.__self__) not in (weakref.ReferenceType, tuple)
        if type(callback) is not FunctionType:
            return callback is not None
        name = callback.__module__  # muster's own hooks are in no list
        return name == "__main__" or (name in sys.modules and name.partition(".")[0] not in self.template_modules)

    # -- at the end ---------------------------------------------------------------------------------------------------

    def _destroy_own_objects(self) -> None:
        """Drop all that the program's modules, its exit handlers and its failure hold."""
        atexit._clear()  # noqa: SLF001
        for name in _LAST_ERROR:
            vars(sys).pop(name, None)
        own = [
            object.__getattribute__(module, "__dict__")  # `vars` loads lazy modules
            for name, module in sys.modules.items()
            if isinstance(module, ModuleType) and (name == "__main__" or self.template_modules.get(name) is not module)
        ]
        for names in reversed(own):
            names.clear()
        gc.collect()


def _list_layers(stream: TextIO | None) -> Iterator[object]:
    """Return the stream, its buffer and its file, as far as it has them."""
    layer: object = stream
    while layer is not None:
        yield layer
        layer = getattr(layer, "buffer", None) or getattr(layer, "raw", None)


# -- what the process has ---------------------------------------------------------------------------------------------


def _list_finalizers() -> "list[weakref.finalize[..., object]]":
    """Return the exit handlers of torch's own operators, oldest first. They use over half of the CPU of a worker's end.

    They take the operators out of torch's tables, which nothing reads any more.
    """
    return [
        finalizer
        for finalizer, about in getattr(weakref.finalize, "_registry", {}).items()
        if (about.func.__module__, about.func.__qualname__) == ("torch.library", "_del_library") and finalizer.atexit
    ]


def _list_libraries() -> frozenset[bytes]:
    """Return the paths of all files that this process has mapped as executable."""
    with open("/proc/self/maps", "rb") as file:
        fields = (line.split(maxsplit=5) for line in file)
        return frozenset(parts[5].rstrip() for parts in fields if len(parts) == 6 and parts[1][2:3] == b"x")


def _flush(streams: tuple[TextIO | None, ...]) -> bool:
    """Flush Python's and C's streams; return False if the interpreter has an error to report."""
    try:
        for stream in streams:
            if stream is not None:
                stream.flush()
    except Exception:  # noqa: BLE001  # whatever it is, the interpreter meets it again and reports it
        return False
    ctypes.PyDLL(None).fflush(None)
    return True


def _leave_process_groups() -> bool:
    """Destroy gloo's process groups, whose destructors wait for pending sends. Return False for other backends."""
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
