"""Saves a worker's state into the slots of its rank.

What a save costs beyond the copies is paid when a plan is made. The plan, the views of each slot and the layout's bytes
are kept while shapes, types and sharing stay what they are. `save` returns when the tensors are copied, or when the
copies from devices are enqueued. A thread then waits for those copies, sums the blocks, and marks the slot as complete.
The next call waits for the thread.
"""

import contextlib
import operator
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from muster._shared.layouts import SnapshotBlock as Block
from muster._shared.snapshot_file import COMPLETE, SLOTS, Slot, WorkerFiles, compute_limit, measure_used
from muster.snapshots.content import Area, Damaged, Origin, find_data, open_near, say
from muster.snapshots.devices import DeviceCopies
from muster.snapshots.layout import ELSEWHERE, Plan
from muster.snapshots.plain import LayoutCache, encode, find_name

_TRIES: Final = 5
"""How many saves are compared until one is found that both ranks have at the same time."""


class Agreement:
    """Whether two ranks of a node agree on what `save(replicated=True)` keeps of one of them.

    It is checked once after each start. At its next save, the second rank sums each tensor that the first one keeps for
    it. It compares the sums with those of the tensors kept of the same step, if they are there. One line says what
    differs. Nothing else follows, because some tensors may differ (the statistics of a BatchNorm in DDP), and only the
    script's author knows which.
    """

    def __init__(self, files: WorkerFiles) -> None:
        """Begin with nothing."""
        self._files = files
        self._tries = _TRIES
        self._waiting: tuple[tuple[int, int], list[int], list[int]] | None = None
        """A generation, the numbers of its tensors that the first rank keeps, and the sums of this rank's."""

    def look(self, state: object, tensors: Sequence[Any], plan: Plan, generation: tuple[int, int]) -> None:
        """Compare what was saved last, and sum what is saved now.

        Args:
            state: what is saved now.
            tensors: the tensors of the state.
            plan: the plan of these tensors.
            generation: the one that it will be.
        """
        waiting, self._waiting = self._waiting, None
        if self._tries <= 0:
            return
        numbers = [number for number, start in enumerate(plan.layout.starts) if start == ELSEWHERE]
        if waiting is not None and waiting[1] == numbers:
            kept = self._sum_kept(waiting[0], numbers)
            if kept is not None:
                self._tries = 0
                differ = [n for n, own, other in zip(numbers, waiting[2], kept, strict=True) if own != other]
                if differ:
                    self._say(find_name(state, tensors[differ[0]]), len(differ))
                return
        self._tries -= 1
        self._waiting = generation, numbers, [_sum(tensors[number]) for number in numbers]

    def _sum_kept(self, generation: tuple[int, int], numbers: Sequence[int]) -> list[int] | None:
        """Return the sums of what the first rank has kept. None: it has not, or not any more."""
        control = self._files.control
        slot = control.find_slot(0, generation)
        if slot is None:
            return None
        serial = control.read_serial(0, slot)
        fd = self._files.open_content(0)
        try:
            content = open_near(fd, slot, control.read_slots(0)[slot].bytes)
            locations = [content.layout.find(number) for number in numbers]
            sums = [_sum(content.view(location)) for location in locations if location.start != ELSEWHERE]
        except (Damaged, IndexError):
            return None
        finally:
            os.close(fd)
        return sums if control.read_serial(0, slot) == serial and len(sums) == len(numbers) else None

    def _say(self, name: str, count: int) -> None:
        rank = int(os.environ["RANK"])
        more = f" and {count - 1} more differ" if count > 1 else " differs"
        say(
            f"{name}{more} between ranks {rank - 1} and {rank}, and replicated=True keeps those of rank {rank - 1}."
            " Save what each rank has of its own as a number, a tensor of integers or a NumPy array"
        )


def _sum(tensor: Any) -> int:
    """Return the sum of all elements, taken as integers: whatever their order is."""
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.view(whole).sum(dtype=torch.int64))


_SMALL_BYTES: Final = 1 << 22
"""Up to here, summing takes less time than a thread."""
_GROWTH: Final = 1 << 20
"""How many bytes plain values may grow before the free memory is looked at again."""
_LAYOUT_BYTES: Final = 100
"""About what the layout takes for each tensor. It is written afterwards."""


