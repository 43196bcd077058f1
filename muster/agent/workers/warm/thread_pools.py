"""Adapts thread pools, whose sizes libraries choose at import, to the CPUs that a worker is bound to."""

import ctypes
import os
import sys

_SETTERS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "", "_64")
)
"""The names that builds of OpenBLAS export: numpy's wheels add a prefix, 64-bit builds a suffix."""


def fit_to_cpus(count: int) -> None:
    """Set `count` threads in torch and in every loaded OpenBLAS, unless the environment names a number.

    They counted the template's CPUs at import; in a fresh process they would count the worker's.
    """
    is_set = "OMP_NUM_THREADS" in os.environ
    torch = sys.modules.get("torch")
    if torch is not None and not is_set and "MKL_NUM_THREADS" not in os.environ and torch.get_num_threads() != count:
        torch.set_num_threads(count)
    if not is_set and "OPENBLAS_NUM_THREADS" not in os.environ and "GOTO_NUM_THREADS" not in os.environ:
        for path in _find_openblas():
            _fit_openblas(path, count)


def _find_openblas() -> set[str]:
    """The mapped OpenBLAS libraries; numpy, scipy and others bring one each."""
    with open("/proc/self/maps", "rb") as file:
        lines = [os.fsdecode(line.rstrip(b"\n")) for line in file if b"openblas" in line]
    return {fields[5] for line in lines if len(fields := line.split(None, 5)) == 6 and ".so" in fields[5]}


def _fit_openblas(path: str, count: int) -> None:
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # mapped, but not by the loader: it is left alone
        return
    for name in _SETTERS:
        setter = getattr(library, name, None)
        getter = getattr(library, name.replace("_set_", "_get_"), None)
        if setter is not None and getter is not None:
            if getter() != count:
                setter(count)
            return
