"""Docstrings of functions are sentences in the imperative: what a function returns, it says by "Return".

Properties say what they are.
"""

import ast
from pathlib import Path

import muster

PACKAGE = Path(muster.__file__).parent
FOLDERS = ("muster", "docs", "benchmarks", "examples")
NO_VERBS = """
    A After All An Another As At Because Before By Each Every False For From Guard's How Idempotent If Ids In It Its
    Keys Like Lines Names No None Not Nothing Of On One Only Our Seconds Since So Something That The These This Those
    To Torch's TorchX's True Two Unless Until What Whatever When Where Whether Which While Who Whose Why With Without
"""
THIRD_PERSON = "Adds Checks Creates Gets Packs Pushes Raises Reads Refuses Returns Runs Starts Writes"
"""How no docstring of a function begins."""


def list_docstrings() -> list[tuple[str, str]]:
    """The place and the docstring of every function that has one, but for properties."""
    found = []
    for path in sorted(path for folder in FOLDERS for path in (PACKAGE.parent / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                names = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
                if not names & {"property", "cached_property", "setter"}:
                    found.append((f"{path.relative_to(PACKAGE.parent)}:{node.lineno} {node.name}", text))
    return found


def test_docstrings_of_functions_are_sentences_in_the_imperative() -> None:
    found = list_docstrings()
    assert len(found) > 3000
    words = {*NO_VERBS.split(), *THIRD_PERSON.split()}
    fragments = [
        f"{place}: {text.splitlines()[0]}"
        for place, text in found
        if (word := text.split(maxsplit=1)[0].rstrip(",.:;")) in words or word.startswith(("`", "("))
    ]
    assert fragments == []
    assert [place for place, text in found if text.split("\n\n")[0].rstrip()[-1] not in ".:"] == []
    assert [place for place, text in found if " ` `" in text] == [], "an escape sequence was written out"
