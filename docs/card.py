"""Draws `static/card.png`, the picture that others show beside a link to the site; its figures are of `comparison.md`.

    python docs/card.py [FILE]

It needs chromium, because what shows links takes no SVG. The file says which SVG it was made from, and a test compares.
"""

import hashlib
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from html import escape
from pathlib import Path

from drawings import COLOURS, DOCS, read_figures

WIDTH, HEIGHT = 1200, 630
SENTENCE = ("Starts, supervises and heals", "distributed PyTorch jobs")
ROWS = (
    ("a worker crashes, until the next all-reduce", "from a crash to the next all-reduce"),
    ("first line of a script", "until the first line of a script"),
    ("4 workers with torch, whole tree", "memory of 4 workers and launcher"),
)
"""How a row of `comparison.md` begins, and what the card calls it."""


def draw_card() -> str:
    """Draw the card as SVG: the name, what muster does, and three medians beside torchrun's."""
    figures = read_figures((DOCS / "comparison.md").read_text())
    ground, ink, faint = (COLOURS[name][1] for name in ("ground", "ink", "faint"))
    good, bad = COLOURS["good"][1], COLOURS["bad"][1]
    parts = [
        _write(80, 150, "muster", good, 96, weight=700),
        *(_write(80, 220 + 50 * row, line, ink, 42) for row, line in enumerate(SENTENCE)),
        _write(740, 350, "muster", good, 30, weight=700),
        _write(960, 350, "torchrun", bad, 30, weight=700),
    ]
    for row, (begin, name) in enumerate(ROWS):
        (cells,) = (cells for label, cells in figures.items() if label.startswith(begin))
        y = 410 + 62 * row
        ours, theirs = (_read_median(cell) for cell in cells)
        parts += [_write(80, y, name, ink, 30), _write(740, y, ours, good, 36), _write(960, y, theirs, bad, 36)]
    (crash,) = (cells[1] for label, cells in figures.items() if label.startswith(ROWS[0][0]))
    (lost,) = re.findall(r"(\d+ of \d+) did not recover", crash)
    parts.append(
        _write(80, 596, f"medians on two CPU cores with gloo; {lost} jobs of torchrun did not recover", faint, 22)
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" xmlns="http://www.w3.org/2000/svg">'
        f'<rect width="100%" height="100%" fill="{ground}" />{"".join(parts)}</svg>\n'
    )


def _write(x: int, y: int, words: str, colour: str, size: int, *, weight: int = 400) -> str:
    font = f'font-family="DejaVu Sans, sans-serif" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x}" y="{y}" fill="{colour}" {font}>{escape(words)}</text>'


def _read_median(cell: str) -> str:
    found = re.match(r"[\d.]+ (?:s|MB)\b", cell)
    if found is None:
        raise ValueError(f"no median in {cell!r}")
    return found[0]


def compute_digest(svg: str) -> bytes:
    """Return what the file says of the SVG that it was made from."""
    return hashlib.sha256(svg.encode()).hexdigest().encode()


def add_text(png: bytes, name: bytes, text: bytes) -> bytes:
    """Add a text to a PNG, after its header (RFC 2083: a chunk has length, type, content and CRC)."""
    content = b"tEXt" + name + b"\0" + text
    chunk = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    return png[:33] + chunk + png[33:]


def main(file: Path) -> None:
    """Write the picture."""
    svg = draw_card()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "card.html"
        page.write_text(f'<meta charset="utf-8"><body style="margin:0">{svg}</body>')
        words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += [f"--user-data-dir={folder}/browser", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={file}"]
        subprocess.run([*words, page.as_uri()], check=True, capture_output=True, timeout=120)
    file.write_bytes(add_text(file.read_bytes(), b"svg-sha256", compute_digest(svg)))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else DOCS / "static" / "card.png")
