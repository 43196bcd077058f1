"""In a worker: counts the steps of optimizers in the status page, for scripts that report none by `muster.worker`.

For progress and as a sign of life only, never for an agreement. `program` runs this file when an optimizer has stepped,
and not before. The page's layout stands here again, because `muster` may be another package in this process. `Any` is
what torch's objects are here: this file must not import torch for their types.
"""

import mmap
import os
import time
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_PAGE_MAGIC = 0x6D75737465720002
_BLOCK_BYTES = 4096
_MAGIC_WORD, _SLOTS, _ROUND, _ATTEMPT = 0, 1, 2, 3
_STEP, _CHANGED_NS, _OPTIMIZER_STEPS = 1, 4, 6
"""Of `_shared.contract.StatusPageLayout`."""


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
