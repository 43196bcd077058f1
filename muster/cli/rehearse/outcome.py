"""What a run says about the script: pure, from its result and the undisturbed one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from muster.cli.rehearse.faults import Moment
from muster.cli.rehearse.saves import is_equal
from muster.cli.rehearse.trial import Result

_LEAST_DONE: Final = 2
"""Steps before a fault after which a start from nothing is worth a word."""


class Verdict(str, Enum):
    """The verdict of one run."""

    SURVIVED = "survived"
    STARTED_OVER = "started over"
    """It survived, but from its first step on, though it had saved, or should have."""
    DIFFERS = "result differs"
    """It survived, but with another result than the undisturbed run."""
    LOST = "not survived"
    NOT_TRIED = "not tried"

    @property
    def is_bad(self) -> bool:
        """Whether the exit code reports it."""
        return self not in (Verdict.SURVIVED, Verdict.NOT_TRIED)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    title: str
    at: str
    """When the fault happened, for people."""
    verdict: Verdict
    recovery_s: float | None = None
    """How long no new step was done until the job was further than before, or at its last step again.

    None: workers were not started again.
    """
    repeated: int | None = None
    """Steps that were done again. None: not known."""
    result: str = ""
    """"equal", or what differs, or why it is not comparable."""
    reason: str = ""
    """Why it was not tried, or not survived."""
    advice: tuple[str, ...] = ()
    """Names of `table.ADVICE`."""
    logs: str = ""


def judge(result: Result, undisturbed: Result, *, is_repeatable: bool | None, first_save: int | None = None) -> Row:
    """Judge one run.

    Args:
        result: of the run.
        undisturbed: of the run without a fault.
        is_repeatable: two undisturbed runs had the same result. None: that is not known.
        first_save: how many steps were done when something was saved first, in any run. None: nothing was saved.
    """
    case = result.case
    at = describe_moment(result)
    if result.obstacle:
        return Row(name=case.name, title=case.title, at=at, verdict=Verdict.NOT_TRIED, reason=result.obstacle)
    difference, comparison = compare(result, undisturbed, is_repeatable=is_repeatable)
    if not result.has_ended_well:
        verdict = Verdict.LOST
    elif has_started_over(result, first_save):
        verdict = Verdict.STARTED_OVER
    else:
        verdict = Verdict.DIFFERS if difference else Verdict.SURVIVED
    return Row(
        name=case.name,
        title=case.title,
        at=at,
        verdict=verdict,
        recovery_s=result.recovery_s if result.has_ended_well else None,
        repeated=result.repeated if result.is_counted else None,
        result=comparison,
        reason=result.reason,
        advice=tuple(_advise(result, verdict)),
        logs=result.logs,
    )


def describe_moment(result: Result) -> str:
    """Say when the fault happened: "step 87, in a checkpoint"."""
    moment, done = result.case.moment, result.fault_done
    step = result.case.step if done is None else done
    words = {
        Moment.FIRST: "in the first step",
        Moment.CHECKPOINT: f"step {step}, in a checkpoint",
        Moment.END: f"step {step}, near the end",
    }
    return words.get(moment, f"step {step}") if moment is not None else ""


def compare(result: Result, undisturbed: Result, *, is_repeatable: bool | None) -> tuple[bool, str]:
    """Compare the results: whether they differ, and how that is said."""
    if not result.has_ended_well:
        return False, ""
    if result.ranks != undisturbed.ranks:
        ranks = "1 rank" if result.ranks == 1 else f"{result.ranks} ranks"
        return False, f"not comparable: it ended with {ranks}, not {undisturbed.ranks}"
    if result.state != "SUCCEEDED" or (result.is_counted and result.done != undisturbed.done):
        return _compare_step(result, undisturbed, is_repeatable=is_repeatable)
    if not (undisturbed.values.keys() & result.values.keys()) and not undisturbed.digests:
        return False, "not compared: the script reports no numbers (worker.step(i, loss=x)), --compare no file"
    files = [name for name, digest in undisturbed.digests.items() if result.digests.get(name) != digest]
    return _compare_values(result.values, undisturbed.values, files, is_repeatable=is_repeatable)


def _compare_step(result: Result, undisturbed: Result, *, is_repeatable: bool | None) -> tuple[bool, str]:
    """Compare the numbers of the last step that was seen in both runs. Their files are those of different steps."""
    if common := undisturbed.values_at.keys() & result.values_at.keys():
        step = max(common)
        ours, theirs = result.values_at[step], undisturbed.values_at[step]
        if ours.keys() & theirs.keys():
            differs, line = _compare_values(ours, theirs, (), is_repeatable=is_repeatable)
            return differs, f"{line} at step {step}"
    return False, f"not comparable: the run was ended at step {result.done}"


def _compare_values(
    ours: Mapping[str, float], theirs: Mapping[str, float], files: Sequence[str], *, is_repeatable: bool | None
) -> tuple[bool, str]:
    differing = [name for name in theirs if name in ours and not is_equal(ours[name], theirs[name])]
    if not differing and not files:
        return False, "equal"
    if is_repeatable is False:
        return False, "not comparable: two undisturbed runs differ, too"
    words = [f"{name} {ours[name]:.6g} instead of {theirs[name]:.6g}" for name in differing]
    return True, "; ".join([*words, *(f"{name} differs" for name in files)])


def has_started_over(result: Result, first_save: int | None) -> bool:
    """Return whether a later round began long before the first save.

    True also if nothing is ever saved.

    On a busy machine steps and saves may be seen late: hence half of it. A script that continued an older checkpoint in
    all runs is not judged.
    """
    done = result.fault_done
    if not result.is_counted or not done or done < _LEAST_DONE or result.case.moment is Moment.FIRST:
        return False
    if first_save is not None and not _could_resume(result, done):
        return False
    return any(start < (first_save or done) / 2 for start in result.starts[1:])


def _could_resume(result: Result, done: int) -> bool:
    """Return whether something had been saved.

    If all ranks report their saves, the agents must have known it when the fault happened.
    """
    if 0 < len(result.saving_ranks) == result.ranks:
        return result.agents_knew
    return any(0 < each <= done for each in result.saved_at)


def _advise(result: Result, verdict: Verdict) -> Iterator[str]:
    if verdict is Verdict.STARTED_OVER:
        yield "saved" if _is_only_some(result.saving_ranks, result) else "resume"
    elif verdict is Verdict.DIFFERS:
        yield "data"
    elif verdict is Verdict.LOST:
        yield _find_reason(result)
    assert result.case.fault is not None  # noqa: S101  # the undisturbed run is not judged
    if result.case.fault.name == "preempted" and _is_only_some(result.asking_ranks, result):
        yield "stop"


def _is_only_some(ranks: frozenset[int], result: Result) -> bool:
    return 0 < len(ranks) < result.ranks


def _find_reason(result: Result) -> str:
    if result.state == "late":
        return "hang"
    has_restarted = result.story is not None and len(result.story.rounds) > 1
    if result.case.moment is Moment.CHECKPOINT and has_restarted and len(result.starts) == 1:
        return "atomic"  # no later attempt could read its checkpoint
    return "failed"
