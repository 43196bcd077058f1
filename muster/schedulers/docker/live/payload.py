"""The files that are copied into an app's containers.

The app's state keeps them for containers created later. They lie beside the app's state from its submission to its end.
A workspace may be large, so it is never held in memory.
"""

import fcntl
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster._shared.contract import AGENT_BUNDLE_NAME
from muster._shared.folders import remove_folder
from muster.schedulers.docker.spec import AppRequest
from muster.schedulers.workspace.packing import write_workspace_bundle

_PACKED: Final = ".packed-"
LOCK: Final = ".lock"
"""In a folder of packed workspaces: locked by its process."""


@dataclass(frozen=True, kw_only=True)
class Payload:
    """What is copied into containers."""

    agent: bytes
    """The agent's bundle. It is empty if no container gets it."""
    workspaces: Mapping[str, Path]
    """Key -> packed folder."""


def build_payload(payload: Payload) -> dict[str, bytes | Path]:
    """Name -> content (or a file with it) of the files that store the payload beside the app's state."""
    return {AGENT_BUNDLE_NAME: payload.agent, **payload.workspaces}


def read_payload(folder: Path, app: AppRequest) -> Payload:
    """Read what `build_payload` has built. The result is empty once the payload has been removed."""
    agent = folder / AGENT_BUNDLE_NAME
    return Payload(agent=agent.read_bytes() if agent.exists() else b"", workspaces=_list_workspaces(folder, app))


def remove_payload(folder: Path, app: AppRequest) -> None:
    """Remove it at the app's end: no container is created any more."""
    for file in (folder / AGENT_BUNDLE_NAME, *_list_workspaces(folder, app).values()):
        file.unlink(missing_ok=True)


def _list_workspaces(folder: Path, app: AppRequest) -> dict[str, Path]:
    return {key: folder / key for key in (container.workspace for container in app.containers) if key is not None}


class PackedWorkspaces:
    """The folders that this process has packed, as files beside the state of the apps: /tmp may be in memory.

    They are removed with the scheduler. A submitted app has its own. What a killed process has left goes with the next.
    """

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}
        self._folder: Path | None = None

    def pack(self, path: str, state_dir: Path) -> str:
        """Pack a folder and return its key, which follows from its content.

        Args:
            path: the folder.
            state_dir: the user's folder for muster's state.

        Raises:
            BundleError: see `write_workspace_bundle`.
        """
        if self._folder is None:
            for left in find_left_folders(state_dir):
                remove_folder(left, ignores_errors=True)
            self._folder = Path(tempfile.mkdtemp(prefix=_PACKED, dir=state_dir))
            weakref.finalize(self, _remove_folder, self._folder, _lock(self._folder / LOCK))
        fd, name = tempfile.mkstemp(dir=self._folder)
        with open(fd, "wb") as out:
            digest = write_workspace_bundle(path, out)
        key = f"workspace-{digest[:12]}.tar"
        self.files[key] = Path(name).replace(self._folder / key)
        return key

    def remove(self) -> None:
        """Remove all of them. Idempotent."""
        if self._folder is not None:
            remove_folder(self._folder, ignores_errors=True)
        self.files.clear()
        self._folder = None


def find_left_folders(state_dir: Path) -> Iterator[Path]:
    """Return the folders of packed workspaces whose process was killed."""
    for folder in state_dir.glob(f"{_PACKED}*"):
        try:
            fd = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        finally:
            os.close(fd)
        yield folder


def _lock(path: Path) -> int:
    """Make a file and lock it. The lock ends with the process, however it ends."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.replace(file.name, path)  # others find it only with its lock
        return os.dup(file.fileno())


def _remove_folder(folder: Path, lock: int) -> None:
    remove_folder(folder, ignores_errors=True)
    os.close(lock)
