"""The pictures of the pages: those of a terminal are made by `docs/pictures.py`, from jobs that it runs."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"
SAYS = {
    "hang": ["JOB FAILED", "rank 1 did not enter all_reduce #101", "File \"./train.py\""],
    "top": ["RUNNING", "of 500", "1 recovery", "loss is not finite at step 80", "LAST LINE"],
}  # fmt: skip


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    yield __import__("pictures")
    sys.modules.pop("pictures", None)


def read_words(svg):
    words = " ".join(text.text or "" for text in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"))
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


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.torch
def test_the_pictures_are_made_from_jobs(pictures, tmp_path, capsys):
    pictures.main(tmp_path)
    for name, says in SAYS.items():
        words = read_words((tmp_path / f"{name}.svg").read_text())
        assert [each for each in says if each not in words and each != "1 recovery"] == [], capsys.readouterr().out
