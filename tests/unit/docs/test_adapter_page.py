"""The page *Write an adapter* shows the example as it is, and names what there is."""

import inspect
import re

from doc_pages import ROOT

from muster import testing
from muster.schedulers import adapter

EXAMPLE = ROOT / "examples" / "folders"
PAGE = "docs/write-an-adapter.md"
_FENCED = re.compile(r"^(`{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"`(?:[A-Za-z]+\.)?([A-Za-z]*[a-z]_[a-z_]+|[A-Z][a-z]+[A-Z]\w+)[`(]")
"""A name of several words, alone or with arguments: `read_lines(...)`, `AppSpec.driver`, `ByteSource`."""
OF_OTHERS = {"WorkspaceMixin"}  # TorchX's


def test_the_page_shows_the_example():
    page = (ROOT / PAGE).read_text()
    there = {path.name: path.read_text() for path in EXAMPLE.glob("*.py")}
    assert set(re.findall(r"```\{literalinclude\} \.\./examples/folders/(\S+)\n", page)) == set(there)
    lines = sum(text.count("\n") for text in there.values())
    assert lines <= 200
    assert f"four files, {lines} lines together" in " ".join(page.split())


def test_the_example_knows_the_seam_only():
    for path in EXAMPLE.glob("*.py"):
        imported = [line.split()[1] for line in path.read_text().splitlines() if line.startswith(("from ", "import "))]
        ours = {name for name in imported if name.startswith("muster")}
        assert ours <= {"muster.schedulers.adapter"}, path


def list_names():
    """The public names of the seam, and what their classes and functions have: methods, fields, arguments."""
    found = set(adapter.__all__) | {"SchedulerContract"}
    for each in [*(getattr(adapter, name) for name in adapter.__all__), testing.SchedulerContract]:
        if inspect.isclass(each):
            found |= {*dir(each), *getattr(each, "__annotations__", ())}
        for function in [each, *(vars(each).values() if inspect.isclass(each) else ())]:
            if inspect.isfunction(function):
                found |= {*inspect.signature(function).parameters}
    return found


def test_the_page_names_what_there_is():
    named = set(_NAME.findall(_FENCED.sub("", (ROOT / PAGE).read_text())))
    assert len(named) > 5
    assert named - list_names() - OF_OTHERS == set()
