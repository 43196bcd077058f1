"""Draws the diagrams and plots in `static/`: the flow of a job, a round's life, and the figures with their spread.

    python docs/drawings.py [FOLDER]

Nothing is measured here: the plots show what `comparison.md` says. The colours follow the reader's page, and each
picture has a title and a description as text.
"""

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
COLOURS = {"ground": ("#fafafa", "#131416"), "ink": ("#282828", "#d9d9d9"), "faint": ("#767676", "#9a9a9a"),
    "box": ("#e9eef6", "#243044"), "good": ("#1e50aa", "#7fb2ff"), "bad": ("#b41e1e", "#ff8a80")}  # fmt: skip
"""Of a light and of a dark page."""
CHARACTER = 7.1
"""Width of one at most, on average: text is 13 px high."""
WIDTH, ROW, MARGIN = 816, 34, 16

Step = tuple[str, ...]
"""("send", FROM, TO, TEXT), ("all", FROM, TEXT): to all other lanes, ("does", LANE, TEXT) or ("fails", LANE, TEXT)."""

SEQUENCES: dict[str, tuple[str, Sequence[str], Sequence[Step]]] = {
    "round-crash": (
        "A worker crashes: all workers start again in the same places",
        ("workers of node 0", "agent 0, the leader", "agent 1", "workers of node 1"),
        (
            ("fails", "workers of node 1", "rank 3 exits with 1"),
            ("send", "workers of node 1", "agent 1", "the kernel tells of the end"),
            ("send", "agent 1", "agent 0, the leader", "a worker failed"),
            ("does", "agent 0, the leader", "new? a restart left?"),
            ("send", "agent 0, the leader", "agent 1", "round 1 is over: stop"),
            ("send", "agent 0, the leader", "workers of node 0", "signal, then SIGKILL"),
            ("send", "agent 1", "workers of node 1", "signal, then SIGKILL"),
            ("does", "agent 1", "forks successors"),
            ("send", "agent 1", "agent 0, the leader", "stopped"),
            ("send", "agent 0, the leader", "agent 1", "round 2, attempt 1"),
            ("send", "agent 0, the leader", "workers of node 0", "start"),
            ("send", "agent 1", "workers of node 1", "start"),
        ),
    ),
    "round-lost-node": (
        "A node is lost: it stops by itself before the others go on",
        ("agent 0, the leader", "agent 1", "agent 2", "guard of node 2"),
        (
            ("send", "agent 1", "agent 0, the leader", "heartbeat, each second"),
            ("send", "agent 2", "agent 0, the leader", "heartbeat, each second"),
            ("fails", "agent 2", "the network is cut"),
            ("does", "guard of node 2", "the lease ends"),
            ("fails", "guard of node 2", "SIGKILL to its workers"),
            ("does", "agent 0, the leader", "5 s of silence, and a grace"),
            ("does", "agent 0, the leader", "MIN nodes left?"),
            ("send", "agent 0, the leader", "agent 1", "round 1 is over: stop"),
            ("send", "agent 1", "agent 0, the leader", "stopped"),
            ("send", "agent 0, the leader", "agent 1", "round 2: new ranks"),
        ),
    ),
    "round-lost-leader": (
        "The leader is lost: the lowest rank that is left takes over, if it can prove that no other group goes on",
        ("agent 0, the leader", "agent 1", "agent 2"),
        (
            ("fails", "agent 0, the leader", "its machine is gone"),
            ("does", "agent 1", "SIGKILL to its workers"),
            ("does", "agent 2", "SIGKILL to its workers"),
            ("send", "agent 2", "agent 1", "joins the lowest rank"),
            ("does", "agent 1", "more than half of round 1?"),
            ("does", "agent 1", "leads from now on"),
            ("send", "agent 1", "agent 2", "round 2: new ranks, new store"),
            ("send", "agent 2", "agent 1", "heartbeat, each second"),
        ),
    ),
    "round-drain": (
        "A node is preempted: all ranks save and stop at one step",
        ("workers of node 0", "agent 0, the leader", "agent 1", "workers of node 1"),
        (
            ("does", "agent 1", "gets SIGTERM"),
            ("send", "agent 1", "agent 0, the leader", "let all ranks stop at one step"),
            ("send", "agent 0, the leader", "agent 1", "report how far your ranks are"),
            ("does", "workers of node 0", "at step 18"),
            ("does", "workers of node 1", "at step 17"),
            ("send", "agent 1", "agent 0, the leader", "none is past step 19"),
            ("send", "agent 0, the leader", "agent 1", "stop at step 20"),
            ("does", "workers of node 0", "save step 20, end"),
            ("does", "workers of node 1", "save step 20, end"),
            ("does", "agent 0, the leader", "exit code 143"),
            ("does", "agent 1", "exit code 143"),
        ),
    ),
}
FLOW = (
    ("torchx run dist.ddp -j 2x4 --script main.py", "your command line"),
    ("component", "-j, script and options become an AppDef: one role, two replicas"),
    ("scheduler adapter", "a request that a dry run prints; the agent and your folder travel with it"),
    ("one machine | ssh | Slurm | Docker | Kubernetes", "starts one replica on each node"),
)
NODE = (
    ("guard", "kills what the agent leaves behind"),
    ("agent", "no torch in it; joins the others"),
    ("template", "has imported torch once"),
    ("workers", "its forks: torchrun's variables"),
)
PLOTS = {
    "figures-start": (
        "From the start to the first useful work, in seconds: muster beside torchrun",
        (
            ("first line of a script that does not import torch", "first line of the script"),
            ("torch imported in 4 workers", "torch imported in 4 workers"),
            ("two nodes until the first all-reduce", "2 nodes: first all-reduce"),
            ("`torchx run -s local_cwd dist.ddp -j 2x4`, one all-reduce", "torchx run, 2x4, whole job"),
        ),
    ),
    "figures-heal": (
        "From a fault to the next all-reduce, and the end of a job, in seconds: muster beside torchrun",
        (
            ("a worker crashes, until the next all-reduce", "a worker crashes"),
            ("a node vanishes, until the survivor's", "a node vanishes"),
            ("the leader's node vanishes", "the leader's node vanishes"),
            ("a node joins, how long", "a node joins: standstill"),
            ("last line of a script with a process group", "8 workers end"),
        ),
    ),
}
"""By file: title, and for each row how its line in `comparison.md` begins, and what the plot calls it."""
_SAMPLE = re.compile(r"([\d.]+) s \(([\d.]+)\.\.([\d.]+), (\d+)\)")

