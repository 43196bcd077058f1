"""The pictures of the pages: `docs/pictures.py` makes those of a terminal, `docs/drawings.py` draws the others."""

import re
import struct
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"
SVG = "{http://www.w3.org/2000/svg}"
SAYS = {
    "hang": ["JOB FAILED", "rank 1 did not enter all_reduce #101", "File \"./train.py\""],
    "top": ["RUNNING", "of 500", "1 recovery", "loss is not finite at step 80", "LAST LINE"],
}  # fmt: skip


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    yield __import__("pictures")
    sys.modules.pop("pictures", None)


@pytest.fixture
def drawings(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    yield __import__("drawings")
    sys.modules.pop("drawings", None)


def read_words(svg):
    words = " ".join(text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text"))
    return re.sub(r"\s+", " ", words)


def test_colours_follow_the_readers_page(pictures):
    svg = pictures.draw(["\x1b[31mJOB <b> & co\x1b[0m plain"], "a title")
    assert read_words(svg).startswith("JOB <b> & co plain")
    before, _, dark = svg.partition("@media (prefers-color-scheme: dark)")
    light_fill, dark_fill = (re.search(r"\.muster-r1 \{ fill: (#\w{6})", part)[1] for part in (before, dark))
    assert light_fill != dark_fill
    assert "<title>a title</title>" in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("name", SAYS)
def test_a_picture_says_what_its_page_says_and_names_no_place_of_a_machine(name):
    svg = (DOCS / f"static/{name}.svg").read_text()
    words = read_words(svg)
    assert [each for each in SAYS[name] if each not in words] == []
    assert not re.search(r"/(root|work|tmp|home)/", words)


@pytest.mark.parametrize("name", SAYS)
def test_no_line_of_a_terminal_is_cut_at_the_edge(name):
    svg = (DOCS / f"static/{name}.svg").read_text()
    left, top, _, height = (float(number) for number in re.search(r'viewBox="([^"]*)"', svg)[1].split())
    baselines = [float(y) for y in re.findall(r'<text [^>]*\by="([\d.]+)"', svg)]
    assert left < 0
    assert max(baselines) + 12 < top + height


def test_the_drawings_are_those_of_the_script_and_each_is_on_a_page(drawings):
    pages = "".join(path.read_text() for path in DOCS.glob("*.md"))
    for name, svg in drawings.draw_all().items():
        assert (DOCS / "static" / name).read_text() == svg, "run `python docs/drawings.py`"
        assert f"](static/{name})" in pages


def test_drawings_have_text_alternatives_and_colours_for_both_pages(drawings):
    for name, svg in drawings.draw_all().items():
        root = ET.fromstring(svg)
        title, description = (root.find(f"{SVG}{part}").text for part in ("title", "desc"))
        assert title, name
        assert len(description) > 80, name
        before, _, dark = svg.partition("@media (prefers-color-scheme: dark)")
        assert re.search(r"\.ink \{ fill: (#\w{6})", before)[1] != re.search(r"\.ink \{ fill: (#\w{6})", dark)[1]
        width, height = (float(number) for number in root.get("viewBox").split()[2:])
        for text in root.iter(f"{SVG}text"):
            length = len(text.text) * drawings.CHARACTER
            begin = float(text.get("x")) - {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")] * length
            assert -4 < begin < begin + length < width + 4, f"{name}: {text.text}"
            assert float(text.get("y")) < height, f"{name}: {text.text}"


def test_plots_show_what_the_page_of_figures_says(drawings):
    text = """
| | muster | torchrun |
|---|---|---|
| a worker crashes, until the next all-reduce | 0.05 s (0.04..0.06, 9) | 2 s (1..4, 2); the other 7 did not |
"""
    svg = drawings.draw_plot("t", [("a worker crashes", "a crash")], drawings.read_figures(text))
    said = ET.fromstring(svg).find(f"{SVG}desc").text
    figures = [re.findall(r"\d[\d.]*", line) for line in re.split("muster|torchrun", said)[1:]]
    assert figures == [["0.05", "0.04", "0.06", "9"], ["2", "1", "4", "2", "7"]]
    (ours, theirs) = (float(circle.get("cx")) for circle in ET.fromstring(svg).iter(f"{SVG}circle"))
    assert ours < theirs
    with pytest.raises(ValueError, match="not enough values"):
        drawings.draw_plot("t", [("a row that is gone", "x")], drawings.read_figures(text))


def test_the_card_shows_the_figures_of_today(drawings, monkeypatch):
    assert drawings  # the card imports it
    card = __import__("card")
    monkeypatch.delitem(sys.modules, "card")
    svg = card.draw_card()
    words = read_words(svg)
    figures = drawings.read_figures((DOCS / "comparison.md").read_text())
    for begin, name in card.ROWS:
        (cells,) = (cells for label, cells in figures.items() if label.startswith(begin))
        assert f"{name} {' '.join(cell.split(' (')[0] for cell in cells)}" in words
    (lost,) = re.findall(r"7 of 10 did not recover", (DOCS / "comparison.md").read_text())
    assert lost.replace(" did", " jobs of torchrun did") in words
    png = (DOCS / "static/card.png").read_bytes()
    assert struct.unpack(">II", png[16:24]) == (card.WIDTH, card.HEIGHT)
    assert b"svg-sha256\0" + card.compute_digest(svg) in png, "run `python docs/card.py`"


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.torch
def test_the_pictures_are_made_from_jobs(pictures, tmp_path, capsys):
    pictures.main(tmp_path)
    for name, says in SAYS.items():
        words = read_words((tmp_path / f"{name}.svg").read_text())
        assert [each for each in says if each not in words and each != "1 recovery"] == [], capsys.readouterr().out
