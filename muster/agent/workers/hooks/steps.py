"""Counts a worker's optimizer steps in the status page, for scripts that report none by `muster.worker`.

The count serves only for progress and as a sign of life, never for an agreement. `program` runs this file when an
optimizer has stepped, and not before. The page's layout is repeated here, because `muster` may be another package in
this process. Objects of torch and Lightning are `Any`, because this file must not import those packages for their
types.

A Trainer of Lightning also knows the steps of the run that it continues, and the total. It is found in the frames above
an optimizer's first step, so Lightning itself stays unchanged.
"""

import mmap
import os
import sys
import time
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

_PAGE_MAGIC = 0x6D75737465720001
_BLOCK_BYTES = 4096
_MAGIC_WORD, _SLOTS, _ROUND, _ATTEMPT = 0, 1, 2, 3
_STEP, _TOTAL, _CHANGED_NS, _OPTIMIZER_STEPS, _FIRST, _FIRST_NS = 1, 2, 4, 6, 88, 89
_MAX_STEP = (1 << 47) - 2
"""See `_shared.layouts.StatusPageLayout`."""
_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


def build_step_counter() -> "Callable[[Any], object]":
    """Return the function to call with an optimizer after each of its steps.

    The function writes into this rank's slot of the status page.

    The count is that of the optimizer with the most steps: a GAN has two, which step in turn. The steps of Lightning's
    Trainer are written as if the script reported them. The function does nothing once the script reports steps itself,
    and nothing in forks of this process.

    Raises:
        OSError: there is no page.
        ValueError: there is no page, or it is of another round.
    """
    words = _map_slot(os.environ["MUSTER_STATUS_PAGE"])
    counts: dict[int, list[Any]] = {}
    """Three values by the optimizer's id: its steps, a reference, and the steps that Lightning's Trainer had done
    before.

    The reference removes the entry together with the optimizer, before the id is used again. The last value is None if
    the optimizer is not Lightning's.
    """
    is_fork, written = False, 0

    def stop() -> None:
        nonlocal is_fork
        is_fork = True

    def count(optimizer: "Any") -> None:
        nonlocal written
        if is_fork or words[_STEP] != written:
            return
        key = id(optimizer)
        entry = counts.get(key)
        if entry is None:
            before, total = _find_fit(sys._getframe(1))  # noqa: SLF001  # the only way
            entry = counts[key] = [0, weakref.ref(optimizer, lambda _: counts.pop(key, None)), before]
            if before is not None:
                words[_TOTAL] = total
            if not words[_FIRST_NS]:
                words[_FIRST], words[_FIRST_NS] = 1 if before is None else 2 + before, time.monotonic_ns()
        entry[0] += 1
        if entry[2] is not None:
            words[_STEP] = written = 1 + entry[2] + entry[0]  # like `Trainer.global_step`, from 1
        if entry[0] > words[_OPTIMIZER_STEPS]:
            words[_OPTIMIZER_STEPS] = entry[0]
        words[_CHANGED_NS] = time.monotonic_ns()  # any step is a sign of life

    os.register_at_fork(after_in_child=stop)
    return count


def _find_fit(frame: "FrameType | None") -> "tuple[int | None, int]":
    """Return how many steps a Trainer of Lightning had done before this one, and how many it will have done.

    Args:
        frame: the frame of the optimizer's step. A Trainer with several optimizers counts the steps of all, so it is
            not used.

    Returns:
        None if there is no Trainer. A total of 0 means that it is unknown, as for data of unknown length.
    """
    if not any(name in sys.modules for name in _LIGHTNING):
        return None, 0
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_LIGHTNING):
            found = _read_trainer(frame.f_locals.get("self"))
            if found is not None:
                return found
        frame = frame.f_back
    return None, 0


def _read_trainer(part: "Any") -> "tuple[int | None, int] | None":
    """Read these numbers from the Trainer that an object of Lightning belongs to; None if it has none."""
    try:
        trainer = part.trainer
        before, optimizers, total = trainer.global_step, len(trainer.optimizers), trainer.estimated_stepping_batches
    except Exception:  # noqa: BLE001  # Lightning's own errors, or another version: all goes on
        return None
    is_known = isinstance(total, int) and 0 < total <= _MAX_STEP
    return (before, total if is_known else 0) if optimizers == 1 else (None, 0)


def _map_slot(where: str) -> "memoryview[int]":
    """Map the slot at `FILE:ROUND:SLOT` without claiming it: another process of the rank may own it.

    Raises:
        OSError: see `build_step_counter`.
        ValueError: see `build_step_counter`.
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
