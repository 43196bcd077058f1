"""Draws a story as one HTML page that loads nothing.

Its Content-Security-Policy allows its own script and style, by their hashes, and nothing else. It allows no network,
and no code that a line of a log could bring. The data is JSON in which `<` is escaped, so that it cannot end its
element.

To keep the page small, bars are numbers, nodes whose rows are alike are one row until a reader opens it, and lines are
thinned out. Above `_MOST_BAR_BYTES` only the first node of such a row keeps its bars.
"""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any, Final

from muster._shared.contract import show_controls
from muster._shared.goodput import CAUSES
from muster._shared.reports import Report
from muster.cli.history.sentences import WORDS, tell_story
from muster.cli.history.story import PHASES, NodeStory, Story

BUCKETS: Final = ("productive", "unfinished", "pause", *CAUSES, "unknown")
"""In the order of the bar."""
_MOST_POINTS: Final = 3000
"""The most points of a line."""
_MOST_MARKS: Final = 4000
_MOST_EXITS: Final = 200
"""The most exits of a node."""
_MOST_BAR_BYTES: Final = 3_000_000
_TEXT_CHARS: Final = 600
_REPORT_CHARS: Final = 20_000


def build_page(story: Story) -> str:
    """Return the whole page."""
    files = resources.files(__package__)
    style, script = (files.joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; script-src '{hash_source(script)}'; style-src '{hash_source(style)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    sentences = "".join(
        f"<p>{html.escape(show_controls(each))}</p>" for each in (*tell_story(story), story.records.missing) if each
    )
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(show_controls(f"{story.records.name}: timeline")),
        "STYLE": style,
        "STORY": sentences,
        "REPORT": _build_report(story.records.report),
        "DATA": escape_json(json.dumps(build_data(story), separators=(",", ":"))),
        "SCRIPT": script,
    }
    page = files.joinpath("page.html").read_text("utf-8")
    pieces = page.split("@")  # names are every other piece, so none is searched for
    return "".join(parts[piece] if at % 2 else piece for at, piece in enumerate(pieces))


def escape_json(text: str) -> str:
    r"""Return JSON that can stand in an HTML element.

    >>> escape_json('"</script>"')
    '"\\u003c/script\\u003e"'
    """
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def hash_source(text: str) -> str:
    """Return how a Content-Security-Policy names a script or a style that it allows."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _build_report(report: Report | None) -> str:
    if report is None or not report.failures:
        return ""
    root = report.failures[0]
    names = ("host", "global_rank", "exit_code", "signal", "reason", "exception")
    lines = [f"{name}: {getattr(root, name)}" for name in names if getattr(root, name) not in (None, "")]
    lines += [*filter(None, [root.traceback]), *root.stderr_tail]
    text = "\n".join(lines)[-_REPORT_CHARS:]
    text = "\n".join(show_controls(line) for line in text.splitlines())
    return f"<section><h2>Root cause of the end</h2><pre>{html.escape(text)}</pre></section>"


# -- the data ----------------------------------------------------------------------------------------------------------


def build_data(story: Story) -> dict[str, Any]:
    """Return what the script of the page draws. Times are in milliseconds since the start."""
    start_s = story.start_s
    groups = _group(story.nodes, story.end_s - start_s)
    nodes = [_build_node(node, start_s) for node in story.nodes]
    if sum(len(node["bars"]) for node in nodes) * 6 > _MOST_BAR_BYTES:
        for group in groups:
            for index in group[1:]:
                nodes[index]["bars"], nodes[index]["name"] = nodes[group[0]]["bars"], nodes[index]["name"] + " (alike)"
    lines = [("step", story.steps), *story.values.items()] if story.steps else []
    return {
        "start": round(start_s, 3),
        "total": _to_ms(story.end_s, start_s),
        "phases": PHASES,
        "nodes": nodes,
        "groups": groups,
        "labels": [_name_group(story.nodes, group) for group in groups],
        "marks": [
            [
                *(_to_ms(mark.at_s, start_s), mark.kind, _shorten(mark.text), -1 if mark.node is None else mark.node),
                *([mark.report] if mark.report or mark.since_s is not None else []),
                *([] if mark.since_s is None else [_to_ms(mark.since_s, start_s)]),
            ]
            for mark in story.marks[:_MOST_MARKS]
        ],
        "recoveries": [
            {
                "t": _to_ms(each.time_s, start_s),
                "cost": each.cost_s,
                "parts": list(each.parts_s),
                "cause": _shorten(each.cause),
            }
            for each in story.recoveries
        ],
        "lines": [_build_line(name, points, start_s) for name, points in lines],
        "buckets": [[name, round(story.buckets[name], 3), WORDS[name]] for name in BUCKETS if name in story.buckets],
    }


def _to_ms(at_s: float, start_s: float) -> int:
    return round((at_s - start_s) * 1000)


def _shorten(text: str) -> str:
    return show_controls(text if len(text) <= _TEXT_CHARS else f"{text[:_TEXT_CHARS]}...")


def _build_node(node: NodeStory, start_s: float) -> dict[str, Any]:
    bars: list[int] = []
    at = 0
    for bar in node.bars:
        start, end = _to_ms(bar.start_s, start_s), _to_ms(bar.end_s, start_s)
        bars += [start - at, end - start, bar.phase, bar.round]
        at = end
    ranks: list[list[int]] = []
    for number, found in sorted(node.ranks.items()):
        entry = [number, found[0] if found else 0, len(found)]
        if not ranks or ranks[-1][1:] != entry[1:]:
            ranks.append(entry)
    exits = [[_to_ms(at_s, start_s), rank, code, number] for at_s, rank, code, number in node.exits[-_MOST_EXITS:]]
    return {"name": f"node {node.index}", "host": show_controls(node.host), "bars": bars, "ranks": ranks,
            "exits": exits}  # fmt: skip


def _group(nodes: Sequence[NodeStory], total_s: float) -> list[list[int]]:
    """Return the positions of nodes whose rows are alike: the same phases, at about the same times."""
    most_s = max(0.5, total_s / 2000)
    groups: list[list[int]] = []
    for index, node in enumerate(nodes):
        for group in groups:
            if _is_alike(nodes[group[0]], node, most_s):
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def _is_alike(one: NodeStory, other: NodeStory, most_s: float) -> bool:
    if len(one.bars) != len(other.bars) or bool(one.exits) or bool(other.exits):
        return False
    return all(
        mine.phase == its.phase and abs(mine.start_s - its.start_s) <= most_s and abs(mine.end_s - its.end_s) <= most_s
        for mine, its in zip(one.bars, other.bars, strict=True)
    )


def _name_group(nodes: Sequence[NodeStory], group: Sequence[int]) -> str:
    if len(group) == 1:
        return f"node {nodes[group[0]].index}"
    return f"nodes {nodes[group[0]].index}-{nodes[group[-1]].index} ({len(group)} alike)"


def _build_line(name: str, points: Sequence[tuple[float, float]], start_s: float) -> dict[str, Any]:
    kept = _thin_out(points)
    return {
        "name": show_controls(name)[:40],
        "t": [_to_ms(at_s, start_s) for at_s, _ in kept],
        "v": [float(f"{value:.6g}") if isinstance(value, float) else value for _, value in kept],
    }


def _thin_out(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the least and the most of each stretch, so that peaks stay."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    stretch = -(-2 * len(points) // _MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for at in range(0, len(points), stretch):
        part = points[at : at + stretch]
        ends = {min(part, key=lambda each: each[1]), max(part, key=lambda each: each[1])}
        kept += sorted(ends)
    return kept
