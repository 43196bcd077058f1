"""What the workers of a forked job call. It is not pickled, because they have this program's memory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from muster._shared.records import record


@record
class ForkedCall:
    """`function(*args, **kwargs)` in each worker."""

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
