"""Apps that only the engine knows: their state folder is gone (another HOME, removed by hand)."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from torchx.specs import AppDef, AppState, Role
from torchx.specs.api import ReplicaStatus

from muster.schedulers.docker.engine.client import Engine
from muster.schedulers.docker.engine.container_state import ContainerFacts
from muster.schedulers.docker.spec import Label, build_user_id
from muster.schedulers.timestamps import parse_seconds
from muster.schedulers.wording.facts import AppFacts
from muster.schedulers.wording.reasons import Code, Reason

_STOPPERS: Final = 32
_WAITING: Final = ("created",)


def find_app(engine: Engine, app_id: str) -> list[ContainerFacts]:
    """Return the containers of one app of this user: the newest of each replica."""
    return _list_newest(engine.list_containers({Label.APP: app_id, Label.USER: build_user_id(), Label.ROLE: None}))


def list_apps(engine: Engine) -> dict[str, list[ContainerFacts]]:
    """Map each app id of this user to its containers."""
    apps: dict[str, list[ContainerFacts]] = {}
    for facts in engine.list_containers({Label.USER: build_user_id(), Label.APP: None, Label.ROLE: None}):
        apps.setdefault(facts.labels[Label.APP], []).append(facts)
    return apps


def list_remains(engine: Engine) -> dict[str, list[Mapping[str, str]]]:
    """Map app ids to labels of what is left, of this user's apps without a container of a replica.

    What is left is reservations, networks and temporary containers. An app whose temporary container runs is left out.
    """
    remains: dict[str, list[Mapping[str, str]]] = {}
    mine = {Label.USER: build_user_id(), Label.APP: None}
    containers = engine.list_containers(mine)
    left_out = {facts.labels[Label.APP] for facts in containers if Label.ROLE in facts.labels or facts.running}
    networks = [network.get("Labels") or {} for network in engine.list_networks(mine)]
    for labels in [*(facts.labels for facts in containers), *networks, *engine.list_volumes(mine).values()]:
        remains.setdefault(labels[Label.APP], []).append(labels)
    return {app_id: found for app_id, found in remains.items() if app_id not in left_out}


def list_caches(engine: Engine) -> dict[str, float | None]:
    """List this user's volumes with compile caches that no container has, and when each was made, since the epoch."""
    found = engine.list_unused_volumes({Label.USER: build_user_id(), Label.CACHE: None})
    return {name: parse_seconds(created) if created else None for name, created in found.items()}


def find_other_state_dir(containers: Sequence[ContainerFacts], state_dir: str) -> str | None:
    """Return the folder for state with which an app was submitted, if that is another one than `state_dir`."""
    dirs = {facts.labels[Label.STATE_DIR] for facts in containers} - {state_dir}
    return min(dirs, default=None)


def find_app_state(containers: Sequence[ContainerFacts]) -> AppState:
    """Return the state of an app without a supervisor. The newest container of each replica counts.

    One that waits keeps the app from its end, and an app of which a container has ended has begun to run.
    """
    states = [find_state(facts) for facts in _list_newest(containers)]
    if AppState.PENDING in states:
        return AppState.PENDING if {*map(find_state, containers)} == {AppState.PENDING} else AppState.RUNNING
    return next((each for each in (AppState.RUNNING, AppState.FAILED) if each in states), AppState.SUCCEEDED)


def find_state(facts: ContainerFacts) -> AppState:
    """Return the state of one container."""
    if facts.running:
        return AppState.RUNNING
    if facts.status in _WAITING:
        return AppState.PENDING
    return AppState.SUCCEEDED if facts.exit_code == 0 else AppState.FAILED


def find_end_s(containers: Sequence[ContainerFacts]) -> float | None:
    """Return when the last container ended, by the engine's clock in seconds since the epoch.

    None if none has ended.
    """
    ended = (facts for facts in containers if facts.exit_code is not None and facts.finished_at)
    return max((parse_seconds(facts.finished_at) for facts in ended), default=None)


def build_facts(app_id: str, containers: Sequence[ContainerFacts], state_dir: str) -> AppFacts:
    """Return what the labels show. Commands and resources are not known.

    Args:
        app_id: the app's.
        containers: what `find_app` returned.
        state_dir: this user's folder for muster's state.
    """
    other = find_other_state_dir(containers, state_dir)
    why = Reason(code=Code.STATE_GONE if other is None else Code.OTHER_HOME, text=other or "")
    roles: dict[str, list[ContainerFacts]] = {}
    for facts in containers:
        roles.setdefault(facts.labels[Label.ROLE], []).append(facts)
    app = AppDef(name="", roles=[Role(name=name, image="", num_replicas=len(found)) for name, found in roles.items()])
    replicas = [each for name, found in roles.items() for each in _statuses(name, found)]
    return AppFacts(app_id=app_id, app=app, state=find_app_state(containers), replicas=replicas, reasons=(why,))


def stop_app(engine: Engine, containers: Sequence[ContainerFacts], grace_s: float) -> None:
    """Stop all containers at once, with one grace period."""
    with ThreadPoolExecutor(_STOPPERS) as pool:
        list(pool.map(lambda facts: engine.stop_container(facts.id, grace_s), containers))


def _statuses(role: str, found: Sequence[ContainerFacts]) -> list[ReplicaStatus]:
    return [
        ReplicaStatus(id=int(facts.labels[Label.REPLICA]), state=find_state(facts), role=role, hostname=facts.name)
        for facts in found
    ]


def _list_newest(containers: Sequence[ContainerFacts]) -> list[ContainerFacts]:
    """Return the newest container of each replica, in order."""
    newest: dict[tuple[str, int], ContainerFacts] = {}
    for facts in containers:
        newest[facts.labels[Label.ROLE], int(facts.labels[Label.REPLICA])] = facts
    return [newest[key] for key in sorted(newest)]