_HALO = "line-ground halo"
"""Words with a rim in the colour of the ground, so that a line of the grid does not run through them."""


@dataclass
class Sketch:
    """The parts of a picture, and how large it is."""

    title: str
    description: str
    width: float
    height: float = 0
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, style: str = "ink", anchor: str = "start") -> None:
        """Add words, whose base line is at `y`."""
        self.parts.append(
            f'<text x="{x:.0f}" y="{y:.0f}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def line(self, x: float, y: float, x2: float, y2: float, style: str = "ink", *, arrow: bool = False) -> None:
        """Add a line, with an arrow at its end if wanted."""
        end = f' marker-end="url(#to-{style})"' if arrow else ""
        self.parts.append(f'<path d="M{x:.0f} {y:.0f}L{x2:.0f} {y2:.0f}" class="line-{style}"{end} />')

    def box(self, x: float, y: float, width: float, height: float, style: str = "box") -> None:
        """Add a box."""
        shape = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}"'
        self.parts.append(f'<rect {shape} rx="5" class="{style}" />')

    def write(self) -> str:
        """Return the picture as SVG."""

        def name_colours(index: int) -> str:
            return "\n".join(
                f".{name} {{ fill: {both[index]} }}\n.line-{name} {{ stroke: {both[index]} }}"
                for name, both in COLOURS.items()
            )

        arrows = "".join(
            f'<marker id="to-{name}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto">'
            f'<path d="M0 0L8 4L0 8z" class="{name}" /></marker>'
            for name in ("ink", "faint", "good", "bad")
        )
        return (
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" aria-labelledby="title description" '
            f'xmlns="http://www.w3.org/2000/svg">\n<title id="title">{escape(self.title)}</title>\n'
            f'<desc id="description">{escape(self.description)}</desc>\n<style>\n'
            "text { font-family: system-ui, sans-serif; font-size: 13px }\npath { fill: none; stroke-width: 1.4 }\n"
            ".halo { paint-order: stroke; stroke-width: 6px }\n"
            f"marker path {{ stroke: none }}\n{name_colours(0)}\n"
            f"@media (prefers-color-scheme: dark) {{\n{name_colours(1)}\n}}\n</style>\n<defs>{arrows}</defs>\n"
            '<rect class="ground" width="100%" height="100%" rx="8" />\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


def draw_sequence(title: str, lanes: Sequence[str], steps: Sequence[Step]) -> str:
    """Draw who tells whom what, from the top to the bottom."""
    said = [f"{step[1]}{f' to {step[2]}' if step[0] == 'send' else ''}: {step[-1]}" for step in steps]
    sketch = Sketch(title, ". ".join(said) + ".", width=WIDTH)
    each = (WIDTH - 2 * MARGIN) / len(lanes)
    middle = {lane: MARGIN + each * (index + 0.5) for index, lane in enumerate(lanes)}
    top, y = MARGIN + 30, MARGIN + 30.0
    for lane, x in middle.items():
        sketch.box(x - 82, MARGIN, 164, 28)
        sketch.text(x, MARGIN + 19, lane, anchor="middle")
    parts, sketch.parts = sketch.parts, []
    for kind, lane, *rest in steps:
        y += ROW
        x = middle[lane]
        if kind == "send":
            other, words = middle[rest[0]], rest[1]
            sketch.line(x, y, other - math.copysign(3, other - x), y, "good", arrow=True)
            sketch.text((x + other) / 2, y - 6, words, anchor="middle")
        else:
            width = len(rest[0]) * CHARACTER + 14
            sketch.box(x - width / 2, y - 19, width, 24, "box")
            sketch.text(x, y - 3, rest[0], "bad" if kind == "fails" else "ink", anchor="middle")
    ends, sketch.parts = sketch.parts, parts
    for x in middle.values():
        sketch.line(x, top, x, y + 14, "faint")
    sketch.parts += ends
    sketch.height = y + 14 + MARGIN
    return sketch.write()


def draw_flow() -> str:
    """Draw how a job gets from the command line to its workers."""
    said = ". ".join(f"{name}: {what}" for name, what in (*FLOW, *NODE))
    sketch = Sketch("How a job flows from the command line to its workers", said + ".", width=WIDTH)
    y, middle = float(MARGIN), WIDTH / 2
    for name, what in FLOW:
        sketch.box(middle - 250, y, 500, 44)
        sketch.text(middle, y + 18, name, anchor="middle")
        sketch.text(middle, y + 36, what, "faint", anchor="middle")
        y += 44
        if name != FLOW[-1][0]:
            sketch.line(middle, y, middle, y + 22, "good", arrow=True)
            y += 22
    for node, x in enumerate((middle - 190, middle + 190)):
        sketch.line(middle, y, x, y + 30, "good", arrow=True)
        sketch.text(x - 160, y + 26, f"node {node}", "faint")
        below = y + 32.0
        for index, (name, what) in enumerate(NODE):
            sketch.box(x - 160, below, 320, 30)
            ranks = f" {4 * node}-{4 * node + 3}" if name == "workers" else ""
            sketch.text(x - 150, below + 20, name + ranks)
            sketch.text(x + 150, below + 20, what, "faint", anchor="end")
            if index:
                sketch.line(x - 130, below - 14, x - 130, below, "good", arrow=True)
            below += 44
    row = y + 32 + 44 + 15
    sketch.line(middle - 30, row - 4, middle + 30, row - 4, "good", arrow=True)
    sketch.line(middle + 30, row + 5, middle - 30, row + 5, "good", arrow=True)
    sketch.text(middle, row + 20, "rounds", "faint", anchor="middle")
    sketch.height = below + MARGIN
    return sketch.write()


def read_figures(text: str) -> dict[str, tuple[str, str]]:
    """Read the table of `comparison.md`: what was measured, and the cells of muster and of torchrun."""
    rows = (line.strip("|\n ").split(" | ") for line in text.splitlines() if line.startswith("| "))
    return {cells[0]: (cells[1], cells[2].rstrip(" |") if len(cells) > 2 else "") for cells in rows if len(cells) > 1}


def draw_plot(title: str, rows: Sequence[tuple[str, str]], figures: dict[str, tuple[str, str]]) -> str:
    """Draw medians as dots and ranges as lines, on a logarithmic axis; what has no number is written out."""
    left, right, least, most = 214.0, 670.0, 0.02, 60.0
    sketch = Sketch(title, "", width=WIDTH)

    def place(seconds: float) -> float:
        share = math.log(seconds / least) / math.log(most / least)
        return left + share * (right - left)

    said, y = [], MARGIN + 34.0
    sketch.text(left, MARGIN + 12, "● muster", "good")
    sketch.text(left + 90, MARGIN + 12, "● torchrun or TorchX", "bad")
    for begin, name in rows:
        (cells,) = (cells for label, cells in figures.items() if label.startswith(begin))
        sketch.text(left - 14, y + 18, name, anchor="end")
        for cell, style, who in zip(cells, ("good", "bad"), ("muster", "torchrun"), strict=True):
            found = _SAMPLE.match(cell)
            if found:
                median, low, high = (float(number) for number in found.groups()[:3])
                sketch.line(place(low), y + 4, place(high), y + 4, style)
                sketch.parts.append(f'<circle cx="{place(median):.1f}" cy="{y + 4:.0f}" r="4.5" class="{style}" />')
                words = f"{median:g} s ({low:g} to {high:g}, {found[4]} samples)"
                rest = "" if _SAMPLE.search(cell, found.end()) else cell[found.end() :]
                rest = rest if rest.startswith(";") else ""
                words += rest
                sketch.text(place(high) + 9, y + 8, f"{median:g} s{rest}", f"{style} {_HALO}")
            else:
                words = re.split(r"[,;(]", cell)[0].strip()
                sketch.text(place(1.0), y + 8, words, f"{style} {_HALO}")
            said.append(f"{name}, {who}: {words}")
            y += 20
        y += 14
    grid = []
    for seconds in (0.1, 1.0, 10.0):
        x = place(seconds)
        grid.append(f'<path d="M{x:.0f} {MARGIN + 26}L{x:.0f} {y:.0f}" class="line-faint" stroke-dasharray="2 4" />')
        sketch.text(x, y + 16, f"{seconds:g} s", "faint", anchor="middle")
    sketch.parts = grid + sketch.parts
    sketch.description = ". ".join(said) + ". Dots are medians, lines the least and the most."
    sketch.height = y + 16 + MARGIN
    return sketch.write()


def draw_all() -> dict[str, str]:
    """Draw every picture, by the name of its file."""
    figures = read_figures((DOCS / "comparison.md").read_text())
    return {
        "flow.svg": draw_flow(),
        **{f"{name}.svg": draw_sequence(*parts) for name, parts in SEQUENCES.items()},
        **{f"{name}.svg": draw_plot(*parts, figures) for name, parts in PLOTS.items()},
    }


def main(folder: Path) -> None:
    """Write the pictures."""
    for name, svg in draw_all().items():
        (folder / name).write_text(svg)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "static")
