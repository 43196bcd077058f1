"""Decides which snapshots a node keeps. Pure.

The slots are those of all local ranks. `_shared.snapshot_file` has the rules by which a worker chooses a slot.
"""

from collections.abc import Iterable, Sequence

from muster._shared.records import record
from muster._shared.snapshot_file import Slot, choose_held

Key = tuple[int, int]
"""Lineage and step."""


def find_whole(ranks: Sequence[Sequence[Slot]]) -> dict[Key, bool]:
    """Return the generations that all local ranks have, and whether they are replicated."""
    common = set.intersection(*({g for slot in slots if (g := slot.generation)} for slots in ranks))
    replicated = (slot.generation for slot in ranks[0] if slot.is_replicated)
    return {key: key in replicated for key in common}


def find_newest(ranks: Sequence[Sequence[Slot]], lineage: int, above: int) -> int | None:
    """Return the newest step above one that all local ranks have saved in the lineage."""
    return max((key[1] for key in find_whole(ranks) if key[0] == lineage and key[1] > above), default=None)


def find_kept(ranks: Sequence[Sequence[Slot]], lineage: int, hold: int) -> int | None:
    """Return the step that all local ranks keep for a mark.

    Returns:
        None if a rank has not reached the mark yet. If they keep different ones, it is the latest of them: the leader
        sees that the nodes do not agree, and sets another mark.
    """
    held = [choose_held(slots, lineage, hold) for slots in ranks]
    steps = [each[1] for each in held if each is not None]
    return max(steps) if len(steps) == len(held) else None


def is_split(ranks: Sequence[Sequence[Slot]], lineage: int, hold: int) -> bool:
    """Return whether local ranks keep different ones for a mark, because some had continued before it was set."""
    return len({choose_held(slots, lineage, hold) for slots in ranks}) > 1


def is_kept(key: Key, base: Key | None, lineages: Iterable[int]) -> bool:
    """Return whether a slot stays when a round begins, because its content is the base or an ancestor of the base.

    Args:
        key: the slot's.
        base: what the round continues; None if it begins anew.
        lineages: rounds that this node took part in. What rounds before the base's left here was kept then, so the base
            descends from it. What a node has of a round that the base's round did not follow does not stay.
    """
    if base is None or key > base:
        return False
    return key[0] == base[0] or base[0] in lineages


@record
class KeepDecision:
    """What a look at the slots leads to."""

    hold: int | None = None
    """The step to hold from now on; None keeps the current one."""
    report: int | None = None
    """The step that all ranks keep, to be reported; None if there is nothing new."""
    newest: int | None = None


def decide_keeping(
    ranks: Sequence[Sequence[Slot]],
    lineage: int,
    confirmed: Key | None,
    hold: int | None,
    *,
    may_hold: bool,
) -> KeepDecision:
    """Decide what a look at the slots leads to.

    Args:
        ranks: the slots of all local ranks.
        lineage: the round's.
        confirmed: what all ranks have.
        hold: the step that is held at present; None if there is none.
        may_hold: whether one of three slots stays free if another one is kept.
    """
    above = confirmed[1] if confirmed is not None and confirmed[0] == lineage else -1
    newest = find_newest(ranks, lineage, above)
    if hold is not None:
        return KeepDecision(report=find_kept(ranks, lineage, hold), newest=newest)
    if newest is None or not may_hold:
        return KeepDecision(newest=newest)
    return KeepDecision(hold=newest, newest=newest)
