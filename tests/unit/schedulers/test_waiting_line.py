"""What a person who waits for an app is told while it waits, and how often."""

from dataclasses import dataclass, field

from torchx.specs import AppState
from torchx.specs.api import ReplicaStatus, RoleStatus

from muster.schedulers.adapter.status import DescribedApp
from muster.schedulers.adapter.waiting_line import WaitingLine

CPU = "2 of 2 pods wait: Insufficient cpu (2 of 2 nodes)"


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
        msg: str = CPU,
        app_id: str = "app",
        waits: tuple[str, ...] = (),
        replicas: str = "",
    ) -> list[str]:
        """Ask once a second. Returns what was said. `replicas`: R for each that runs, P for each that waits."""
        before = len(self.said)
        states = [AppState.RUNNING if each == "R" else AppState.PENDING for each in replicas]
        nodes = [ReplicaStatus(id=index, state=each, role="w", hostname="") for index, each in enumerate(states)]
        roles = [RoleStatus(role="w", replicas=nodes)]
        for second in range(seconds):
            told = msg.replace("{s}", str(second))
            answer = DescribedApp(app_id=app_id, state=state, msg=told, roles_statuses=roles, waits=waits)
            self.line.update(answer)
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


def test_while_nodes_of_an_app_that_runs_are_missing_it_says_why() -> None:
    """The command was silent once one node ran: with a quota of one pod, for ever."""
    world = World()
    quota = "1 pod not created for {s} s: exceeded quota; 1 of 2 nodes runs"
    world.wait(4)
    said = world.wait(60, AppState.RUNNING, quota, waits=("FailedCreate",), replicas="RP")
    assert said == ["app RUNNING: 1 pod not created for 1 s: exceeded quota; 1 of 2 nodes runs"]
    cpu = world.wait(20, AppState.RUNNING, CPU, waits=("Insufficient cpu",), replicas="RP")
    assert cpu == [f"app RUNNING: {CPU}; 1 of 2 nodes runs"], "another reason"
    assert world.wait(20, AppState.RUNNING, "2 of 2 nodes run", replicas="RR") == ["app RUNNING: 2 of 2 nodes run"]


def test_what_an_adapter_tells_apart_is_told_once() -> None:
    world = World()
    assert len(world.wait(60, msg="{s} of 2 pods wait: cannot pull", waits=("image",))) == 1
    assert len(world.wait(60, msg="{s} s", waits=("image", "FailedMount"))) == 1


def test_each_app_has_its_own_line() -> None:
    world = World()
    world.wait(6)
    assert world.wait(6, app_id="other") == [f"other PENDING: {CPU}"]
