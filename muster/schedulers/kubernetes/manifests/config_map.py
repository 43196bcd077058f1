"""The files in an app's ConfigMap: the agent and the packed workspaces."""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from muster._contract import AGENT_BUNDLE_NAME
from muster.schedulers.bundle import build_agent_bundle
from muster.schedulers.errors import SchedulerError
from muster.schedulers.workspace import BundleError, build_workspace_bundle, walk_workspace

WORKSPACE_LIMIT_BYTES: Final = 700 * 1024
"""When packed. A ConfigMap holds 1 MiB, including the agent."""

METADATA_KEY: Final = "muster.kubernetes_workspace"
"""In `Role.metadata`: the key of the role's packed workspace in the ConfigMap."""

_UNPACKED_LIMIT_BYTES: Final = 100 * WORKSPACE_LIMIT_BYTES
"""A larger folder is refused before packing: only zeros compress a hundredfold."""

_ALTERNATIVES: Final = (
    "list what the job does not need in .torchxignore, set -cfg image_repo=REGISTRY/NAME to build an image, "
    "mount the code with --mounts type=volume, or pass --workspace '' if the image contains it"
)


@dataclass(frozen=True, kw_only=True)
class Bundles:
    """The files of the ConfigMap."""

    agent: bytes | None
    """None: no role needs it, or the image contains it."""
    workspaces: Mapping[str, bytes] = field(default_factory=dict)
    """By key in the ConfigMap."""

    def build_binary_data(self) -> dict[str, str]:
        """The ConfigMap's `binaryData`."""
        files = dict(self.workspaces)
        if self.agent is not None:
            files[AGENT_BUNDLE_NAME] = self.agent
        return {name: base64.b64encode(content).decode() for name, content in sorted(files.items())}


def pack_workspace(path: str) -> tuple[str, bytes]:
    """Packs a folder.

    Returns:
        Its key in the ConfigMap, built from its hash, and the bytes.

    Raises:
        SchedulerError: the folder is too large or cannot be read.
    """
    folder = path.removeprefix("file://")
    try:
        _check_size(folder)
        content = build_workspace_bundle(folder)
    except BundleError as error:
        raise SchedulerError(str(error)) from error
    if len(content) > WORKSPACE_LIMIT_BYTES:
        _raise_too_large(f"workspace {folder!r} is", len(content), "packed")
    return f"workspace-{hashlib.sha256(content).hexdigest()[:12]}.tar.gz", content


def _check_size(folder: str) -> None:
    root = Path(folder)
    if not root.is_dir():
        raise BundleError(f"workspace {folder!r} is not a folder")
    total = 0
    for relative in walk_workspace(root):
        status = (root / relative).lstat()
        total += status.st_size
        if total > _UNPACKED_LIMIT_BYTES:
            _raise_too_large(f"workspace {folder!r} is", total, "or more")


def _raise_too_large(subject: str, size_bytes: int, qualifier: str) -> None:
    limit = f"{WORKSPACE_LIMIT_BYTES // 1024} KiB packed"
    size = f"{size_bytes // 1024} KiB {qualifier}"
    raise SchedulerError(f"{subject} too large: {size}, the limit is {limit}; {_ALTERNATIVES}")


def build_bundles(workspaces: Mapping[str, bytes], *, needs_agent: bool) -> Bundles:
    """Builds the files of one app.

    Raises:
        SchedulerError: the workspaces of all roles are too large together.
    """
    total = sum(len(content) for content in workspaces.values())
    if total > WORKSPACE_LIMIT_BYTES:
        _raise_too_large(f"the app's {len(workspaces)} workspaces together are", total, "packed")
    return Bundles(agent=build_agent_bundle() if needs_agent else None, workspaces=workspaces)


def build_config_map(name: str, labels: Mapping[str, str], bundles: Bundles) -> dict[str, Any]:
    """The ConfigMap, immutable so that thousands of kubelets need not watch it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": dict(labels)},
        "immutable": True,
        "binaryData": bundles.build_binary_data(),
    }
