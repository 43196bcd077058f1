"""Draws a rehearsal as one HTML page that loads nothing: the table, and each run as a row of colours over time.

Its Content-Security-Policy allows its own style, by its hash, and nothing else. There is no script in it.
"""

import html
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Final

from muster._shared.contract import show_controls
from muster.cli.history.page import hash_source
from muster.cli.history.story import PHASES, Story
from muster.cli.rehearse.outcome import Row, Verdict
from muster.cli.rehearse.table import HEAD, Report, list_cells

_WIDTH: Final = 1000
_BAR: Final = 14
_COLOURS: Final = (
    *("joining", "starting", "first", "training", "hung", "paused", "saving", "stopping", "between", "waiting", "lost"),
)
"""Names of the timeline's colours, by phase."""
_STYLE: Final = """
td:not(:last-child) { white-space: nowrap; }
svg { display: block; width: 100%; background: var(--panel); }
.bad { color: var(--failure); } .untried { color: var(--dim); }
.fault { stroke: var(--failure); stroke-width: 2; }
"""


def build_page(report: Report, runs: Sequence[tuple[str, Story, float | None]]) -> str:
    """Build the page.

    Args:
        report: of the rehearsal.
        runs: title, story, and when the fault happened in seconds since the epoch (None: never), the undisturbed first.
    """
    css = resources.files("muster.cli.history").joinpath("page.css").read_text("utf-8")
    style = css + _STYLE + "".join(f".p{at} {{ fill: var(--{name}); }}\n" for at, name in enumerate(_COLOURS))
    style += "".join(f"i.p{at} {{ background: var(--{name}); }}\n" for at, name in enumerate(_COLOURS))
    policy = f"default-src 'none'; style-src '{hash_source(style)}'; base-uri 'none'; form-action 'none'"
    legend = " ".join(f'<span><i class="p{at}"></i>{name}</span>' for at, name in enumerate(PHASES))
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<title>{_show('rehearsal: ' + report.command)}</title><style>{style}</style></head><body>",
        f"<h1>{_show(report.command)}</h1>",
        f"<p>{report.describe()}</p>",
        *(f"<p>{_show(note)}</p>" for note in report.notes),
        "<table><thead><tr>" + "".join(f"<th>{name}</th>" for name in HEAD) + "</tr></thead><tbody>",
        *(_build_row(row) for row in report.rows),
        "</tbody></table>",
        *_build_advice(report),
        "<h2>Runs</h2>",
        f'<div class="legend">{legend}</div>',
        *_build_runs(runs),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _build_row(row: Row) -> str:
    kind = "bad" if row.verdict.is_bad else "untried" if row.verdict is Verdict.NOT_TRIED else ""
    cells = [_show(cell) for cell in list_cells(row)]
    cells[-1] = "; ".join(filter(None, (cells[-1], _show(row.reason))))
    return (
        "<tr>"
        + "".join(f'<td class="{kind if at == 2 else ""}">{cell}</td>' for at, cell in enumerate(cells))
        + "</tr>"
    )


def _build_advice(report: Report) -> Iterator[str]:
    advice = report.list_advice()
    if advice:
        yield "<h2>What to change</h2><ul>"
        yield from (f"<li>{_show(text)} ({_show(page)})</li>" for _, text, page in advice)
        yield "</ul>"


def _build_runs(runs: Sequence[tuple[str, Story, float | None]]) -> Iterator[str]:
    longest_s = max((story.end_s - story.start_s for _, story, _ in runs), default=1.0) or 1.0
    for title, story, caused_s in runs:
        height = _BAR * max(1, len(story.nodes))
        took_s = story.end_s - story.start_s
        yield f"<p>{_show(title)}: {took_s:.1f} s</p>"
        yield f'<svg viewBox="0 0 {_WIDTH} {height}" preserveAspectRatio="none" role="img" aria-label="{_show(title)}">'
        for row, node in enumerate(story.nodes):
            for bar in node.bars:
                x, end = ((at_s - story.start_s) / longest_s * _WIDTH for at_s in (bar.start_s, bar.end_s))
                size = f'width="{end - x:.1f}" height="{_BAR - 2}"'
                yield f'<rect class="p{bar.phase}" x="{x:.1f}" y="{row * _BAR}" {size}/>'
        if caused_s is not None:
            x = (caused_s - story.start_s) / longest_s * _WIDTH
            yield f'<line class="fault" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>'
        yield "</svg>"


def _show(text: str) -> str:
    return html.escape(show_controls(text))
