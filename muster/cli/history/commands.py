"""`muster events` and `muster timeline`: what the agents of a job have written, as text, JSON lines, a page or a trace.

They read what there is of a job that runs, of one that has ended or was cancelled, or of a folder of logs.
"""

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muster._shared.codec import to_data
from muster._shared.contract import print_line, show_controls
from muster._shared.control import CommandExit, ControlError
from muster._shared.reports import format_size
from muster.cli.history import sources
from muster.cli.history.clocks import TimedEvent, place, show_clock

if TYPE_CHECKING:
    from muster.cli.history.story import Story

_TEXT_CHARS: Final = 2000


def print_events(handle: str, *, role: str | None = None, as_json: bool = False) -> int:
    """Print the records of all agents of a job in their order, of successive records of steps the last.

    Return the exit code.

    Args:
        handle: names an app, or a folder with logs.
        role: of an app with several.
        as_json: one line of JSON for each record.

    Raises:
        ControlError: see `sources.load`.
    """
    with _without_collector():
        records = sources.load(handle, role)
        placed = place(records.events)
    if records.missing:
        print_line(records.missing)
    start_s = placed[0].at_s
    if as_json:
        for each in placed:
            print(_to_json(each, start_s))
        return CommandExit.DONE
    print_line(f"0 s is {show_clock(start_s)} UTC by the leader's clock", sys.stdout)
    for _, successive in groupby(placed, _find_run):
        *_, last = successive  # a job records its steps every second: other records would be hard to find
        print_line(_describe(last, start_s), sys.stdout)
    return CommandExit.DONE


def _find_run(placed: TimedEvent) -> object:
    event = placed.event
    return (placed.incarnation, event.round, event.agent) if event.what == "steps_done" else id(placed)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Switch the garbage collector off.

    A week on many nodes is millions of objects, all of which stay: to look for garbage took a third of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _to_json(placed: TimedEvent, start_s: float) -> str:
    uncertainty_s = None if placed.uncertainty_s is None else round(placed.uncertainty_s, 6)
    data = {
        "at_s": round(placed.at_s - start_s, 6),
        "uncertainty_s": uncertainty_s,
        "incarnation": placed.incarnation,
        **placed.event.to_json(),
    }
    return json.dumps(data)


def _describe(placed: TimedEvent, start_s: float) -> str:
    event = placed.event
    where = f"node {event.node_index}" if event.node_index is not None else f"agent {event.agent}"
    uncertainty_s = placed.uncertainty_s
    error = "±?" if uncertainty_s is None else f"±{uncertainty_s * 1000:.1f} ms" if uncertainty_s else ""
    details = [f"{name} {_show_value(value)}" for name, value in event.detail.items() if value not in (None, "", {})]
    if event.ranks:
        details.insert(0, f"ranks {','.join(map(str, event.ranks))}")
    if event.duration_s is not None:
        details.append(f"({event.duration_s:.3f} s)")
    text = show_controls("  ".join(details))[:_TEXT_CHARS]
    place = f"round {event.round} attempt {event.attempt}"
    return f"{placed.at_s - start_s:12.3f} s {error:>9}  {where:8}  {place:18}  {event.what:20} {text}".rstrip()


def _show_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def write_timeline(
    handle: str,
    *,
    role: str | None = None,
    output: str | None = None,
    as_json: bool = False,
) -> int:
    """Write the timeline of a job as one page. Return the exit code.

    Args:
        handle: names an app, or a folder with logs.
        role: of an app with several.
        output: the page. None: NAME.html in the working directory.
        as_json: print one line of JSON.

    Raises:
        ControlError: see `sources.load`. It is also raised for a file that cannot be written.
    """
    from muster.cli.history.sentences import tell_story
    from muster.cli.history.story import tell

    with _without_collector():
        records = sources.load(handle, role)
        story = tell(records, place(records.events))
    from muster.cli.history.page import build_page

    name = "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in records.name)
    path = output or f"{name}.html"
    content = build_page(story).encode(errors="replace")
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise ControlError(f"cannot write {path}: {error.strerror}", CommandExit.REFUSED) from error
    sentences = tell_story(story)
    if records.missing:
        print_line(records.missing)
    if as_json:
        facts = {**_list_facts(story), "missing": records.missing, "sentences": sentences, "written": [path]}
        print(json.dumps(facts))
        return CommandExit.DONE
    print_line("\n".join(sentences), sys.stdout)
    print_line(f"written: {path} ({format_size(len(content))})")
    return CommandExit.DONE


def _list_facts(story: "Story") -> dict[str, object]:
    """Return what docs/timeline.md promises of `muster timeline --json`."""
    return {
        "name": story.records.name,
        "started_s": round(story.start_s, 3),
        "duration_s": round(story.end_s - story.start_s, 3),
        "has_ended": not story.goes_on,
        "succeeded": story.succeeded,
        "ending": story.ending,
        "incarnations": story.incarnations,
        "seconds": {name: round(each, 3) for name, each in story.buckets.items()},
        "goodput": None if story.goodput is None else story.goodput.fraction,
        "time_to_start_s": story.time_to_start_s,
        "failures": dict(story.failures),
        "recoveries": [to_data(each) for each in story.recoveries],
        "steps": max((done for _, done in story.steps), default=None),
    }
