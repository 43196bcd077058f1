"""The files that are copied into an app's containers.

The app's state keeps them for containers created later. They lie beside the app's state from its submission to its end.
A workspace may be large, so it is never held in memory.
"""

import os
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from muster._shared.contract import AGENT_BUNDLE_NAME
from muster.schedulers.docker.spec import AppRequest
from muster.schedulers.workspace.packing import write_workspace_bundle


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
    """The folders that this process has packed, as files without a name beside the state of the apps.

    /tmp may be in memory. The kernel removes the files when the process ends, however it ends. A submitted app has its
    own, which has a name.
    """

    def __init__(self) -> None:
        self._open: dict[str, BinaryIO] = {}

    @property
    def files(self) -> Mapping[str, Path]:
        """Key -> a path that leads to the file as long as it is open."""
        return {key: Path(f"/proc/self/fd/{file.fileno()}") for key, file in self._open.items()}

    def pack(self, path: str, state_dir: Path) -> str:
        """Pack a folder and return its key, which follows from its content.

        Args:
            path: the folder.
            state_dir: the user's folder for muster's state.

        Raises:
            BundleError: see `write_workspace_bundle`.
        """
        with ExitStack() as undo:
            out = undo.enter_context(_open_unnamed(state_dir))
            key = f"workspace-{write_workspace_bundle(path, out)[:12]}.tar"
            out.flush()
            if key not in self._open:
                self._open[key] = out
                weakref.finalize(self, out.close)
                undo.pop_all()
        return key

    def remove(self) -> None:
        """Remove all of them. Idempotent."""
        while self._open:
            self._open.popitem()[1].close()


def _open_unnamed(folder: Path) -> BinaryIO:
    """Open a file without a name in a folder. It can get one, unlike `tempfile.TemporaryFile`."""
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # not every file system can
        fd, name = tempfile.mkstemp(dir=folder)
        os.unlink(name)
    return open(fd, "w+b")
