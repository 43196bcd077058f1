"""Type checking fails when an event, an action, a phase or another member of a closed union has no handler."""

import ast
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import muster

AGENT = Path(muster.__file__).parent / "agent"
FILES = (
    "node/decisions",
    "node/drain_decisions",
    "node/request_decisions",
    "node/round_workers",
    "node/state",
    "node/supervisor",
    "rendezvous/torch_handlers/rendezvous",
    "rendezvous/torch_handlers/thread",
    "rendezvous/consensus/decisions",
    "rendezvous/consensus/formation",
    "rendezvous/consensus/waits",
    "rendezvous/leader/leader",
    "rendezvous/member/member",
    "rendezvous/member/seeking",
    "rendezvous/local_leader",
    "rendezvous/consensus/drain",
    "../schedulers/supervision/decisions",
)
TAKEN_OUT = {
    "node/request_decisions": "PersonChose",
    "node/round_workers": "KillWorkers",
    "node/supervisor": "ReportStopped",
    "rendezvous/leader/leader": "DropMembers",
    "rendezvous/member/member": "TakeLink",
    "rendezvous/member/seeking": "QuorumLost",
}
"""By module, a case that one more copy lacks."""
ROWS_TAKEN_OUT = {
    "node/decisions": "GlobalRank0Started",
    "rendezvous/consensus/decisions": "ProcessEnded",
    "rendezvous/member/decisions": "QuorumLost",
    "../schedulers/supervision/decisions": "KillRequested",
}
"""By module with a table, an event whose row one more copy lacks."""


def name_copy(path: str) -> str:
    return path.removeprefix("../").replace("/", "_")


def find_cases(source: str) -> Iterator[list[tuple[int, int]]]:
    """Of every match that ends with `case _: assert_never(...)`, the lines of its other cases."""
    for match in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Match)):
        if "assert_never(" in ast.unparse(match.cases[-1]):
            ends = [match.subject.lineno, *((case.body[-1].end_lineno or 0) for case in match.cases)]
            yield list(itertools.pairwise(ends))[:-1]


def without(source: str, cases: list[tuple[int, int]]) -> str:
    """The source without these lines."""
    out = {line for first, last in cases for line in range(first, last)}
    return "".join(text for line, text in enumerate(source.splitlines(keepends=True)) if line not in out)


def test_every_member_of_every_closed_union_needs_a_handler(tmp_path: Path) -> None:
    """Of each module a copy without any case of its matches, and of some a copy without one case or one row."""
    expected: dict[str, int] = {}
    for path in FILES:
        name = name_copy(path)
        source = (AGENT / f"{path}.py").read_text()
        matches = list(find_cases(source))
        cases = [case for match in matches for case in match]
        assert cases
        (tmp_path / f"{name}_without_cases.py").write_text(without(source, cases))
        expected[f"{name}_without_cases"] = len(matches)
        if path in TAKEN_OUT:
            pattern = f"{TAKEN_OUT[path]}("
            [one] = [case for case in cases if pattern in source.splitlines()[case[0]]]
            (tmp_path / f"{name}_without_one.py").write_text(without(source, [one]))
            expected[f"{name}_without_one"] = 1
    for path, event in ROWS_TAKEN_OUT.items():
        source, rows = re.subn(rf"\n +\+ \w+\((do\.)?{event},.*", "", (AGENT / f"{path}.py").read_text())
        assert rows == 1
        (tmp_path / f"{name_copy(path)}_without_row.py").write_text(source)
    root = AGENT.parents[1]
    options = ["--config-file", str(root / "pyproject.toml"), "--cache-dir", str(root / ".mypy_cache")]
    command = [sys.executable, "-m", "mypy", *options, "--follow-imports", "silent", "--hide-error-context", "."]
    env = {**os.environ, "MYPYPATH": str(root)}
    checked = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    missed = [line for line in checked.stdout.splitlines() if '"assert_never"' in line]
    found = [line.partition(".py:")[0] for line in missed]
    assert {name: found.count(name) for name in found} == expected, checked.stdout + checked.stderr
    refused = [
        line.partition("_without_row.py:")[0] for line in checked.stdout.splitlines() if "[return-value]" in line
    ]
    assert sorted(refused) == sorted(map(name_copy, ROWS_TAKEN_OUT)), checked.stdout
    for path, case in TAKEN_OUT.items():
        name = name_copy(path)
        assert [case in line for line in missed if line.startswith(f"{name}_without_one")] == [True]
