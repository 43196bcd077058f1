"""A member's part of a drain: find a ceiling that no rank of the node has passed. Pure.

A rank publishes the step that it asks about before it reads the command. So a rank that has read the command before the
ceiling was written has published its step by then. Only a store needs a moment to reach other processors, so the member
looks again `LOOK_S` after each write. It raises the ceiling while a published step has reached it, with a margin that
doubles, so that this ends however fast the ranks are. A ceiling that no published step has reached at the second look
is verified: every rank will wait there. Ceilings only rise.

A rank's stride is known once it has asked twice. Until then the member keeps looking, and below the ceiling its ranks
continue.
"""

from collections.abc import Sequence

from muster._shared.fields import LateRank
from muster._shared.layouts import StatusPageLayout
from muster._shared.records import record, replace
from muster.agent.rendezvous.interface import AskingRank, DrainReport

LOOK_S = 0.002
"""Time between the write of a ceiling and the second look. A store is visible to all processors long before."""


LATE_LIMIT = 64
"""How many late ranks of a node are named."""


@record
class RankSlot:
    """What a rank with a live process has published."""

    global_rank: int
    step: int | None
    """The step last reported; None if none yet."""
    asked: int | None
    """The step last asked about; None if it has not asked, or asks about falling steps."""
    stride: int
    """The distance of the last two steps asked about; 0 if it has asked at most once."""
    is_asking: bool
    """False for a rank that asked about falling steps."""
    saved: int | None = None
    """The step of its last checkpoint."""
    waiting: int | None = None
    """The step at which it waits for nodes that join."""
    keeps: bool = False
    """Whether it keeps snapshots, at which it can wait for nodes that join."""
    silent_s: float | None = None
    """Time since it last reported a step or phase; None if it never has."""


@record
class Ceiling:
    """A member's ceiling in one drain. `step` has been written, or must be now."""

    step: int
    margin: int
    """How far above the published steps the ceiling was set."""
    is_verified: bool = False
    """Whether no rank has passed it, and none will before the drain is decided."""


def find_refusal(slots: Sequence[RankSlot], kind: int = StatusPageLayout.STOP) -> str | None:
    """Return why no step can be agreed on with one of these ranks; None if one can."""
    function = StatusPageLayout.ASKING_FUNCTIONS[kind]
    for slot in slots:
        if not slot.is_asking:
            return f"rank {slot.global_rank} called {function} with decreasing steps"
        if slot.asked is None and slot.step is not None:
            return f"rank {slot.global_rank} has done step {slot.step} and never called {function}"
    return None


def list_late(slots: Sequence[RankSlot], kind: int, step: int | None) -> tuple[LateRank, ...]:
    """Return the ranks that have not done what a drain requires.

    Args:
        slots: those of live ranks.
        kind: the drain's.
        step: the committed step; None if none was committed, because of these ranks.
    """
    late = [slot for slot in slots if _is_late(slot, kind, step)]
    return tuple(
        LateRank(
            global_rank=each.global_rank, step=each.asked if each.step is None else each.step, silent_s=each.silent_s
        )
        for each in late[:LATE_LIMIT]
    )


def _is_late(slot: RankSlot, kind: int, step: int | None) -> bool:
    if step is None:
        return slot.stride <= 0
    if kind == StatusPageLayout.PAUSE:
        return slot.asked is None or slot.asked < step
    if kind == StatusPageLayout.JOIN:
        return slot.waiting is None or slot.waiting < step
    return kind == StatusPageLayout.STOP or slot.saved is None or slot.saved < step


def build_ceiling(slots: Sequence[RankSlot]) -> Ceiling:
    """Return the first ceiling, which is above every published step."""
    margin = max((slot.stride for slot in slots), default=0) or 1
    highest = max((step for slot in slots for step in (slot.step, slot.asked) if step is not None), default=-1)
    return Ceiling(step=_limit(highest + margin), margin=margin)


def check_ceiling(ceiling: Ceiling, slots: Sequence[RankSlot]) -> Ceiling:
    """Look again at what has been published. The ceiling is then verified, or raised to be written again."""
    highest = max((slot.asked for slot in slots if slot.asked is not None), default=-1)
    if ceiling.is_verified or highest < ceiling.step:
        return replace(ceiling, is_verified=True)
    margin = 2 * ceiling.margin
    return Ceiling(step=_limit(highest + margin), margin=margin)


def build_report(ceiling: Ceiling, slots: Sequence[RankSlot]) -> DrainReport | None:
    """Return the report of a verified ceiling; None if the stride of a rank is not known yet."""
    asking = [slot for slot in slots if slot.asked is not None]
    if any(slot.stride <= 0 for slot in asking):
        return None
    ranks = [
        AskingRank(global_rank=slot.global_rank, asked=slot.asked, stride=slot.stride)
        for slot in asking
        if slot.asked is not None
    ]
    return DrainReport(ceiling=ceiling.step, ranks=tuple(ranks), has_silent=len(asking) < len(slots))


def _limit(step: int) -> int:
    return min(step, StatusPageLayout.MAX_STEP)
