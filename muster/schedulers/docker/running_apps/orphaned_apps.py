"""Apps that only the engine knows, and what is left of apps.

Their state folder is gone (another HOME, removed by hand), or their submission was killed. Submissions in progress are
marked. Others leave their objects alone, and remove those of a command that was killed.

    <state>/docker-submissions/<app id>    the address of its engine; locked by the command as long as it submits

A command that fails or is interrupted rolls back by itself and removes its mark. A mark without a lock belongs to a
command that was killed. The next submission to that engine, `muster prune` or `muster delete` removes what its app has
there. Once its supervisor has written its first record, an app belongs to the supervisor, and only the mark is removed.
"""

import fcntl
import json
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from torchx.specs import AppDef, AppState, Role
from torchx.specs.api import ReplicaStatus

from muster._shared.folders import remove_folder
from muster.schedulers.adapter.scheduler import Leftover, measure_folder
from muster.schedulers.docker.engine import ContainerFacts, Engine
from muster.schedulers.docker.running_apps.creation import remove_app
from muster.schedulers.docker.sdk import DockerError
from muster.schedulers.docker.spec import Label, build_user_id
from muster.schedulers.supervision.registry import AppRegistry
from muster.schedulers.timestamps import parse_seconds
from muster.schedulers.wording.facts import AppFacts
from muster.schedulers.wording.reasons import Code, Reason

APPS: Final = "docker-apps"
"""In the state folder: the folders of the apps."""

REGISTRY: Final = "docker"
"""Both schedulers register their apps in one place, so that either finds them."""

_MARKS: Final = "docker-submissions"
_START_LIMIT_S: Final = 60.0
"""A supervisor records its app within this time after the command that started it has been killed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The mark of one submission."""

    path: Path
    address: Mapping[str, str]
    """The address of the engine, as `Engine` takes it."""
    made_s: float
    """Wall-clock seconds."""

    @property
    def app_id(self) -> str:
        """The app's."""
        return self.path.name


@contextmanager
def mark_submission(state_dir: Path, app_id: str, address: Mapping[str, str]) -> Iterator[Path]:
    """Mark a submission for as long as the context lasts.

    Yields:
        The mark. The caller removes it if the app has been submitted, or nothing is left of it. Otherwise the
        submission counts as killed.

    Raises:
        FileExistsError: the app is being submitted, or its submission was killed.
    """
    path = state_dir / _MARKS / app_id
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=state_dir, delete=False) as file:
        try:  # whole and locked before it has its name: a command may be killed at any time
            fcntl.flock(file, fcntl.LOCK_EX)
            json.dump(dict(address), file)
            file.flush()
            os.link(file.name, path)
        finally:
            os.unlink(file.name)
        yield path


def list_submitting(state_dir: Path) -> set[str]:
    """Return the ids of the apps that are marked: they are being submitted, or their submission was killed."""
    with suppress(FileNotFoundError):
        return set(os.listdir(state_dir / _MARKS))
    return set()


def find_killed(state_dir: Path) -> list[Mark]:
    """Find the marks of submissions that were killed."""
    found = []
    for app_id in sorted(list_submitting(state_dir)):
        with _lock_killed(state_dir, app_id) as mark:
            if mark is not None:
                found.append(mark)
    return found


def remove_killed(state_dir: Path, app_id: str) -> bool:
    """Remove what a killed submission has left on its engine and in the state folder.

    Returns:
        Whether a submission of this app was killed.

    Raises:
        DockerError: the engine does not answer, or refuses.
        OSError: a file cannot be removed.
    """
    with _lock_killed(state_dir, app_id) as mark:
        if mark is None:
            return False
        registry = AppRegistry(state_dir, REGISTRY)
        folder = registry.open(app_id)
        if folder is None or folder.read_record() is None:
            if folder is not None and time.time() < mark.made_s + _START_LIMIT_S:
                return True
            with closing(Engine(mark.address)) as engine:
                remove_app(engine, {Label.APP: app_id, Label.USER: build_user_id()})
            registry.remove(app_id)
            remove_folder(state_dir / APPS / app_id, ignores_errors=True)
        mark.path.unlink(missing_ok=True)
    return True


def sweep(state_dir: Path, address: Mapping[str, str]) -> None:
    """Remove what killed submissions have left on this engine. What cannot be removed is left for the next time."""
    for mark in find_killed(state_dir):
        if mark.address == address:
            try:
                remove_killed(state_dir, mark.app_id)
            except (DockerError, OSError, RuntimeError) as error:
                logger.warning("%s, of a submission that was killed, is not removed: %s", mark.app_id, error)


