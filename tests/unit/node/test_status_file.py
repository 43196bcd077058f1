"""What `torchx status` is told of a running job, and how often."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doubles.samples import make_round

from muster._shared.contract import StatusPageLayout as Layout
from muster.agent.telemetry import Pause, StatusFile
from muster.agent.workers.status_page import StatusPage
from muster.schedulers.failure_report import describe_progress


class Node:
    """Node 0 with two ranks, its clock, and what it has written."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "status.json"
        self.at_s = 100.0
        self.writes = 0
        self.round = make_round(1)
        self.page = StatusPage(nproc=2, round_number=1, attempt=0)
        self.file = StatusFile(str(folder), self, self.write)

    def now_s(self) -> float:
        return self.at_s

    def boottime_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return 1_800_000_000.0 + self.at_s

    def write(self, call: Callable[[], None]) -> None:
        self.writes += 1
        call()

    def set_word(self, rank: int, word: int, value: int) -> None:
        self.page._words[(rank + 1) * Layout.WORDS + word] = value

    def step(self, *steps: int) -> None:
        """Each rank has done its step."""
        for rank, step in enumerate(steps):
            self.set_word(rank, Layout.STEP, step + 1)
            self.set_word(rank, Layout.TOTAL, 1000)

    def look(self, after_s: float = 0.0, pause: Pause | None = None) -> str:
        """What is read of it some seconds later."""
        self.at_s += after_s
        self.file.update(self.round, self.page, 2, pause)
        return describe_progress(self.path.read_bytes()) if self.path.exists() else ""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.page.close()


def test_the_rank_that_has_done_the_fewest_steps_counts(node: Node) -> None:
    assert node.look() == ""
    node.step(12, 10)
    assert node.look(5.0) == "step 10 of 1000"
    node.step(52, 50)
    assert node.look(5.0) == "step 50 of 1000, 8.0 a second"
    assert json.loads(node.path.read_text())["time_s"] == 1_800_000_110.0


def test_it_is_written_every_few_seconds_while_something_changes(node: Node) -> None:
    for step in range(30):
        node.step(step, step)
        node.look(1.0)
    assert node.writes == 6
    for _ in range(30):
        node.look(1.0)
    assert node.writes == 8, "the last step, and then that it does none any more"
    assert node.look() == "step 29 of 1000"


def test_a_pause_is_written_at_once_and_so_is_its_end(node: Node) -> None:
    node.step(214, 214)
    node.look(5.0)
    assert node.look(0.1, Pause(step=214, since_s=node.wall_s())).startswith("paused at step 214 since ")
    assert node.look(0.1) == "step 214 of 1000"


def test_of_a_script_that_reports_nothing_its_optimizer_counts(node: Node) -> None:
    node.set_word(0, Layout.OPTIMIZER_STEPS, 8)
    assert node.look(5.0) == "step 8 (by optimizer)"


def test_a_new_round_has_no_speed_yet(node: Node) -> None:
    node.step(10, 10)
    node.look(5.0)
    node.round = make_round(number=2)
    node.step(20, 20)
    assert node.look(5.0) == "step 20 of 1000"


def test_a_page_that_lies_breaks_nothing(node: Node) -> None:
    node.step(10, 10)
    node.set_word(0, Layout.STEP, -5)
    node.set_word(1, Layout.TOTAL, 2**62)
    node.set_word(1, Layout.VALUES, 2**62)
    assert node.look(5.0) == "step 10"


def test_a_folder_that_is_gone_breaks_nothing(node: Node, tmp_path: Path) -> None:
    node.file = StatusFile(str(tmp_path / "gone"), node, node.write)
    node.step(10, 10)
    assert node.look(5.0) == ""
