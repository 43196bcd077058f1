"""Outside the folders of adapters no code decides by a scheduler's name: what is peculiar to one is a property."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import muster
from muster_entry import OF_TORCHX, SCHEDULERS

PACKAGE = Path(muster.__file__).parent
FOLDERS = {target.partition(":")[0].split(".")[2] for target in SCHEDULERS.values()}
TESTS = ("startswith", "endswith", "removeprefix", "removesuffix", "partition", "split")
OTHER_WORDS = {("agent", "held")}
"""Room and literal: the agent's word for a template that has no program yet."""
KNOW_AN_ADAPTER = {
    "cli/history/log_folder.py": ("slurm",),  # agents that were started by hand in a job of Slurm's
    "cli/doctor/services.py": ("docker", "kubernetes", "slurm"),  # it looks at the services themselves
    "cli/hold_command.py": ("held", "local"),
    "cli/overview.py": ("held",),  # what a hold runs
    "cli/rehearse/trial.py": ("local",),  # a rehearsal is on this machine
    "elastic/jobs/held.py": ("held",),
}
"""Modules that may import from the folder of an adapter."""


def list_modules() -> Iterator[tuple[str, ast.AST]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE).as_posix()
        if path.split("/")[:2] not in [["schedulers", folder] for folder in FOLDERS]:
            yield path, ast.parse(file.read_text(), path)


def find_decisions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Find literals that are a name or the beginning of a handle, or by which a text is compared with one.

    Docstrings and texts in which a name is an example are for people.
    """
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TESTS:
            for each in node.args:
                text = each.value if isinstance(each, ast.Constant) else None
                if isinstance(text, str) and text.strip(":/") and any(name.startswith(text) for name in SCHEDULERS):
                    yield node.lineno, text
        text = node.value if isinstance(node, ast.Constant) and id(node) not in docstrings else None
        if isinstance(text, str) and text.rstrip(":/") in SCHEDULERS:
            yield node.lineno, text


def test_no_code_outside_adapters_decides_by_a_schedulers_name() -> None:
    found = [
        f"muster/{path}:{line}: {text!r}"
        for path, tree in list_modules()
        for line, text in find_decisions(tree)
        if (path.partition("/")[0], text) not in OTHER_WORDS
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "scheduler.backend == 'kubernetes'",
        "{'local_docker': 'container'}",
        "KNOWN = ('a', 'slurm')",
        "name.startswith('local')",
        "handle.startswith('held:')",
        "f'held://{run}'",
    ],
)
def test_a_decision_is_seen(code: str) -> None:
    assert list(find_decisions(ast.parse(code)))


def test_every_scheduler_has_an_entry_point() -> None:
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    assert re.findall(r'^(\w+) = "muster_entry:\1"$', text, re.MULTILINE) == [*SCHEDULERS, *OF_TORCHX]


def test_few_modules_know_an_adapters_folder() -> None:
    found = {
        (path, folder)
        for path, tree in list_modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for folder in FOLDERS
        for module in [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        if f"{module}.".startswith(f"muster.schedulers.{folder}.")
    }
    assert found == {(path, folder) for path, folders in KNOW_AN_ADAPTER.items() for folder in folders}
