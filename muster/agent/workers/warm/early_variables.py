"""Environment variables that the interpreter, the C library and imports read once: too late to change in a fork."""

from collections.abc import Mapping
from typing import Final

_EARLY: Final = (
    *("LD_", "MALLOC_", "GLIBC_TUNABLES", "LANG", "LC_", "TZ", "TMPDIR", "PYTHON"),  # C library and interpreter
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_"),  # thread pools
    *("INDUCTOR_", "AOT", "PARTITIONER_", "CUTLASS_", "CUTEDSL_", "PT2_COMPILE_", "FAKE_ALLOW_META"),  # the compiler
    *("ENABLE_PERSISTENT_TMA_", "ENABLE_TEMPLATE_TMA_", "ENABLE_TMA_LOAD_", "LOG_AUTOTUNE_", "LOG_TLPARSE"),
    *("TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_LOGS", "PYTORCH_", "TRITON_"),
    *("COVERAGE_PROCESS_START",),
)
_LATE: Final = ("TORCH_NCCL_", "TORCH_ELASTIC_")
"""Exceptions: read when a process group is made. PYTORCH_CUDA_ALLOC_CONF is none: torch built for CUDA chooses its
allocator, and since 2.9 reads all of the variable, while its libraries are loaded.

Source: BackendStaticInitializer in torch's c10/cuda/CUDACachingAllocator.cpp.
"""


def is_read_early(name: str) -> bool:
    """True when a process that has already started, or imported torch, no longer takes notice of the variable."""
    return name.startswith(_EARLY) and not name.startswith(_LATE)


def find_early_difference(template: Mapping[str, str], worker: Mapping[str, str]) -> str | None:
    """The first variable that a fork of the template could not take over, in alphabetical order; None: all is well."""
    names = (name for name in template.keys() | worker.keys() if template.get(name) != worker.get(name))
    return min((name for name in names if is_read_early(name)), default=None)
