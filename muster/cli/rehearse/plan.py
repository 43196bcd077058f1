"""Chooses what is tried, and when: pure, and the same again with the same seed."""

import random
from collections.abc import Mapping, Sequence
from typing import Final

from muster._shared.control import CommandExit, ControlError
from muster.cli.rehearse.faults import FAULTS, Fault, Moment
from muster.cli.rehearse.trial import Case, Result

_MIDDLE: Final = (0.3, 0.7)
"""The part of the steps in which a fault "between" happens."""
_LAST_STEPS: Final = 2
_AFTER_CHECKPOINTS: Final = (Moment.BETWEEN, Moment.CHECKPOINT)


def parse_faults(text: str | None, *, quick: bool) -> list[tuple[Fault, Moment]]:
    """Read `--faults`.

    Args:
        text: "rank-killed,preempted,rank-killed@checkpoint". None: all of them, each at each of its moments.
        quick: without `text`, only those of `Fault.is_quick`, each at one moment.

    Raises:
        ControlError: there is no such fault or moment, or none is named.
    """
    if text is None and quick:
        return [(fault, Moment.BETWEEN) for fault in FAULTS.values() if fault.is_quick]
    if text is None:
        return [(fault, moment) for fault in FAULTS.values() for moment in fault.moments]
    if not (words := [word.strip() for word in text.split(",") if word.strip()]):
        raise ControlError(f"--faults {text!r} names no fault; there are: {', '.join(FAULTS)}", CommandExit.USAGE)
    return [_parse_fault(word) for word in words]


def _parse_fault(word: str) -> tuple[Fault, Moment]:
    name, _, when = word.partition("@")
    if name not in FAULTS:
        raise ControlError(f"there is no fault {name!r}; there are: {', '.join(FAULTS)}", CommandExit.USAGE)
    moments = [each.value for each in Moment]
    if when and when not in moments:
        raise ControlError(
            f"{word!r}: {when!r} is not a moment; the moments are: {', '.join(moments)}", CommandExit.USAGE
        )
    return FAULTS[name], Moment(when) if when else Moment.BETWEEN


def choose_cases(
    faults: Sequence[tuple[Fault, Moment]], undisturbed: Result, *, nodes: int, nproc: int, seed: int
) -> list[Case]:
    """Choose step, rank and node of each fault.

    Args:
        faults: what is to be tried.
        undisturbed: the run without a fault.
        nodes: of the job.
        nproc: ranks of each node.
        seed: the same one chooses the same.
    """
    found = []
    counts: dict[str, int] = {}
    marks = () if undisturbed.story is None else undisturbed.story.marks
    has_reported = any(mark.kind == "checkpoint" for mark in marks)  # of all ranks
    for fault, moment in faults:
        name = fault.name if moment is Moment.BETWEEN else f"{fault.name}@{moment.value}"
        counts[name] = counts.get(name, 0) + 1
        rng = random.Random(f"{seed} {name} {counts[name]}")  # noqa: S311  # of each its own: others may be left out
        found.append(
            Case(
                name=name if counts[name] == 1 else f"{name}-{counts[name]}",
                fault=fault,
                moment=moment,
                step=(step := _choose_step(moment, undisturbed, rng)),
                latest=(step + undisturbed.done) // 2 if moment in _AFTER_CHECKPOINTS and has_reported else 0,
                rank=rng.randrange(nodes * nproc),
                node=rng.randrange(1, nodes) if nodes > 1 else 0,
                nodes=nodes,
            )
        )
    return found


def _choose_step(moment: Moment, undisturbed: Result, rng: random.Random) -> int:
    """Return how many steps have to be done before the fault, out of the steps of the undisturbed run."""
    first = undisturbed.starts[0] if undisturbed.starts else 0
    steps = undisturbed.done - first
    if moment is Moment.FIRST:
        return 0
    if moment is Moment.END:
        return first + max(1, steps - rng.randint(1, _LAST_STEPS))
    low, high = (first + max(1, int(steps * part)) for part in _MIDDLE)
    saved = [each for each in undisturbed.saved_at if first < each < undisturbed.done]
    if moment is Moment.CHECKPOINT:
        # Watched for from the step before.
        before = [each - 1 for each in saved[1:] if each - 1 > first] or [max(first + 1, low)]
        return rng.choice(before[: max(1, len(before) - 1)])
    if saved:  # after a checkpoint, if possible
        low = min(max(low, saved[0] + 1), max(first + 1, undisturbed.done - 2))
    return rng.randint(low, max(low, high))


def find_obstacles(cases: Sequence[Case], undisturbed: Result) -> Mapping[str, str]:
    """Say of the cases that cannot be tried in this job why, by name."""
    found = {}
    for case in cases:
        assert case.fault is not None  # noqa: S101  # only those with one are chosen
        if case.nodes < case.fault.least_nodes:
            found[case.name] = f"it needs {case.fault.least_nodes} nodes, and the job has {case.nodes}"
        elif case.moment is Moment.CHECKPOINT and not undisturbed.saved_at:
            found[case.name] = (
                "the undisturbed run has written no file in its folder, and reported no phase `checkpoint`"
            )
    return found
