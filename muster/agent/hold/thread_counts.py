"""Gives a template on a held node the thread counts that a fresh process with the run's environment would have.

The libraries read OMP_NUM_THREADS and MKL_NUM_THREADS when the template imported torch. A fresh process uses the first
for OpenMP, and the second or else the first for MKL. torch then takes what MKL would use, which has its own limit. Each
of the three is set here as the library would have set it. `torch.set_num_threads` is not used, because it starts
another pool's threads, and disables MKL's choice.

Two differences remain. Threads other than the main one learn the count from torch, not from OpenMP, so OpenMP code that
is not torch's sees the template's count there. And MKL keeps its count when a program calls `omp_set_num_threads`.
"""

import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Final

from muster._shared.records import record
from muster.agent.workers.warm.forked_worker import fit_openblas, open_loaded

THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_RUNTIMES: Final = ("libgomp", "libiomp", "libomp", "libmkl_rt")
_OPENBLAS_VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")


@record
class ThreadSettings:
    """The settings from which the libraries derive their thread counts."""

    variables: dict[str, str]
    cpus: frozenset[int]


def read_settings(environ: Mapping[str, str]) -> ThreadSettings:
    """Return this process's settings."""
    variables = {name: environ[name] for name in THREAD_VARIABLES if name in environ}
    return ThreadSettings(variables=variables, cpus=frozenset(os.sched_getaffinity(0)))


def adopt_settings(before: ThreadSettings, modules: Collection[str]) -> str | None:
    """Set the counts by this process's settings; return why they cannot be a fresh process's, or None if they are.

    Args:
        before: the settings when the libraries were loaded.
        modules: what was imported, by name, because modules other than torch may have read the variables.
    """
    now = read_settings(os.environ)
    if now == before or "torch" not in sys.modules:
        return None
    try:
        _check_libraries(modules)
        wanted = _read_wanted(now)
        _set_counts(wanted, is_limit_known=now.cpus == before.cpus)
    except _CannotAdoptError as reason:
        differing = [name for name in THREAD_VARIABLES if now.variables.get(name) != before.variables.get(name)]
        return f"{differing[0] if differing else 'the set of CPUs'} differs: {reason}"
    openblas = len(now.cpus) if wanted.openmp is None else min(wanted.openmp, len(now.cpus))
    if not any(name in os.environ for name in _OPENBLAS_VARIABLES):
        fit_openblas(openblas)
    return None


class _CannotAdoptError(Exception):
    """Why the settings cannot be adopted."""


@record
class _Wanted:
    """The wanted values; None if the variable is not set."""

    openmp: int | None
    mkl: int | None
    cpus: int


def _check_libraries(modules: Collection[str]) -> None:
    if set(modules) - {"torch"}:
        raise _CannotAdoptError("another library than torch may have read it")


def _read_wanted(settings: ThreadSettings) -> _Wanted:
    counts = {}
    for name, text in settings.variables.items():
        if not (text.isascii() and text.isdecimal() and 0 < int(text) < 65536):
            raise _CannotAdoptError(f"{text!r} is no count, and is read only at start")
        counts[name] = int(text)
    openmp, mkl = (counts.get(name) for name in THREAD_VARIABLES)
    return _Wanted(openmp=openmp, mkl=mkl, cpus=len(settings.cpus))


def _set_counts(wanted: _Wanted, *, is_limit_known: bool) -> None:
    torch = sys.modules["torch"]
    openmp = _find_openmp()
    count = wanted.cpus if wanted.openmp is None else wanted.openmp
    most = max(count, wanted.mkl or 0)
    if not is_limit_known and most > 1:
        raise _CannotAdoptError("libraries count the CPUs at import")
    openmp(count)
    if not torch.backends.mkl.is_available():
        return
    set_mkl, read_mkl = _find_mkl(os.path.join(os.path.dirname(str(torch.__file__)), "lib", "libtorch_cpu.so"))
    set_mkl(wanted.mkl or count)
    openmp(read_mkl())
    if torch.get_num_threads() != read_mkl():
        raise _CannotAdoptError("torch reads it only at start")


def _find_openmp() -> Callable[[int], object]:
    """Return `omp_set_num_threads` of the only OpenMP library."""
    with open("/proc/self/maps", "rb") as file:
        fields = [line.rstrip(b"\n").split(None, 5) for line in file]
    paths = {os.fsdecode(each[5]) for each in fields if len(each) == 6}
    found = [path for path in paths if os.path.basename(path).startswith(_RUNTIMES)]
    if len(found) != 1 or not os.path.basename(found[0]).startswith("libgomp"):
        raise _CannotAdoptError("it is read only at start")
    return _find_function(found[0], "omp_set_num_threads")


def _find_mkl(path: str) -> tuple[Callable[[int], object], Callable[[], int]]:
    """Return what sets and gets the number of all threads in torch's MKL, which exports only these names."""
    return _find_function(path, "mkl_serv_set_num_threads"), _find_function(path, "mkl_serv_get_max_threads")


def _find_function(path: str, name: str) -> "Callable[..., int]":
    try:
        return getattr(open_loaded(path), name)  # type: ignore[no-any-return]
    except (OSError, AttributeError):
        raise _CannotAdoptError("it is read only at start") from None
