"""Marks submissions in progress. Others leave their objects alone, and remove those of a command that was killed.

    <state>/docker-submissions/<app id>    what is on which engine; locked by the command as long as it submits

A command that fails or is interrupted rolls back by itself and removes its mark. A mark without a lock belongs to a
command that was killed. The next submission to that engine, `muster prune` or `muster delete` removes what its app has
there. Once its supervisor has written its first record, an app belongs to the supervisor, and only the mark is removed.
"""

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from muster._shared.folders import remove_folder
from muster.schedulers.docker.engine.client import Engine
from muster.schedulers.docker.engine.errors import DockerError
from muster.schedulers.docker.live.creation import remove_app
from muster.schedulers.supervision.registry import AppRegistry

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
    labels: Mapping[str, str]
    """The labels of all objects of the app."""
    made_s: float
    """Wall-clock seconds."""

    @property
    def app_id(self) -> str:
        """The app's."""
        return self.path.name

    def remove(self) -> None:
        """Remove the mark: the app has been submitted, or nothing is left of it."""
        self.path.unlink(missing_ok=True)


@contextmanager
def mark_submission(
    state_dir: Path, app_id: str, address: Mapping[str, str], labels: Mapping[str, str]
) -> Iterator[Mark]:
    """Mark a submission for as long as the context lasts. Its caller removes the mark. Otherwise it counts as killed.

    Raises:
        FileExistsError: the app is being submitted, or its submission was killed.
    """
    path = state_dir / _MARKS / app_id
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with ExitStack() as stack:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        stack.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, json.dumps({"engine": dict(address), "labels": dict(labels)}).encode())
        yield Mark(path=path, address=address, labels=labels, made_s=time.time())


def list_submitting(state_dir: Path) -> set[str]:
    """Return the ids of the apps that are marked: they are being submitted, or their submission was killed."""
    with suppress(FileNotFoundError):
        return set(os.listdir(state_dir / _MARKS))
    return set()


def find_killed(state_dir: Path) -> list[Mark]:
    """Find the marks of submissions that were killed."""
    found = []
    for app_id in sorted(list_submitting(state_dir)):
        with _lock_killed(state_dir / _MARKS / app_id) as mark:
            if mark is not None:
                found.append(mark)
    return found


def remove_killed(state_dir: Path, mark: Mark) -> None:
    """Remove what a killed submission has left on its engine and in the state folder.

    Raises:
        DockerError: the engine does not answer, or refuses.
        OSError: a file cannot be removed.
    """
    with _lock_killed(mark.path) as still:
        if still is None:
            return
        registry = AppRegistry(state_dir, REGISTRY)
        folder = registry.open(mark.app_id)
        if folder is None or folder.read_record() is None:
            if folder is not None and time.time() < mark.made_s + _START_LIMIT_S:
                return
            engine = Engine(mark.address)
            try:
                remove_app(engine, mark.labels)
            finally:
                engine.close()
            registry.remove(mark.app_id)
            remove_folder(state_dir / APPS / mark.app_id, ignores_errors=True)
        mark.remove()


def remove_killed_app(state_dir: Path, app_id: str) -> bool:
    """Do as `remove_killed` for one app, and return False if no submission of it was killed.

    Raises:
        DockerError, OSError: see `remove_killed`.
    """
    found = [mark for mark in find_killed(state_dir) if mark.app_id == app_id]
    for mark in found:
        remove_killed(state_dir, mark)
    return bool(found)


def sweep(state_dir: Path, address: Mapping[str, str]) -> None:
    """Remove what killed submissions have left on this engine. What cannot be removed is left for the next time."""
    for mark in find_killed(state_dir):
        if mark.address == address:
            try:
                remove_killed(state_dir, mark)
            except (DockerError, OSError, RuntimeError) as error:
                logger.warning("%s, of a submission that was killed, is not removed: %s", mark.app_id, error)


@contextmanager
def _lock_killed(path: Path) -> Iterator[Mark | None]:
    """Lock the mark of a submission that was killed. None: it goes on, or another process handles it."""
    with ExitStack() as stack:
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made_s = os.fstat(fd).st_mtime
            content: Any = json.loads(os.pread(fd, 1 << 16, 0))
            mark = Mark(path=path, address=content["engine"], labels=content["labels"], made_s=made_s)
        except (OSError, ValueError, LookupError, TypeError):  # "" while it is made
            mark = None
        yield mark
