"""What the pods of an app read from its ConfigMap: the agent and the packed workspaces."""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from muster._contract import AGENT_BUNDLE_NAME
from muster.schedulers.bundle import BundleError, build_agent_bundle, build_workspace_bundle, walk_workspace
from muster.schedulers.errors import SchedulerError

WORKSPACE_LIMIT_BYTES: Final = 700 * 1024
"""Packed; a ConfigMap holds 1 MiB, and the agent is in it too."""

METADATA_KEY: Final = "muster.kubernetes_workspace"
"""In `Role.metadata`: the key of the role's packed workspace, put there when it was packed."""

_UNPACKED_LIMIT_BYTES: Final = 100 * WORKSPACE_LIMIT_BYTES
"""A folder larger than this is not even read: nothing but zeros packs a hundredfold."""

_ALTERNATIVES: Final = (
    "name what the job does not need in .torchxignore, give -cfg image_repo=REGISTRY/NAME to build an image, "
    "mount the code with --mounts type=volume, or pass --workspace '' if the image has it"
)


@dataclass(frozen=True, kw_only=True)
class Bundles:
    """Files of the ConfigMap."""

    agent: bytes | None
    """None: no role needs it, or the image has it."""
    workspaces: Mapping[str, bytes] = field(default_factory=dict)
    """By key."""

    def binary_data(self) -> dict[str, str]:
        """The ConfigMap's `binaryData`."""
        files = dict(self.workspaces)
        if self.agent is not None:
            files[AGENT_BUNDLE_NAME] = self.agent
        return {name: base64.b64encode(content).decode() for name, content in sorted(files.items())}


def pack_workspace(path: str) -> tuple[str, bytes]:
    """Packs a folder, if it fits.

    Returns:
        The key by which the pods find it, made of its hash, and the bytes.

    Raises:
        SchedulerError: too large, or cannot be read.
    """
    folder = path.removeprefix("file://")
    try:
        _refuse_large(folder)
        content = build_workspace_bundle(folder)
    except BundleError as error:
        raise SchedulerError(str(error)) from error
    if len(content) > WORKSPACE_LIMIT_BYTES:
        _refuse(folder, len(content), "packed")
    return f"workspace-{hashlib.sha256(content).hexdigest()[:12]}.tar.gz", content


def _refuse_large(folder: str) -> None:
    root = Path(folder)
    if not root.is_dir():
        raise BundleError(f"workspace {folder!r} is not a folder")
    total = 0
    for relative in walk_workspace(root):
        status = (root / relative).lstat()
        total += status.st_size
        if total > _UNPACKED_LIMIT_BYTES:
            _refuse(folder, total, "or more")


def _refuse(folder: str, size_bytes: int, how: str) -> None:
    limit = f"{WORKSPACE_LIMIT_BYTES // 1024} KiB packed"
    raise SchedulerError(f"workspace {folder!r} is {size_bytes // 1024} KiB {how}, {limit} fit; {_ALTERNATIVES}")


def build_bundles(workspaces: Mapping[str, bytes], *, needs_agent: bool) -> Bundles:
    """The files of one app.

    Raises:
        SchedulerError: the workspaces of several roles do not fit together.
    """
    total = sum(len(content) for content in workspaces.values())
    if total > WORKSPACE_LIMIT_BYTES:
        _refuse(f"{len(workspaces)} of them", total, "packed")
    return Bundles(agent=build_agent_bundle() if needs_agent else None, workspaces=workspaces)


def build_config_map(name: str, labels: Mapping[str, str], bundles: Bundles) -> dict[str, Any]:
    """Immutable: thousands of kubelets then need not watch it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": dict(labels)},
        "immutable": True,
        "binaryData": bundles.binary_data(),
    }