class Saver:
    """The slots of this rank, as the worker writes them. One for each process that speaks for a rank."""

    def __init__(self, files: WorkerFiles) -> None:
        """Open the content file of the rank.

        Raises:
            OSError: it cannot be opened.
        """
        self._files = files
        self._fd = files.open_content(files.local_rank)
        self._areas = [Area(self._fd, slot) for slot in range(SLOTS)]
        self._plan: Plan | None = None
        self._known = LayoutCache()
        self._granted = 0
        self._refused = 0
        self._last_step = -1
        self._pending: threading.Thread | None = None
        self._device_copies: DeviceCopies | None = None
        self._agreement = Agreement(files)
        self._is_prepared = False

    def note_loaded(self, step: int) -> None:
        """Know that the script continues after this step."""
        self._last_step = step

    def save(self, step: int, state: object, *, replicated: bool) -> bool:
        """Copy the state into a free slot. See `muster.snapshots.save`.

        Returns:
            False if no slot is free: `save_again` may find one.
        """
        self.wait()
        self._last_step = self._check_step(step)
        return self.save_again(state, replicated=replicated)

    def save_again(self, state: object, *, replicated: bool) -> bool:
        """Do so for the last step."""
        import torch

        with torch.no_grad():
            skeleton, tensors, is_sharded, pointers = encode(state, self._known)
            plan = self._find_plan(tensors, pointers, keeps_tensors=not replicated or self._files.local_rank == 0)
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            control, local_rank = self._files.control, self._files.local_rank
            if replicated and local_rank == 1:
                self._agreement.look(state, tensors, plan, (control.lineage, self._last_step))
            keeper = rank if plan.keeps_tensors else rank - local_rank
            origin = Origin(rank, world_size, keeper, replicated, is_sharded)
            size = sum(find_data(plan)) + len(skeleton) + _LAYOUT_BYTES * len(tensors)
            if not self._is_granted(size):
                return True
            slot = control.begin_save(local_rank)
            if slot is None:
                return False
            area = self._areas[slot]
            is_mapped = area.size >= size
            try:
                wait = area.copy(plan, tensors, size, self._start_copies)
            except OSError as error:
                self._refuse_memory(size, error)
                return True
            step, lineage = self._last_step, control.lineage

        def complete() -> None:
            if not wait():
                return  # the slot stays empty
            try:
                length = area.finish(plan, skeleton, origin, size)
            except OSError as error:
                self._refuse_memory(size, error)
                return
            control.end_save(local_rank, slot, Slot(COMPLETE, lineage, step, length, rank, world_size, replicated))
            if not self._is_prepared:
                self._prepare(plan, max(length, size))

        if size <= _SMALL_BYTES and not plan.on_devices and is_mapped:
            complete()
        else:
            self._pending = threading.Thread(target=complete, name="muster-snapshot", daemon=plan.on_devices)
            self._pending.start()
        return True

    def wait(self) -> None:
        """Wait until the last save is complete: only one whose state was on devices is not."""
        if self._pending is not None:
            self._pending.join()
            self._pending = None

    def close(self) -> None:
        """Complete the last save, and save no more: another round has another saver."""
        self.wait()
        os.close(self._fd)

    def _start_copies(self, targets: Sequence[Any], sources: Sequence[Any]) -> Callable[[], bool]:
        self._device_copies = self._device_copies or DeviceCopies()
        return self._device_copies.start(targets, sources)

    def _prepare(self, plan: Plan, size: int) -> None:
        """Map the slot that is used last, so that its first save finds its memory there. Nothing in it changes."""
        self._is_prepared = True
        slots = self._files.control.read_slots(self._files.local_rank)
        left = sorted((slot.generation or (-1, -1), number) for number, slot in enumerate(slots))
        numbers = [number for _, number in left if not self._areas[number].size]
        if len(numbers) > 1:
            with contextlib.suppress(OSError):  # its save will report it
                self._areas[numbers[-1]].map(size)
                self._areas[numbers[-1]].find_targets(plan)

    def _check_step(self, step: int) -> int:
        if isinstance(step, bool) or not isinstance(step, int):
            try:
                step = operator.index(step)
            except TypeError:
                raise TypeError(f"save: the step must be an int, not {type(step).__name__}") from None
        if step < 0 or step <= self._last_step:
            after = f"above {self._last_step}, the last step" if self._last_step >= 0 else "0 or more"
            raise ValueError(f"save: the step must be {after}, not {step}")
        return step

    def _find_plan(self, tensors: Sequence[Any], pointers: list[int], *, keeps_tensors: bool) -> Plan:
        plan = self._plan
        if plan is None or not plan.fits(tensors, pointers, keeps_tensors=keeps_tensors):
            self._plan = plan = Plan(tensors, pointers, keeps_tensors=keeps_tensors)
        return plan

    def _is_granted(self, size: int) -> bool:
        """Return whether a state of this size may be kept. Looks at the free memory only when states grow."""
        if size <= self._granted:
            return True
        if self._refused and abs(size - self._refused) < _GROWTH:
            return False
        limit = compute_limit(self._files.control.words, measure_used(self._files))
        if limit is None or size <= limit.state_bytes:
            self._granted = size + (_GROWTH if limit is None or size + _GROWTH <= limit.state_bytes else 0)
            self._refused = 0
            return True
        total = limit.states * self._files.ranks * size
        ranks = "one rank" if self._files.ranks == 1 else f"each of {self._files.ranks} ranks"
        self._refuse(
            size,
            f"{limit.states} states of {ranks} take {_format(total)} of this node's memory,"
            f" and {_format(limit.node_bytes)} may be used (--snapshot-memory)",
        )
        return False

    def _refuse_memory(self, size: int, error: OSError) -> None:
        self._refuse(size, f"this node has no memory for it ({error})")

    def _refuse(self, size: int, why: str) -> None:
        self._refused, self._granted = size, 0
        self._files.control.write_block(self._files.local_rank, Block.REFUSED, size)
        say(f"a state of {_format(size)} is not kept: {why}. The job goes on without a snapshot")


def _format(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
