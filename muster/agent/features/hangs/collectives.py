"""Finds the ranks that block the others, from the flight recorders of all ranks. Pure.

Each rank of a group counts the group's collectives, so number n is the same call on all of them.

- Ranks that have entered fewer than the others did not enter the next one. A rank that waits in it names it.
- Ranks that have called another operation, or with another size, under one number have come apart.
- If all have entered it and none has completed it, the transport or a device hangs, and no rank is named. If there are
  several such collectives, the first counts.
- Ranks that have ended, are stopped or do not answer are named if all others have entered it. Ranks without a known
  view are not mentioned (those of other nodes, if each node judges alone).
- Ranks that have not called `init_process_group` are named, and ranks that do not answer while others are in it.

If several groups wait, a rank that is missing in one may itself wait in another, where the cause is then. Of the
remaining groups, the one that has waited longest counts.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from muster._shared.records import record
from muster._shared.reports import ENDED, Collective, Group, RankView, name_ranks

STATES = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "D": "is in an uninterruptible system call"}
STATES[ENDED] = "has ended"
_ANY_SIZES = ("broadcast", "scatter", "gather", "all_gather", "reduce_scatter", "all_to_all", "allgather", "alltoall")
"""Operations whose sizes may differ between ranks."""


@record
class Finding:
    """What a hang is about."""

    ranks: frozenset[int]
    """Those that block the others; empty if all are at one place."""
    clause: str
    """Follows the name of `ranks`, or of all ranks: "did not enter all_reduce #6 of default_pg (4 x float32), ..."."""
    waiting: frozenset[int] = frozenset()
    age_s: float = 0.0
    """How long the others have waited."""


@record
class _Member:
    """One rank's part in a group."""

    rank: int
    group: Group

    def find(self, number: int) -> Collective | None:
        """Return the member's collective of this number, if the recorder still has it."""
        found = [each for each in self.group.entries if each.number == number and not each.is_p2p]
        return found[-1] if found else None


def find_cause(views: Iterable[RankView]) -> Finding | None:
    """Name the ranks that block the others; None if the recorders do not show any."""
    by_rank = {view.global_rank: view for view in views}
    groups = _list_groups(by_rank)
    unheard = {
        rank: STATES.get(view.state, "does not answer")
        for rank, view in by_rank.items()
        if view.state == ENDED or (view.has_server and not view.is_answering)
    }
    found = [each for members in groups if (each := _judge_group(members, unheard, by_rank.keys())) is not None]
    waiting = {rank for each in found for rank in each.waiting}
    # A rank that waits elsewhere is not the cause.
    causes = [each for each in found if not each.ranks & waiting] or found
    if not causes:
        return _judge_initialisation(by_rank, unheard)
    cause = max(causes, key=lambda each: (bool(each.ranks), each.age_s))
    return Finding(
        ranks=cause.ranks,
        clause=cause.clause + describe_states(cause.ranks - unheard.keys(), by_rank),
        waiting=cause.waiting,
        age_s=cause.age_s,
    )


def _list_groups(by_rank: Mapping[int, RankView]) -> list[list[_Member]]:
    """Return the groups that contain more than one rank, with a member for each of their ranks."""
    named: dict[str, dict[int, Group]] = {}
    ranks: dict[str, set[int]] = {}
    for rank, view in by_rank.items():
        for group in view.groups:
            named.setdefault(group.name, {})[rank] = group
            ranks.setdefault(group.name, set()).update((rank, *group.ranks))
    return [
        [_Member(rank=rank, group=seen.get(rank) or _absent(name)) for rank in sorted(ranks[name])]
        for name, seen in named.items()
        if any(group.entered for group in seen.values())
    ]


def _absent(name: str) -> Group:
    return Group(name=name, description="", entered=0, completed=0)


def _judge_group(all_members: Sequence[_Member], unheard: Mapping[int, str], seen: Collection[int]) -> Finding | None:
    """Judge one group.

    Args:
        all_members: those of the group.
        unheard: why the collectives of some ranks cannot be read, by rank.
        seen: the ranks about which anything is known.
    """
    members = [member for member in all_members if member.rank in seen and member.rank not in unheard]
    if not members:
        return None
    apart = _find_apart(members)
    if apart is not None:
        return apart
    most = max(member.group.entered for member in members)
    least = min(member.group.entered for member in members)
    # A collective that does not wait for all may complete without some ranks.
    unfinished = [number for number in _list_open(members) if number > least or least == most]
    number = min(unfinished, default=most)
    waiting = {
        member.rank: entry for member in members if (entry := member.find(number)) is not None and not entry.is_done
    }
    if not waiting:
        return None
    entry = max(waiting.values(), key=lambda each: each.age_s)
    what, wait = _name_collective(entry, members), _describe_wait(waiting)
    states = {member.rank: unheard[member.rank] for member in all_members if member.rank in unheard}
    if least < most:
        ranks = frozenset(member.rank for member in members if member.group.entered == least)
        clause = f"did not enter {what}; {wait} in it for {entry.age_s:.0f} s"
    elif states:  # entered by all others
        ranks = frozenset(states)
        clause = f"{_describe_unheard(states)}; {wait} in {what} for {entry.age_s:.0f} s"
    else:
        ranks = frozenset()
        done = [member.rank for member in members if member.rank not in waiting]
        unseen = [member.rank for member in all_members if member.rank not in seen]
        rest = f"; {name_ranks(done)} completed it" if done else ""
        why = ": the network or a device hangs"
        if unseen:
            whose = "its" if len(unseen) == 1 else "their"
            why = f"; nothing is known here of {name_ranks(unseen)} (see the log of {whose} node)"
        clause = f"entered {what} {entry.age_s:.0f} s ago and did not complete it{rest}{why}"
    return Finding(ranks=ranks, clause=clause, waiting=frozenset(waiting), age_s=entry.age_s)


