"""A spare's start takes time, and rounds may end meanwhile."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from muster.agent.features.in_place import node, spares
from muster.agent.workers.spec import Program, ProgramKind


class Starts:
    """The context of an agent with one spare. It starts what it is asked to when a test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Callable[[int], None]]] = []
        self.ends: dict[int, Callable[[], None]] = {}
        self.lines: list[str] = []
        program = Program(kind=ProgramKind.SCRIPT, target="train.py")
        self.config = SimpleNamespace(features={"in_place": 1}, program=program)
        self.logs = SimpleNamespace(print_line=self.lines.append)
        self.workers = SimpleNamespace(formed=None, live=[])

    def start_process(self, spec: Any, on_started: Callable[[int], None], _on_failed: object) -> None:
        self.asked.append((spec, on_started))

    def keep_process(self, pid: int, on_end: Callable[[], None]) -> None:
        self.ends[pid] = on_end


def test_a_spare_that_starts_over_the_end_of_a_round_has_its_own_streams(monkeypatch) -> None:
    """They were closed, so the worker got other files, the agent closed those, and then it died."""
    monkeypatch.setattr(spares, "build_common_env", lambda _config: {})
    monkeypatch.setattr(spares, "connect", lambda _pid: None)
    starts = Starts()
    part = node.create_part(starts)
    assert part._spares is not None
    for pid in range(1, 4):  # so many are tried
        part._spares.fill()
        spec, on_started = starts.asked.pop()
        part.begin_round(SimpleNamespace(continued_step=3), SimpleNamespace())
        with open(os.dup(spec.stderr_fd), "w", encoding="utf-8") as stream:
            assert os.readlink(f"/proc/self/fd/{spec.stdout_fd}").startswith("/memfd:stdout")
            stream.write("no module named torch\n")
        on_started(pid)
        starts.ends[pid]()
    assert ["no module named torch" in line for line in starts.lines] == [True]
    part.close()
