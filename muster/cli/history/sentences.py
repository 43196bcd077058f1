"""Says in three sentences what happened to a job, what interrupted it, and where the time went. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from muster._shared.console.summary import CAUSES
from muster._shared.job_view import describe_steps
from muster._shared.reports import describe_replaced, format_duration
from muster.cli.history.clocks import show_clock
from muster.cli.history.story import WAITING_STATES, Story
from muster.schedulers.wording.reasons import Code, Reason
from muster.schedulers.wording.words import word_all

HOW_TO_REPORT: Final = "call muster.worker.step(i) once per step in the script"
_MOST_CAUSES: Final = 3
WORDS: Final[Mapping[str, str]] = {
    "productive": "in steps that count",
    "unfinished": "since the last step",
    "pause": "not counted as lost",
    "unknown": "not known, because records are missing",
    **CAUSES,
}
"""The words for the seconds of a story, by what they went into."""
_FAILURES: Final[Mapping[str, str]] = {
    "worker": "a failed worker",
    "hang": "a hang",
    "node": "a lost node",
    "fenced": "a silent leader",
}


def tell_story(story: Story) -> tuple[str, str, str]:
    """Return the three sentences."""
    return _tell_course(story), _tell_interruptions(story), _tell_cost(story)


def _tell_course(story: Story) -> str:
    took = ("at least " if story.records.begins_late else "") + format_duration(story.end_s - story.start_s)
    sizes = [(nodes, ranks) for _, _, _, nodes, ranks in story.rounds]
    where = "before any round was formed"
    if sizes:
        nodes, ranks = (
            _name_range([each[0] for each in sizes], "node"),
            _name_range([each[1] for each in sizes], "rank"),
        )
        where = f"on {nodes} with {ranks}"
    began, ended = (show_clock(each) for each in (story.start_s, story.end_s))
    times = f"from {began} to {ended} UTC"
    done, most = story.steps_done
    steps = f", {describe_steps(done, most, story.total, ' done')}" if most else ""
    again = f", in {story.incarnations} runs by its scheduler" if story.incarnations > 1 else ""
    if story.goes_on:
        return f"The job has run for {took} {where}{again}{steps}, since {began} UTC, {_tell_state(story)}."
    if story.succeeded:
        return f"The job ran for {took} {where}{again}, {times}, and succeeded{steps}."
    because = f": {story.ending}" if story.ending else ", and no record says why"
    more = [
        each
        for each in story.records.scheduler_reasons
        if each.code is not Code.CANCELLED and each.text != story.ending
    ]
    if (story.was_stopped or not story.ending) and more:
        because += f"; its scheduler says {story.records.scheduler_state}: {_word(more)}"
    return f"The job ran for {took} {where}{again}, {times}{steps}, and did not succeed{because}."


def _word(reasons: Sequence[Reason]) -> str:
    return word_all(reasons).removesuffix(".")


def _tell_state(story: Story) -> str:
    """Say of a job whose records have no end, or that goes on after it, what its scheduler says."""
    state = story.records.scheduler_state
    reason = f": {_word(story.records.scheduler_reasons)}" if story.records.scheduler_reasons else ""
    if state in WAITING_STATES:
        return f"and waits to go on{reason}"
    if not story.runs:
        return f"and its scheduler says {state}"
    if state in ("", "RUNNING"):
        return "and no record says that it has ended"
    return f"and no record says that it has ended; its scheduler says {state}{reason}"


def _name_range(counts: Sequence[int], noun: str) -> str:
    least, most = min(counts), max(counts)
    number = f"{least}" if least == most else f"{least} to {most}"
    return f"{number} {noun}{'' if most == 1 else 's'}"


def _tell_interruptions(story: Story) -> str:
    if not story.recoveries and not story.failures and not story.stops:
        return _tell_unknown_interruptions(story)
    kinds = [_FAILURES.get(name, name) + (f" ({count} times)" if count > 1 else "") for name, count in
             story.failures.items()]  # fmt: skip
    count = len(story.recoveries)
    planned = count - sum(story.failures.values())
    listed = " and ".join([", ".join(kinds[:-1]), *kinds[-1:]] if len(kinds) > 1 else kinds)
    parts = [f"It was interrupted by {listed}" if kinds else "No failure interrupted it"]
    if story.records.missing:
        parts[0] += ", as far as there are records"
    if planned > 0:
        parts.append(f"nodes joined or left {_times(planned)}")
    if story.stops:
        names = " and ".join(dict.fromkeys(story.stops))
        parts.append(f"its agents were told to stop {_times(len(story.stops))} ({names})")
    if story.replaced:
        new, processes = (sum(counts) for counts in zip(*story.replaced, strict=True))
        text = describe_replaced(new, processes)
        parts.append(f"in {len(story.replaced)} of its rounds {text}" if len(story.replaced) > 1 else text)
    costs = [(each.cost_s, each.cause) for each in story.recoveries if each.cost_s is not None]
    if costs:
        total_s, (longest_s, cause) = sum(cost_s for cost_s, _ in costs), max(costs)
        longest = f"the longest time {format_duration(longest_s)}" if len(costs) > 1 else "once"
        parts.append(f"catching up took {format_duration(total_s)} in all, {longest} ({cause})")
    return "; ".join(parts) + "."


def _tell_unknown_interruptions(story: Story) -> str:
    count = max(story.records.restarts, story.incarnations - 1)
    if count:
        left = "no record that is left says" if story.records.missing else "no record says"
        return f"Its scheduler has counted {count} restart{'s'[: count != 1]}, and {left} why."
    return "Whether anything interrupted it is not known." if story.records.missing else "Nothing interrupted it."


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _tell_cost(story: Story) -> str:
    if "unknown" in story.buckets:
        return "What part of the time was productive is not known, because records of steps are missing."
    start = "" if story.time_to_start_s is None else format_duration(story.time_to_start_s)
    if story.goodput is None:
        ran = f"Its workers ran after {start}; what" if start else "What"
        return f"{ran} part of the time was productive is not known: {HOW_TO_REPORT}."
    lost = sorted(((name, each) for name, each in story.goodput.lost_s if each >= 0.1), key=lambda each: -each[1])
    named = [f"{format_duration(each)} {WORDS[name]}" for name, each in lost[:_MOST_CAUSES]]
    rest_s = sum(each for _, each in lost[_MOST_CAUSES:])
    named += [f"{format_duration(rest_s)} otherwise"] if rest_s >= 0.1 else []
    fraction = f"{story.goodput.fraction * 100:.0f} %"
    pause = f"; it was paused for {format_duration(story.goodput.pause_s)}" if story.goodput.pause_s else ""
    of_lost = f"; lost: {', '.join(named)}" if named else ""
    without = " without the pause" if pause else ""
    recorded, after = (
        ("the recorded time", "") if story.records.begins_late else ("its time", f", the first one after {start}")
    )
    useful = f"{fraction} of {recorded}{without} went into steps that count (goodput){after}"
    return f"{useful}{of_lost}{pause}."