def _list_open(members: Iterable[_Member]) -> list[int]:
    """Return the numbers of all collectives that a rank has entered but not completed."""
    return [entry.number for member in members for entry in member.group.entries if not (entry.is_done or entry.is_p2p)]


def _find_apart(members: Sequence[_Member]) -> Finding | None:
    """Return the ranks that have called something else under the first number that some have not completed."""
    open_numbers = _list_open(members)
    if not open_numbers:
        return None
    entries = {member.rank: entry for member in members if (entry := member.find(min(open_numbers))) is not None}
    kinds = Counter(_get_kind(entry) for entry in entries.values())
    if len(kinds) < 2:
        return None
    (usual, count), *_ = kinds.most_common()
    others = {rank: entry for rank, entry in entries.items() if _get_kind(entry) != usual}
    same = {rank: entry for rank, entry in entries.items() if rank not in others}
    if 2 * count == len(entries):  # no majority: the lowest rank is right
        lowest = entries[min(entries)]
        others = {rank: entry for rank, entry in entries.items() if _get_kind(entry) != _get_kind(lowest)}
        same = {rank: entry for rank, entry in entries.items() if rank not in others}
    first, usual_entry = next(iter(others.values())), next(iter(same.values()))
    oldest_s = max(entry.age_s for entry in entries.values())
    clause = (
        f"entered {_name_collective(first, members)} where {name_ranks(same)} entered "
        f"{_name_operation(usual_entry)}; they have waited for {oldest_s:.0f} s"
    )
    return Finding(ranks=frozenset(others), clause=clause, waiting=frozenset(same), age_s=oldest_s)


def _get_kind(entry: Collective) -> tuple[str, str]:
    has_any_size = any(name in entry.operation for name in _ANY_SIZES)
    return entry.operation, "" if has_any_size else entry.sizes


def _name_collective(entry: Collective, members: Sequence[_Member]) -> str:
    """Return a text such as `all_reduce #6 of default_pg (4 x float32)`."""
    named = next((member.group for member in members if member.group.description), members[0].group)
    ranks = next((member.group.ranks for member in members if member.group.ranks), ())
    name = named.description or f"group {named.name}"
    if ranks and not name.startswith("default"):
        name += f" of {name_ranks(ranks)}"
    sizes = f" ({entry.sizes})" if entry.sizes else ""
    return f"{entry.operation} #{entry.number} of {name}{sizes}"


def _name_operation(entry: Collective) -> str:
    return f"{entry.operation} ({entry.sizes})" if entry.sizes else entry.operation


def _describe_wait(waiting: Iterable[int]) -> str:
    """Return a text such as `ranks 0, 2-3 have waited`."""
    named = set(waiting)
    return f"{name_ranks(named)} {'has' if len(named) == 1 else 'have'} waited"


def _describe_unheard(states: Mapping[int, str]) -> str:
    same = len(set(states.values())) == 1
    return use_plural(states[min(states)] if same else "does not answer", len(states))


def _judge_initialisation(by_rank: Mapping[int, RankView], unheard: Mapping[int, str]) -> Finding | None:
    inside = {rank for rank, view in by_rank.items() if view.is_initialising}
    if not inside:
        return None
    outside = frozenset(rank for rank, view in by_rank.items() if not view.has_server)
    verb = "waits" if len(inside) == 1 else "wait"
    if outside:
        clause = f"did not call init_process_group, in which {name_ranks(inside)} {verb}"
        return Finding(
            ranks=outside, clause=clause + describe_states(outside, by_rank), waiting=frozenset(inside), age_s=0.0
        )
    if unheard:
        clause = f"{_describe_unheard(unheard)}; {name_ranks(inside)} {verb} in init_process_group"
    else:
        clause = "called init_process_group, and did not come back from it"
    return Finding(ranks=frozenset(unheard), clause=clause, waiting=frozenset(inside), age_s=0.0)


def describe_states(ranks: Iterable[int], by_rank: Mapping[int, RankView]) -> str:
    """Return a text such as `; rank 1 is stopped (SIGSTOP)`; "" if the kernel reports nothing special."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        text = STATES.get(by_rank[rank].state) if rank in by_rank else None
        if text is not None:
            found.setdefault(text, []).append(rank)
    return "".join(f"; {name_ranks(named)} {use_plural(text, len(named))}" for text, named in found.items())


def use_plural(text: str, count: int) -> str:
    """Return a text such as `is stopped`, or for several ranks `are stopped`."""
    verb, _, rest = text.partition(" ")
    return text if count == 1 else f"{ {'is': 'are', 'has': 'have', 'does': 'do'}[verb] } {rest}".strip()
