"""Makes a fork of the template equal to a cold worker."""

import contextlib
import io
import os
import sys
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from muster.agent.workers.spec import WorkerSpec

if TYPE_CHECKING:
    import ctypes

_SETTERS: Final = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "", "_64")
)
"""The names that builds of OpenBLAS export. numpy's wheels add a prefix, and 64-bit builds a suffix."""


def become_worker(spec: WorkerSpec) -> None:
    """Set session, descriptors, environment, affinity and random generators. The order matters: torch comes last."""
    os.setsid()
    _replace_streams(spec.stdout_fd, spec.stderr_fd)
    replace_environment(spec.env)
    if spec.cpus is not None:
        bind_to_cpus(spec.cpus)
    _reseed_generators()
    _renew_process_identity()


def _replace_streams(stdout_fd: int, stderr_fd: int) -> None:
    """Replace the template's streams by the worker's, and first write to them what the imports have printed."""
    printed = [os.pread(number, os.fstat(number).st_size, 0) for number in (1, 2)]
    os.dup2(stdout_fd, 1)
    os.dup2(stderr_fd, 2)
    for fd in (stdout_fd, stderr_fd):
        os.close(fd)
    for number, text in zip((1, 2), printed, strict=True):
        with contextlib.suppress(OSError):  # full disk or closed pipe
            _write_all(number, text)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, f"__{name}__")
        fresh = _open_stream(name, fd, old)
        if getattr(sys, name) is old:  # unless an import replaced it, as in a cold worker
            setattr(sys, name, fresh)
        setattr(sys, f"__{name}__", fresh)


def _write_all(fd: int, text: bytes) -> None:
    while text:
        text = text[os.write(fd, text) :]


def _open_stream(name: str, fd: int, old: io.TextIOWrapper) -> io.TextIOWrapper:
    """Open a text stream as the interpreter does at start; its buffering depends on what the descriptor is.

    Source: create_stdio in CPython's Python/pylifecycle.c.
    """
    unbuffered = old.write_through
    raw = io.FileIO(fd, "wb", closefd=False)
    raw.name = f"<{name}>"
    stream = io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw, _choose_buffer_bytes(fd)),
        encoding=old.encoding,
        errors=old.errors,
        newline="\n",
        line_buffering=not unbuffered and (name == "stderr" or os.isatty(fd)),
        write_through=unbuffered,
    )
    stream.mode = "w"  # type: ignore[misc]
    return stream


def _choose_buffer_bytes(fd: int) -> int:
    """Choose the buffer size as `open` does."""
    size = os.fstat(fd).st_blksize
    return size if size > 1 else io.DEFAULT_BUFFER_SIZE


def replace_environment(env: dict[str, str]) -> None:
    """Replace the whole environment; the C library's time zone is that of `TZ`."""
    coerced, zone = _find_coerced_locale(), os.environ.get("TZ")
    change_environment(env)
    if coerced is not None:
        os.environ.setdefault("LC_CTYPE", coerced)
    if os.environ.get("TZ") != zone:
        time.tzset()


def change_environment(env: Mapping[str, str]) -> None:
    """Make the environment what is given. What stays is not touched: each change searches all variables."""
    for name in [name for name in os.environ if name not in env]:
        del os.environ[name]
    os.environ.update({name: value for name, value in env.items() if os.environ.get(name) != value})


def _find_coerced_locale() -> str | None:
    """Return LC_CTYPE if the interpreter itself set it at its start under the C locale (PEP 538)."""
    value = os.environ.get("LC_CTYPE")
    if value is None:
        return None
    with open("/proc/self/environ", "rb") as file:
        is_set = b"\0LC_CTYPE=" in b"\0" + file.read()
    return None if is_set else value


def bind_to_cpus(cpus: Collection[int]) -> None:
    """Set the affinity, and size thread pools to it."""
    os.sched_setaffinity(0, cpus)
    _fit_to_cpus(len(cpus))


def _fit_to_cpus(count: int) -> None:
    """Set `count` threads in torch and in every loaded OpenBLAS, unless the environment names a number.

    These libraries counted the template's CPUs at import; in a fresh process they would count the worker's.
    """
    is_set = "OMP_NUM_THREADS" in os.environ
    torch: Any = sys.modules.get("torch")
    if (
        hasattr(torch, "set_num_threads")
        and not is_set
        and "MKL_NUM_THREADS" not in os.environ
        and torch.get_num_threads() != count
    ):
        torch.set_num_threads(count)
    if not is_set and "OPENBLAS_NUM_THREADS" not in os.environ and "GOTO_NUM_THREADS" not in os.environ:
        fit_openblas(count)


def open_loaded(path: str) -> "ctypes.CDLL":
    """Open a library that this process has loaded; raise OSError if it has not."""
    import ctypes

    return ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)


def fit_openblas(count: int) -> None:
    """Set the number of threads in every loaded OpenBLAS, because numpy, scipy and others each bring one."""
    with open("/proc/self/maps", "rb") as file:
        lines = [os.fsdecode(line.rstrip(b"\n")) for line in file if b"openblas" in line]
    for path in {fields[5] for line in lines if len(fields := line.split(None, 5)) == 6 and ".so" in fields[5]}:
        try:
            library = open_loaded(path)
        except OSError:  # not mapped by the loader
            continue
        _fit_library(library, count)


def _fit_library(library: "ctypes.CDLL", count: int) -> None:
    for name in _SETTERS:
        setter = getattr(library, name, None)
        getter = getattr(library, name.replace("_set_", "_get_"), None)
        if setter is not None and getter is not None:
            if getter() != count:
                setter(count)
            return


def _reseed_generators() -> None:
    """Reseed numpy and torch; `random` reseeds itself at a fork."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    generator = getattr(sys.modules.get("torch"), "default_generator", None)  # the program may have another torch
    if generator is not None:
        # torch.seed() would also queue seeds for devices, unlike a fresh process.
        generator.seed()


def _renew_process_identity() -> None:
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    logging = sys.modules.get("logging")
    if logging is not None:  # seconds, or nanoseconds from Python 3.13 on
        is_ns = isinstance(logging._startTime, int)  # noqa: SLF001
        logging._startTime = time.time_ns() if is_ns else time.time()  # type: ignore[attr-defined]  # noqa: SLF001
