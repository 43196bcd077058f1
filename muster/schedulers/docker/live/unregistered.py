"""Apps that only the engine knows: their state folder is gone (another HOME, removed by hand)."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from torchx.schedulers.api import DescribeAppResponse
from torchx.specs import AppState, Role
from torchx.specs.api import ReplicaStatus, RoleStatus

from muster.schedulers.docker.engine.client import Engine
from muster.schedulers.docker.engine.container_state import ContainerFacts
from muster.schedulers.docker.spec import Label

_STOPPERS: Final = 32
_WAITING: Final = ("created",)


def find_app(engine: Engine, app_id: str, user: str) -> list[ContainerFacts]:
    """Containers of one app of this user: the newest of each replica."""
    labels = {Label.APP: app_id, Label.USER: user, Label.ROLE: None}
    newest: dict[tuple[str, int], ContainerFacts] = {}
    for facts in sorted(engine.list_containers(labels), key=_incarnation):
        newest[facts.labels[Label.ROLE], int(facts.labels[Label.REPLICA])] = facts
    return [newest[key] for key in sorted(newest)]


def list_apps(engine: Engine, user: str) -> dict[str, list[ContainerFacts]]:
    """App id -> its containers, for all apps of this user."""
    apps: dict[str, list[ContainerFacts]] = {}
    for facts in engine.list_containers({Label.USER: user, Label.APP: None, Label.ROLE: None}):
        apps.setdefault(facts.labels[Label.APP], []).append(facts)
    return apps


def find_app_state(containers: Sequence[ContainerFacts]) -> AppState:
    """The state of an app without a supervisor."""
    states = [find_state(facts) for facts in containers]
    for state in (AppState.RUNNING, AppState.FAILED, AppState.PENDING):
        if state in states:
            return state
    return AppState.SUCCEEDED


def find_state(facts: ContainerFacts) -> AppState:
    """The state of one container."""
    if facts.running:
        return AppState.RUNNING
    if facts.status in _WAITING:
        return AppState.PENDING
    return AppState.SUCCEEDED if facts.exit_code == 0 else AppState.FAILED


def describe_app(app_id: str, containers: Sequence[ContainerFacts]) -> DescribeAppResponse:
    """What the labels show; commands and resources are not known."""
    roles: dict[str, list[ContainerFacts]] = {}
    for facts in containers:
        roles.setdefault(facts.labels[Label.ROLE], []).append(facts)
    return DescribeAppResponse(
        app_id=app_id,
        state=find_app_state(containers),
        msg="its state folder is gone; only the labels of its containers are known",
        roles=[Role(name=name, image="", num_replicas=len(found)) for name, found in roles.items()],
        roles_statuses=[RoleStatus(role=name, replicas=_statuses(name, found)) for name, found in roles.items()],
    )


def stop_app(engine: Engine, containers: Sequence[ContainerFacts], grace_s: float) -> None:
    """Stop all containers at once, with one grace period."""
    with ThreadPoolExecutor(_STOPPERS) as pool:
        list(pool.map(lambda facts: engine.stop_container(facts.id, grace_s), containers))


def _statuses(role: str, found: Sequence[ContainerFacts]) -> list[ReplicaStatus]:
    return [
        ReplicaStatus(id=int(facts.labels[Label.REPLICA]), state=find_state(facts), role=role, hostname=facts.name)
        for facts in found
    ]


def _incarnation(facts: ContainerFacts) -> int:
    return int(facts.labels[Label.INCARNATION])
