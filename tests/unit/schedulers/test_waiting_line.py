"""What a person who waits for an app is told while it waits, and how often."""

from dataclasses import dataclass, field

import pytest
from torchx.schedulers.api import DescribeAppResponse
from torchx.specs import AppState

from muster.schedulers.adapter.waiting_line import WaitingLine

pytestmark = pytest.mark.torchx

CPU = "2 of 2 pods wait: Insufficient cpu (2 of 2 nodes)"


@dataclass
class World:
    """A line, and what it has said."""

    now_s: float = 0.0
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.line = WaitingLine(lambda app_id, line: self.said.append(f"{app_id} {line}"), clock=lambda: self.now_s)

    def wait(self, seconds: int, state: AppState = AppState.PENDING, msg: str = CPU, app_id: str = "app") -> list[str]:
        """Ask once a second. Returns what was said."""
        before = len(self.said)
        for _ in range(seconds):
            self.line.update(DescribeAppResponse(app_id=app_id, state=state, msg=msg))
            self.now_s += 1
        return self.said[before:]


def test_it_is_said_once_it_waits_for_some_seconds_and_then_when_it_changes() -> None:
    world = World()
    assert world.wait(5) == []
    assert world.wait(60) == [f"app PENDING: {CPU}"]
    assert world.wait(60, msg="1 of 2 pods waits: ErrImagePull") == ["app PENDING: 1 of 2 pods waits: ErrImagePull"]
    assert world.wait(60, AppState.RUNNING, "2 of 2 nodes run") == ["app RUNNING: 2 of 2 nodes run"]
    assert world.wait(5) == []
    assert world.wait(60) == [f"app PENDING: {CPU}"], "it waits again"


def test_a_job_that_starts_soon_or_ends_is_not_told() -> None:
    world = World()
    world.wait(4)
    world.wait(60, AppState.RUNNING, "2 of 2 nodes run")
    world.wait(3)
    world.wait(3, AppState.SUCCEEDED, "")
    assert world.said == []
    world.wait(9)
    assert world.wait(3, AppState.FAILED, "no such image") == [], "TorchX prints how it has ended"


def test_a_reason_that_changes_each_second_is_told_now_and_then() -> None:
    world = World()
    for second in range(60):
        world.wait(1, msg=f"{second} pods ahead")
    assert len(world.said) == 11


def test_each_app_has_its_own_line() -> None:
    world = World()
    world.wait(6)
    assert world.wait(6, app_id="other") == [f"other PENDING: {CPU}"]
