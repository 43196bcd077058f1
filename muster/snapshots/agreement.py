"""Whether two ranks of a node agree on what `save(replicated=True)` keeps of one of them.

It is checked once after each start. At its next save, the second rank sums each tensor that the first one keeps for it.
It compares the sums with those of the tensors kept of the same step, if they are there. One line says what differs.
Nothing else follows, because some tensors may differ (the statistics of a BatchNorm in DDP), and only the script's
author knows which.
"""

import os
from collections.abc import Sequence
from typing import Any, Final

from muster._shared.snapshot_file import WorkerFiles
from muster.snapshots.content import Damaged, open_near, say
from muster.snapshots.layout import ELSEWHERE, Plan
from muster.snapshots.plain import find_name

_TRIES: Final = 5
"""How many saves are compared until one is found that both ranks have at the same time."""


class Agreement:
    """What the second rank of a node has found out about the first one's tensors."""

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
            places = [content.layout.find(number) for number in numbers]
            sums = [_sum(content.view(place)) for place in places if place.start != ELSEWHERE]
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