@contextmanager
def _lock_killed(state_dir: Path, app_id: str) -> Iterator[Mark | None]:
    """Lock the mark of a submission that was killed. None: it goes on, or another process handles it."""
    path = state_dir / _MARKS / app_id
    with ExitStack() as stack:
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made_s = os.fstat(fd).st_mtime
            mark = Mark(path=path, address=json.loads(os.pread(fd, 1 << 16, 0)), made_s=made_s)
        except (OSError, ValueError):
            mark = None
        yield mark


_STOPPERS: Final = 32

logger = logging.getLogger(__name__)


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
    if facts.status == "created":
        return AppState.PENDING
    return AppState.SUCCEEDED if facts.exit_code == 0 else AppState.FAILED


def build_facts(app_id: str, containers: Sequence[ContainerFacts], state_dir: str) -> AppFacts:
    """Return what the labels show. Commands and resources are not known.

    Args:
        app_id: the app's.
        containers: what `find_app` returned.
        state_dir: this user's folder for muster's state.
    """
    other = find_other_state_dir(containers, state_dir)
    why = Reason(code=Code.STATE_GONE if other is None else Code.OTHER_HOME, text=other or "")
    roles = Counter(facts.labels[Label.ROLE] for facts in containers)
    app = AppDef(name="", roles=[Role(name=name, image="", num_replicas=count) for name, count in roles.items()])
    replicas = [
        ReplicaStatus(
            id=int(facts.labels[Label.REPLICA]),
            state=find_state(facts),
            role=facts.labels[Label.ROLE],
            hostname=facts.name,
        )
        for facts in containers
    ]
    return AppFacts(app_id=app_id, app=app, state=find_app_state(containers), replicas=replicas, reasons=(why,))


def stop_app(engine: Engine, containers: Sequence[ContainerFacts], grace_s: float) -> None:
    """Stop all containers at once, with one grace period."""
    with ThreadPoolExecutor(_STOPPERS) as pool:
        list(pool.map(lambda facts: engine.stop_container(facts.id, grace_s), containers))


def _list_newest(containers: Sequence[ContainerFacts]) -> list[ContainerFacts]:
    """Return the newest container of each replica, in order."""
    newest = {(facts.labels[Label.ROLE], int(facts.labels[Label.REPLICA])): facts for facts in containers}
    return [newest[key] for key in sorted(newest)]


def find_without_app(engine: Engine, state_dir: Path) -> Iterator[Leftover]:
    """Find what can be removed.

    Args:
        engine: the environment's.
        state_dir: the user's. What was submitted with another one is left out.
    """
    for mark in find_killed(state_dir):  # no supervisor knows of it
        yield Leftover(
            name=f"{REGISTRY}://{mark.app_id}",
            what="its submission was killed: containers, network, reservations",
            size_bytes=measure_folder(state_dir / APPS / mark.app_id),
            ended_s=mark.made_s,
            remove=partial(remove_killed, state_dir, mark.app_id),
        )
    try:
        apps, remains = list_apps(engine), list_remains(engine)
        caches = engine.list_unused_volumes({Label.USER: build_user_id(), Label.CACHE: None})
    except DockerError as error:
        logger.info("%s", error)
        return
    # Submissions register first, then unmark.
    known = list_submitting(state_dir) | set(AppRegistry(state_dir, REGISTRY))
    mine = {Label.USER: build_user_id(), Label.STATE_DIR: str(state_dir)}

    def build(app_id: str, what: str, ended_s: float | None = None) -> Leftover:
        remove = partial(remove_app, engine, {**mine, Label.APP: app_id})
        return Leftover(name=f"{REGISTRY}://{app_id}", what=what, ended_s=ended_s, remove=remove)

    for app_id, containers in apps.items():
        is_other_homes = find_other_state_dir(containers, str(state_dir)) is not None
        if not (is_other_homes or app_id in known or any(facts.running for facts in containers)):
            ended = (facts for facts in containers if facts.exit_code is not None and facts.finished_at)
            ended_s = max((parse_seconds(facts.finished_at) for facts in ended), default=None)
            yield build(app_id, f"its state folder is gone: {len(containers)} containers", ended_s)
    for app_id, labels in remains.items():
        if app_id not in known and labels[0][Label.STATE_DIR] == str(state_dir):
            yield build(app_id, "reservations, networks or volumes of a job that is gone")
    for volume, created in caches.items():
        yield Leftover(
            name=f"{REGISTRY} volume {volume}",
            what="compile caches that no container has",
            ended_s=parse_seconds(created) if created else None,
            remove=partial(engine.remove_volume, volume),
        )
