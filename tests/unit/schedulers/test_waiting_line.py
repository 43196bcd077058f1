"""What a person who waits for an app is told while it waits, and how often."""

from dataclasses import dataclass, field

from torchx.specs import AppDef, AppState, Role
from torchx.specs.api import ReplicaStatus

from muster._shared.records import replace
from muster.schedulers.adapter.status import build_status
from muster.schedulers.adapter.waiting_line import WaitingLine
from muster.schedulers.wording.facts import AppFacts
from muster.schedulers.wording.reasons import Code, Reason

FULL = Reason(code=Code.UNSCHEDULABLE, lacks=("Insufficient cpu",), counts=(2,), total=2)
CPU = Reason(code=Code.PODS_WAIT, count=2, total=2, causes=(FULL,))
IMAGE = Reason(code=Code.IMAGE_NOT_PULLED, image="img")
QUOTA = Reason(code=Code.QUOTA_EXCEEDED, word="FailedCreate", text="exceeded quota", what="FailedCreate")
WAITS = "app PENDING: 2 of 2 pods wait: Insufficient cpu (2 of 2 nodes)"


@dataclass
class World:
    """A line, and what it has said."""

    now_s: float = 0.0
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.line = WaitingLine(lambda app_id, line: self.said.append(f"{app_id} {line}"), clock=lambda: self.now_s)

    def wait(
        self,
        seconds: int,
        state: AppState = AppState.PENDING,
        reason: Reason | None = CPU,
        app_id: str = "app",
        replicas: str = "",
    ) -> list[str]:
        """Ask once a second. Returns what was said. `replicas`: R for each that runs, P for each that waits."""
        before = len(self.said)
        states = [AppState.RUNNING if each == "R" else AppState.PENDING for each in replicas]
        nodes = [ReplicaStatus(id=index, state=each, role="w", hostname="") for index, each in enumerate(states)]
        app = AppDef(name="", roles=[Role(name="w", image="")])
        for second in range(seconds):
            told = () if reason is None else (replace(reason, age_s=float(second)),)
            self.line.update(build_status(AppFacts(app_id=app_id, app=app, state=state, replicas=nodes, reasons=told)))
            self.now_s += 1
        return self.said[before:]


def test_it_is_said_once_it_waits_for_some_seconds_and_then_when_it_changes() -> None:
    world = World()
    assert world.wait(5) == []
    assert world.wait(60) == [WAITS]
    [said] = world.wait(60, reason=IMAGE)
    assert said.startswith("app PENDING: ")
    assert world.wait(60, AppState.RUNNING, None, replicas="RR") == ["app RUNNING: 2 of 2 nodes run"]
    assert world.wait(5) == []
    assert world.wait(60) == [WAITS], "it waits again"


def test_a_job_that_starts_soon_or_ends_is_not_told() -> None:
    world = World()
    world.wait(4)
    world.wait(60, AppState.RUNNING, None, replicas="RR")
    world.wait(3)
    world.wait(3, AppState.SUCCEEDED, None)
    assert world.said == []
    world.wait(9)
    assert world.wait(3, AppState.FAILED, IMAGE) == [], "TorchX prints how it has ended"


def test_a_reason_that_changes_each_second_is_told_now_and_then() -> None:
    world = World()
    for second in range(60):
        world.wait(1, reason=Reason(code=Code.FOREIGN_TEXT, text=f"{second} pods ahead", what=f"{second} pods ahead"))
    assert len(world.said) == 11


def test_while_nodes_of_an_app_that_runs_are_missing_it_says_why() -> None:
    """The command was silent once one node ran: with a quota of one pod, for ever."""
    world = World()
    missing = Reason(code=Code.PODS_MISSING, count=1, causes=(QUOTA,))
    world.wait(4)
    [said] = world.wait(60, AppState.RUNNING, missing, replicas="RP")
    assert said.startswith("app RUNNING: 1 pod ")
    assert len(world.wait(20, AppState.RUNNING, CPU, replicas="RP")) == 1, "another reason"
    assert world.wait(20, AppState.RUNNING, None, replicas="RR") == ["app RUNNING: 2 of 2 nodes run"]


def test_each_app_has_its_own_line() -> None:
    world = World()
    world.wait(6)
    assert world.wait(6, app_id="other") == [WAITS.replace("app", "other")]
