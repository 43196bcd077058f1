"""Each kind of rule of `--on` in jobs of one scheduler; the failures are those of `programs/policies.py`."""

import re
from pathlib import Path

import pytest
from torchx.specs import AppDef

from muster.components.dist import ddp

PROGRAM = Path(__file__).parent / "programs" / "policies.py"
RULES = (
    "LookupError: restart free; exit 33,34: restart free; signal SEGV: restart 2; oom: restart free; network: restart; "
    "data: restart 2; exit 77: elsewhere free; exit 55: restart 1; ValueError: stop"
)
TOLD = (
    (r"\(KeyError: 'x'\)", r"1 \(free\)"),
    ("exited with code 33", r"2 \(free\)"),
    ("exited with code 34", r"3 \(free\)"),
    (r"ended by SIGSEGV.*", r"4 \(free\)"),
    (r"\(MemoryError\)", r"5 \(free\)"),
    (r"\(ConnectionResetError: .*\)", "6 of 7"),
    (r"\(JSONDecodeError: .*\)", r"7 \(free\)"),
    (r"leave_node: its GPU is slow\).* leaves: its scheduler is to start another", "8 of 8"),
    ("exited with code 55", r"9 \(free\)"),
)
"""What the lines about the restarts say, in their order."""
LEADER_LEFT = r"this node leaves the job: rank 0 .* exited with code 77; .* leaves: its scheduler is to start another"
"""Then the leader's node leaves, which is restart 10."""
ENDS = (
    # The leader has left between the two failures of this cause: the next one knows of the first.
    ("all", "exited with code 55; restarted once without progress since (--on 'exit 55: restart 1')"),
    ("stop", "(ValueError: invalid literal for int() with base 10: 'a'); --on 'ValueError: stop'"),
    ("give up", "(muster.worker.give_up: no learning rate works); rank 1 has given up: a restart is not wanted"),
)
each_end = pytest.mark.parametrize(("what", "end"), ENDS, ids=[what for what, _ in ENDS])


def build_policy_app(what: str, workspace: Path, **how) -> AppDef:
    """Two nodes, of which the program is in the folder."""
    workspace.mkdir(exist_ok=True)
    (workspace / "policies.py").write_text(PROGRAM.read_text())
    return ddp(what, script="policies.py", name="job", j="2x1", start="cold", on=RULES, max_retries=2, **how)


def check_policies(what: str, end: str, log: str) -> None:
    """What the nodes have written tells of each verdict, and of the end."""
    restarts = [line for line in log.splitlines() if re.search(r"\[muster\] rank .*; restart \d+ ", line)]
    wanted = TOLD if what == "all" else ()
    assert len(restarts) == len(wanted), log
    for line, (cause, restart) in zip(sorted(restarts, key=_find_number), wanted, strict=True):
        assert re.search(f"{cause}; restart {restart}", line), line
    assert (what == "all") == bool(re.search(LEADER_LEFT, log)), log
    assert end in " ".join(re.sub(r"(?m)^.*?\] ?", "", log).split()), log


def _find_number(line: str) -> int:
    return int(re.search(r"; restart (\d+) ", line)[1])
