"""The figures of the pages are those of `benchmarks/figures.json`; `benchmarks/figures.py` finds what became worse."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
VALUE = re.compile(r"([\d.]+)(?: [^\d\s(|][^\d(|]*?)? \(([\d.]+)\.\.([\d.]+), (\d+)")
"""Median, unit, range and number of samples."""


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks/figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured():
    """Return median, least, most and count of all series."""
    found = json.loads((ROOT / "benchmarks/figures.json").read_text())["figures"].values()
    series = [each for figure in found for each in figure["series"].values() if each["count"]]
    return [(each["median"], each["least"], each["most"], each["count"]) for each in series]


def is_rounded(text, number):
    decimals = len(text.partition(".")[2])
    return abs(float(text) - number) <= 0.5001 * 10**-decimals


def list_table_rows(page):
    """Return the rows, without those of the other machine."""
    text = (ROOT / page).read_text().partition("### On one GPU")[0]
    return [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize(("page", "least"), [("benchmarks/README.md", 100), ("docs/comparison.md", 25)])
def test_each_figure_of_a_table_was_measured(page, least, measured):
    stated = [(line, found) for line in list_table_rows(page) for found in VALUE.findall(line)]
    unknown = [line for line, found in stated if not any(all(map(is_rounded, found, series)) for series in measured)]
    assert unknown == []
    assert len(stated) >= least, "the pattern finds the figures"


def test_each_figure_of_the_readme_is_a_median(measured):
    stated = re.findall(r"([\d.]+) (?:s|MB)\b", "\n".join(list_table_rows("README.md")))
    assert [text for text in stated if not any(is_rounded(text, series[0]) for series in measured)] == []
    assert len(stated) >= 8


def make_rows(**titles):
    """Each title with the values of muster and, if there are two lists, of torchrun."""
    for title, values in titles.items():
        series = {
            name: {"values": each, "failed": 0} for name, each in zip(("muster", "torchrun"), values, strict=False)
        }
        yield json.dumps({"figure": title, "unit": "s", "load": [0.1, 0.2], "series": series})


def test_what_is_worse_by_more_than_a_tenth_or_missing_is_named(figures):
    before = {"same": [[1, 2, 3]], "slow": [[2, 2]], "peer": [[1], [2]], "gone": [[1]], "failed": [[]], "none": [[0]]}
    after = {"same": [[2.1]], "slow": [[2.3]], "peer": [[2], [4]], "failed": [[]], "none": [[1]], "more": [[9]]}
    before["less"] = after["less"] = [[-1]]
    old, new = (figures.read_rows("a.py", make_rows(**values)) for values in (before, after))
    named = ["slow: 2 before, 2.3 now", "gone: missing", "none: 0 before, 1 now"]
    assert figures.list_worse(old, new) == [f"a.py: {each}" for each in named]
    assert figures.list_worse(old, old) == []


def test_each_command_is_a_benchmark_and_what_it_shows_is_collected(figures, tmp_path, monkeypatch):
    folder = ROOT / "benchmarks"
    assert [each for each in figures.COMMANDS if not (folder / each.split()[0]).exists()] == []
    (tmp_path / "start.py").write_text(
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        "from _sampling import Samples, show\n"
        "show('first line', {'muster': Samples(values=[3.0, 1.0, 2.0], failures=1)})\n"
    )
    (tmp_path / "warm.py").write_text("raise SystemExit(1)")
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.setattr(figures, "COMMANDS", ["start.py --count 5", "warm.py cpu --count 3", "heal.py"])
    assert figures.run(tmp_path / "found.json", ["start", "warm"]) == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["failed"], found["python"]) == (["warm.py cpu --count 3"], sys.version.split()[0])
    [(name, figure)] = found["figures"].items()
    assert (name, figure["unit"]) == ("start.py: first line", "s")
    assert figure["series"]["muster"] == {"median": 2.0, "least": 1.0, "most": 3.0, "count": 3, "failed": 1}
