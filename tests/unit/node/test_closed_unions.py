"""Type checking fails when an event, an action or a phase has no handler: each case that is taken out is missed."""

import ast
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import muster

PACKAGE = Path(muster.__file__).parent
FILES = ("decisions", "worker_decisions", "round_workers", "state", "supervisor")


def is_closed(match: ast.Match) -> bool:
    """Its last case is `case _: assert_never(...)`."""
    return "assert_never(" in ast.unparse(match.cases[-1])


def list_incomplete_copies(source: str) -> Iterator[str]:
    """Copies of a module, each without one case of one closed match."""
    lines = source.splitlines(keepends=True)
    for match in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Match) and is_closed(node)):
        ends = [match.subject.lineno, *((case.body[-1].end_lineno or 0) for case in match.cases)]
        for first, last in list(itertools.pairwise(ends))[:-1]:
            yield "".join([*lines[:first], *lines[last:]])


def test_every_case_of_every_closed_union_is_needed(tmp_path: Path) -> None:
    copies: list[str] = []
    for name in FILES:
        source = (PACKAGE / "agent" / "node" / f"{name}.py").read_text()
        (tmp_path / f"whole_{name}.py").write_text(source)
        for index, incomplete in enumerate(list_incomplete_copies(source)):
            copies.append(f"without_{index}_of_{name}")
            (tmp_path / f"{copies[-1]}.py").write_text(incomplete)
    assert len(copies) > 40
    root = PACKAGE.parent
    options = ["--config-file", str(root / "pyproject.toml"), "--cache-dir", str(root / ".mypy_cache")]
    command = [sys.executable, "-m", "mypy", *options, "--follow-imports", "silent", "--hide-error-context", "."]
    env = {**os.environ, "MYPYPATH": str(root)}
    checked = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    missed = {line.partition(".py:")[0] for line in checked.stdout.splitlines() if '"assert_never"' in line}
    assert missed == set(copies), checked.stdout + checked.stderr
