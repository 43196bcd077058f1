"""Docstrings of functions are sentences in the imperative, of what users see without exception.

A docstring that says what a function returns begins with "Return". Properties say what they are.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import muster

PACKAGE = Path(muster.__file__).parent
PUBLIC = (
    "components", "elastic", "launch", "run.py", "worker.py", "snapshots/__init__.py", "testing", "schedulers/adapter",
    "cli/operations.py",
)  # fmt: skip
NO_VERBS = """
    A After All An Another As At Because Before By Each Every For From Guard's How Idempotent If Ids In It Its Keys
    Like Lines Names No None Not Nothing Of On One Only Our Seconds Since So Something That The These This Those To
    Torch's TorchX's Two Unless Until What Whatever When Where Whether Which While Who Whose Why With Without
"""
EVERYWHERE = frozenset(("Whether", "Returns", "Raises"))
"""How no docstring of a function begins, wherever it is."""
THIRD_PERSON = ("Adds", "Checks", "Creates", "Gets", "Packs", "Pushes", "Reads", "Refuses", "Runs", "Starts", "Writes")


def read_functions(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the docstring of each function of a module that has one, but for properties."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        names = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
        if text and not names & {"property", "cached_property", "setter"}:
            yield f"{path.relative_to(PACKAGE.parent)}:{node.lineno} {node.name}", text


def list_modules(name: str) -> list[Path]:
    path = PACKAGE / name
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def get_first_word(text: str) -> str:
    return text.split(maxsplit=1)[0].rstrip(",.:;")


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_that_users_see_are_in_the_imperative(name: str) -> None:
    found = [each for path in list_modules(name) for each in read_functions(path)]
    assert found
    words = NO_VERBS.split()
    fragments = [
        f"{place}: {text.splitlines()[0]}"
        for place, text in found
        if (word := get_first_word(text)) in words or word.startswith("`") or word in THIRD_PERSON
    ]
    assert fragments == []
    ends = {place: text.split("\n\n")[0].rstrip()[-1] for place, text in found}
    assert [place for place, end in ends.items() if end not in ".:"] == []


def test_no_docstring_of_a_function_begins_as_that_of_a_thing() -> None:
    found = [each for path in sorted(PACKAGE.rglob("*.py")) for each in read_functions(path)]
    assert len(found) > 3000
    assert [f"{place}: {text.splitlines()[0]}" for place, text in found if get_first_word(text) in EVERYWHERE] == []
