"""Checks whether this process may be forked into workers: in the template, after its imports and before each fork."""

import os
import stat
import sys
import warnings
from collections.abc import Container, Mapping
from typing import Final

_HARMLESS_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def list_descriptors() -> frozenset[int]:
    """List the open descriptors."""
    found = {int(name) for name in os.listdir("/proc/self/fd")}
    return frozenset(fd for fd in found if os.path.exists(f"/proc/self/fd/{fd}"))  # without the listing's own


def find_hazard(known_fds: Container[int]) -> str | None:
    """Return why workers must not be forked from this process, in one line; None if they may.

    Args:
        known_fds: our descriptors, which were open before the imports.
    """
    return _find_tracer() or _find_environment_reader() or find_hazard_now() or _find_open_file(known_fds)


def find_hazard_now() -> str | None:
    """Make those checks of `find_hazard` whose results may change while the template waits."""
    return _find_device() or _find_threads()


def _find_tracer() -> str | None:
    monitoring = getattr(sys, "monitoring", None)
    tools = [monitoring.get_tool(i) for i in range(6)] if monitoring is not None else []
    if sys.gettrace() is not None or sys.getprofile() is not None or any(tools):
        return "a profiler, debugger or coverage tool is active in the interpreter"
    return None


def _find_environment_reader() -> str | None:
    """Find a start-up module of the user that may read the worker's rank, which the template does not have."""
    for name in ("sitecustomize", "usercustomize"):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is None:
            continue
        with open(path, "rb") as file:
            source = file.read()
        if b"environ" in source or b"getenv" in source:
            return f"{path} reads the environment when Python starts"
    return None


def _find_device() -> str | None:
    torch = sys.modules.get("torch")
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        is_initialized = getattr(module, "is_initialized", None)
        if is_initialized is not None and is_initialized():
            return f"an import has initialised {name}"
    return None


def _find_threads() -> str | None:
    """Find threads: they do not survive a fork, and the locks they held stay locked.

    OpenBLAS starts its pool when numpy is imported, and has fork handlers that stop it. After one discarded fork, only
    threads without such handlers are left.
    """
    if _count_threads() == 1:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python 3.12, about these threads
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    count = _count_threads()
    if count == 1:
        return None
    threading = sys.modules.get("threading")
    names = [thread.name for thread in threading.enumerate()[1:]] if threading else []
    what = "a thread" if count == 2 else f"{count - 1} threads"
    return f"an import has left {what} running ({', '.join(names) or 'not started by Python'})"


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _find_open_file(known_fds: Container[int]) -> str | None:
    """Find a socket or pipe that an import left open and all workers would share. Regular files are allowed."""
    for fd in sorted(list_descriptors()):
        if fd in known_fds:
            continue
        target = os.readlink(f"/proc/self/fd/{fd}")
        if not stat.S_ISREG(os.fstat(fd).st_mode) and target not in _HARMLESS_DEVICES:
            return f"an import has left descriptor {fd} open ({target})"
    return None


_START_PREFIXES: Final = ("LD_", "MALLOC_", "GLIBC_TUNABLES", "LANG", "LC_", "TZDIR", "TMPDIR", "PYTHON")
"""Prefixes of variables that the C library and the interpreter read at start."""
_START_NAMES: Final = ("TEMP", "TMP")
"""torch's modules look up the temporary folder at their import; `TMPDIR` comes first."""
_IMPORT_PREFIXES: Final = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_"),  # thread pools
    *("ACC_", "I_MPI_", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "NVPL_"),  # MKL and OpenMP too
    *("DNNL_", "ONEDNN_", "MKLDNN_", "GFORTRAN_", "OPENSSL_", "INTEL_LIBITTNOTIFY"),
    *("NPY_", "NUMPY_", "TQDM_"),  # torch imports them if installed
    *("INDUCTOR_", "AOT", "PARTITIONER_", "CUTLASS_", "CUTEDSL_", "PT2_COMPILE_", "FAKE_ALLOW_META"),  # compiler
    *("ENABLE_PERSISTENT_TMA_", "ENABLE_TEMPLATE_TMA_", "ENABLE_TMA_LOAD_", "LOG_AUTOTUNE_", "LOG_TLPARSE"),
    *("COMPILE_STROBELIGHT_", "FX_", "KINETO_USE_DAEMON", "TORCHEXPORT_"),
    *("TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_LOGS", "PYTORCH_", "TRITON_"),
    *("COVERAGE_PROCESS_START",),
)


_LATE_PREFIXES: Final = ("TORCH_NCCL_", "TORCH_ELASTIC_", "PYTORCH_NVML_BASED_CUDA_CHECK")
"""Exceptions, which are read when a process group is made. The last one, which `import lightning` sets, is read at each
look for a GPU. PYTORCH_CUDA_ALLOC_CONF is not an exception: torch built for CUDA chooses its allocator while its
libraries are loaded, and since 2.9 reads all of the variable then.

Source: BackendStaticInitializer in torch's c10/cuda/CUDACachingAllocator.cpp.
"""


def is_read_early(name: str) -> bool:
    """Return whether a process that has started, or imported torch, no longer reads the variable."""
    return name.startswith(_START_PREFIXES) or name in _START_NAMES or is_read_at_import(name)


def is_read_at_import(name: str) -> bool:
    """Return whether torch, or what it needs, reads the variable at its import and never again."""
    return name.startswith(_IMPORT_PREFIXES) and not name.startswith(_LATE_PREFIXES)


def find_early_difference(
    template: Mapping[str, str], worker: Mapping[str, str], *, without: Container[str] = ()
) -> str | None:
    """Return the first variable, in alphabetical order, that a fork of the template could not adopt, or None.

    Args:
        template: its environment.
        worker: that of a process that is to be forked from it.
        without: variables that may differ.
    """
    names = (name for name in template.keys() | worker.keys() if template.get(name) != worker.get(name))
    return min((name for name in names if is_read_early(name) and name not in without), default=None)
