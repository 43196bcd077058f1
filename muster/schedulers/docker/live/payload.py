"""The files that are copied into an app's containers; the app's state keeps them for containers created later.

They lie beside the app's state from its submission to its end. A workspace may be large: it is never held in memory.
"""

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muster._contract import AGENT_BUNDLE_NAME
from muster.schedulers.docker.spec import AppRequest
from muster.schedulers.workspace_packing import write_workspace_bundle


@dataclass(frozen=True, kw_only=True)
class Payload:
    """What is copied into containers."""

    agent: bytes
    """The agent's bundle; empty when no container gets it."""
    workspaces: Mapping[str, Path]
    """Key -> packed folder."""


def build_payload(payload: Payload) -> dict[str, bytes | Path]:
    """Name -> content (or a file with it) of the files that store the payload beside the app's state."""
    return {AGENT_BUNDLE_NAME: payload.agent, **payload.workspaces}


def read_payload(folder: Path, app: AppRequest) -> Payload:
    """The inverse of `build_payload`; empty once the payload has been removed."""
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

    They are removed with the scheduler; a submitted app has its own.
    """

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}
        self._folder: Path | None = None

    def pack(self, path: str, state_dir: Path) -> str:
        """Packs a folder and returns its key, which follows from its content.

        Args:
            path: the folder.
            state_dir: the user's folder for muster's state.

        Raises:
            BundleError: see `write_workspace_bundle`.
        """
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=".packed-", dir=state_dir))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        fd, name = tempfile.mkstemp(dir=self._folder)
        with open(fd, "wb") as out:
            digest = write_workspace_bundle(path, out)
        key = f"workspace-{digest[:12]}.tar.gz"
        self.files[key] = Path(name).replace(self._folder / key)
        return key

    def remove(self) -> None:
        """Remove all of them; idempotent."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self.files.clear()
        self._folder = None
