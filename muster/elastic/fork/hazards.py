"""What forbids forking workers from this program, and what must be done before a fork.

The list is short on purpose. A tracer, open sockets and threads are usual in a notebook or under a test runner, and a
closure has no other way into a worker. So only what makes a worker fail or hang later is refused.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from muster._shared.records import record
from muster.agent.errors import UsageError
from muster.elastic.jobs.cell import is_cell

_DEVICES = {"cuda": "CUDA", "xpu": "XPU"}
_PAUSE_HARD = 2
"""omp_pause_hard of OpenMP 5.0."""


@record
class ForkedCall:
    """`function(*args, **kwargs)` in each worker. It is not pickled, because workers have this program's memory."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    nproc: int
    substitutes_macros: bool = False
    """Whether `${local_rank}` is replaced in positional arguments that are strings."""
    joins_streams: bool = False
    """Whether a worker has one pipe for standard output and standard error.

    A notebook shows both in one place, in the order in which they were written.
    """
    torch_threads: int | None = None
    """How many threads torch may use in a worker. None: as many as here."""


def prepare_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    nproc: int,
    *,
    substitutes_macros: bool = False,
) -> ForkedCall:
    """Make this process ready to be forked, and describe what its forks call.

    Raises:
        UsageError: it must not be forked. The message says what is in the way and what to do.
    """
    check_hazards()
    # A worker's own would remove what it shares.
    if "multiprocessing.resource_tracker" in sys.modules:
        sys.modules["multiprocessing.resource_tracker"].ensure_running()
    torch_threads = None
    if not end_thread_pools():
        torch_threads = 1
        print(
            "muster: torch's thread pool is in use and cannot be ended before the fork: workers run torch with one "
            "thread",
            file=sys.stderr,
        )
    return ForkedCall(
        function=function,
        args=args,
        kwargs=kwargs,
        nproc=nproc,
        substitutes_macros=substitutes_macros,
        torch_threads=torch_threads,
        joins_streams=is_cell(sys.stdout),
    )


def check_hazards() -> None:
    """Refuse a fork whose workers could not run.

    Raises:
        UsageError: it says what is in the way and what to do.
    """
    if not sys.platform.startswith("linux"):
        raise UsageError(f"start_method='fork' needs Linux, this is {sys.platform}; allowed here is 'spawn'")
    torch = sys.modules.get("torch")
    for module, name in _DEVICES.items():
        if getattr(getattr(torch, module, None), "is_initialized", bool)():
            raise UsageError(
                f"start_method='fork': {name} is initialised in this process, so forked workers could not use it; "
                f"start the job before anything uses {name} (in a notebook: restart the kernel first), or use "
                "start_method='spawn'"
            )


def end_thread_pools() -> bool:
    """End the OpenMP pool of this thread, which starts again when it is next used.

    A fork has none of the pool's threads, and libgomp would wait for them for ever.

    Returns:
        Whether torch can use its threads in workers.
    """
    if "torch" not in sys.modules:
        return True
    return all(_end_pool(path) for path in _find_openmp())


def _find_openmp() -> set[str]:
    """Return the mapped libgomp libraries. LLVM's and Intel's have fork handlers of their own."""
    with open("/proc/self/maps", "rb") as file:
        lines = [os.fsdecode(line.rstrip(b"\n")) for line in file if b"libgomp" in line]
    return {fields[5] for line in lines if len(fields := line.split(None, 5)) == 6 and ".so" in fields[5]}


def _end_pool(path: str) -> bool:
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    pause: Any = getattr(library, "omp_pause_resource_all", None)  # libgomp of GCC 9 and newer
    return pause is not None and pause(_PAUSE_HARD) == 0
