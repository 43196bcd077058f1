"""Marks submissions in progress. Others leave their objects alone, and remove those of a command that was killed.

    <state>/docker-submissions/<app id>    the address of its engine; locked by the command as long as it submits

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
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster._shared.folders import remove_folder
from muster.schedulers.docker.engine.client import Engine
from muster.schedulers.docker.engine.errors import DockerError
from muster.schedulers.docker.running_apps.creation import remove_app
from muster.schedulers.docker.spec import Label, build_user_id
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
    with path.open("x") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump(dict(address), file)
        file.flush()
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
        except (OSError, ValueError):  # "" while it is made
            mark = None
        yield mark
