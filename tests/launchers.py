"""The two launchers the conformance suite compares: torchrun and ours; how ours starts its workers in all tests.

MUSTER_TEST_START=cold or =warm has every test that starts an agent start its workers that way, where it can.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness import PROGRAMS, Outcome, Tree, run_tree

TORCHRUN, MUSTER = "torchrun", "muster"
ONE_START = os.environ.get("MUSTER_TEST_START", "")
STARTS = (ONE_START,) if ONE_START else ("cold", "warm")
"""What tests of both ways run."""
MOSTLY_WARM = tuple(pytest.param(start, marks=[pytest.mark.long] * (start == "cold")) for start in STARTS)
"""The same where the two differ little: the cold ones in the soak."""
SCALED = {"MUSTER_TIME_SCALE": "0.4"}
"""For tests of losses, joins and hangs: a silent node is lost after 2 s instead of 5 s, and all limits of
`muster.agent.runtime.limits` shrink alike. There is room for an agent that gets no CPU time for a second."""
START_FLAGS = ("--start", ONE_START) if ONE_START else ()
"""What tests that leave the way to the agent add to its flags, and to a component's."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """One of the two."""

    name: str
    command: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_muster(self) -> bool:
        return self.name == MUSTER

    def start(self, flags: Sequence[str], program: Sequence[str], **env: str) -> Tree:
        """Start an agent. A program whose first word ends in .py is one of tests/programs."""
        script = str(PROGRAMS / program[0]) if program[0].endswith(".py") else program[0]
        words = [*self.command, *self._choose_start(flags, env), *flags, script, *program[1:]]
        return Tree(words, env={**self.env, **env}, cwd=self.cwd, settle_s=10 if self.is_muster else 2)

    def _choose_start(self, flags: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
        """Nothing for programs that are not run by the agent's Python: to be told to fork them is a usage error."""
        is_command = "PYTHON_EXEC" in env or any(flag.replace("_", "-") == "--no-python" for flag in flags)
        return START_FLAGS if self.is_muster and not (is_command and ONE_START == "warm") else ()

    def run(self, flags: Sequence[str], program: Sequence[str], *, timeout_s: float = 60, **env: str) -> Outcome:
        """Run one to its end."""
        with self.start(flags, program, **env) as tree:
            return tree.wait(timeout_s)


def make_launcher(name: str, cwd: Path) -> Launcher:
    """One of the two in a folder of its own, with a small environment that is the same for both."""
    if name == TORCHRUN:
        if importlib.util.find_spec("torch") is None:
            pytest.skip("torchrun is not installed here")
        command: tuple[str, ...] = (str(Path(sys.executable).with_name("torchrun")),)
    else:
        command = (sys.executable, "-m", "muster.agent")
    kept = ("PATH", "HOME", "LANG", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    env = {key: os.environ[key] for key in kept if key in os.environ}
    env |= SCALED if name == MUSTER else {}
    return Launcher(name=name, command=command, cwd=cwd, env=env | {"TMPDIR": str(cwd)})


def run_api(program: str, *words: str, folder: Path, timeout_s: float = 150, **more: Any) -> Outcome:
    """Run one of programs/elastic to its end, which must be clean; its job's files go to `folder`."""
    command = [sys.executable, *more.pop("flags", ()), str(PROGRAMS / "elastic" / program), *words]
    env = {**os.environ, "TMPDIR": str(folder), **more.pop("env", {})}
    return run_tree(command, env=env, cwd=more.pop("cwd", folder), timeout_s=timeout_s, **more).check()


def read_facts(text: str) -> list[dict[str, Any]]:
    """What conf_facts.py printed, in order of global rank."""
    found = [json.loads(line[line.index("{") :]) for line in text.splitlines() if '{"argv"' in line]
    return sorted(found, key=lambda facts: int(facts["env"]["RANK"]))


CALLS_SAY = [
    "{0: ('Pair', 30, 0), 1: ('Pair', 30, 1)} 0",
    "{0: (3, '__main__'), 1: (3, '__main__')}",
    "{0: None, 1: 'stayed'}",
    "{0: 1, 1: 1} 1",
    *(f"{method} [0, 1] from rank 0 {{0: None, 1: None}} 20 2" for method in ("spawn", "forkserver")),
    "ValueError the text True",
    "[(1, 1)]",
    "running (0, 1) 2 0",
    "the job still runs after 0.1 s",
    "the job was stopped; the agent was ended by SIGTERM ()",
    "failed",
]
"""What `programs/elastic/calls.py` prints of its calls, without the lines about idle workers."""
