"""What travels with an app: the agent in a ConfigMap, packed workspaces in a Secret, the AppDef in an annotation.

A workspace holds the user's code and whatever lies beside it, and more accounts may read ConfigMaps than Secrets.
"""

import base64
import hashlib
import json
import stat
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from muster._shared.contract import AGENT_BUNDLE_NAME, FormatError
from muster.schedulers.bundle import build_agent_bundle
from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes import kube
from muster.schedulers.runner.app_codec import dump_app, load_app
from muster.schedulers.runner.roles import BASE_IMAGE_KEY
from muster.schedulers.workspace.packing import BundleError, build_workspace_bundle, walk_workspace

WORKSPACE_LIMIT_BYTES: Final = 700 * 1024
"""When packed. In base64 it is a third more, and a Secret holds 1 MiB."""

_UNPACKED_LIMIT_BYTES: Final = 100 * WORKSPACE_LIMIT_BYTES
"""A larger folder is refused before packing: only zeros compress a hundredfold."""

_NAMED: Final = 3
"""Parts of a workspace that is too large in the line that says so."""

_ALTERNATIVES: Final = (
    "list what the job does not need in .torchxignore, set -cfg image_repo=REGISTRY/NAME to build an image, "
    "mount the code with --mounts type=volume, or pass --workspace '' if the image contains it"
)


def pack_workspace(path: str) -> tuple[str, bytes]:
    """Pack a folder.

    Returns:
        Its key in the Secret, built from its hash, and the bytes.

    Raises:
        SchedulerError: the folder is too large or cannot be read.
    """
    try:
        sizes = _check_size(path)
        content = build_workspace_bundle(path)
    except BundleError as error:
        raise SchedulerError(str(error)) from error
    if len(content) > WORKSPACE_LIMIT_BYTES:
        _raise_too_large(f"workspace {path!r} is", len(content), "packed", sizes)
    return f"workspace-{hashlib.sha256(content).hexdigest()[:12]}.tar.gz", content


def _check_size(folder: str) -> Counter[str]:
    """Return the bytes in each file and folder at the top of the workspace."""
    root = Path(folder)
    if not root.is_dir():
        raise BundleError(f"workspace {folder!r} is not a folder")
    sizes: Counter[str] = Counter()
    total = 0
    for relative in walk_workspace(root):
        status = (root / relative).lstat()
        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        sizes[relative.partition("/")[0]] += size
        total += size
        if total > _UNPACKED_LIMIT_BYTES:
            _raise_too_large(f"workspace {folder!r} is", total, "or more", sizes)
    return sizes


def _raise_too_large(subject: str, size_bytes: int, qualifier: str, sizes: Counter[str] | None = None) -> None:
    limit = f"{WORKSPACE_LIMIT_BYTES // 1024} KiB packed"
    size = f"{size_bytes // 1024} KiB {qualifier}"
    named = ", ".join(
        f"{name} ({part // 1024} KiB)" for name, part in (sizes or Counter()).most_common(_NAMED) if part >= 1024
    )
    largest = f"; the largest parts are {named}" if named else ""
    raise SchedulerError(f"{subject} too large: {size}, the limit is {limit}{largest}; {_ALTERNATIVES}")


def build_agent_config_map(name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the ConfigMap with the agent, immutable so that thousands of kubelets need not watch it."""
    files = _encode({AGENT_BUNDLE_NAME: build_agent_bundle()})
    return kube.build_document(
        kube.CONFIG_MAP, {"name": name, "labels": dict(labels)}, immutable=True, binaryData=files
    )


def build_workspace_secret(name: str, labels: Mapping[str, str], workspaces: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the Secret with the packed workspaces of all roles, by their keys.

    Raises:
        SchedulerError: together they are too large.
    """
    total = sum(len(content) for content in workspaces.values())
    if total > WORKSPACE_LIMIT_BYTES:
        _raise_too_large(f"the app's {len(workspaces)} workspaces together are", total, "packed")
    metadata = {"name": name, "labels": dict(labels)}
    return kube.build_document(kube.SECRET, metadata, type="Opaque", immutable=True, data=_encode(workspaces))


def _encode(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in sorted(files.items())}


def encode_app(app: Any) -> str:
    """Return the AppDef as compressed JSON in base64. Deterministic. The server refuses more than 256 KiB."""
    text = json.dumps(dump_app(app, without_metadata=(kube.WORKSPACE_KEY, BASE_IMAGE_KEY)), separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def decode_app(parent: Mapping[str, Any]) -> Any:
    """Return the AppDef in the annotation of an app's object. Drops fields that this version of TorchX does not have.

    Args:
        parent: one of the app's Jobs, or its JobSet.

    Raises:
        EngineError: the annotation is missing or malformed, because another program has changed it, or it has another
            format.
    """
    metadata = parent["metadata"]
    try:
        text = metadata["annotations"][kube.APPDEF_ANNOTATION]
        return load_app(json.loads(zlib.decompress(base64.b64decode(text, validate=True))))
    except FormatError as error:
        raise EngineError(f"{parent['kind']} {metadata['name']}: {error}") from error
    except (AttributeError, LookupError, TypeError, ValueError, zlib.error) as error:
        what = f"annotation {kube.APPDEF_ANNOTATION} of {parent['kind']} {metadata['name']} is missing or malformed"
        raise EngineError(f"{what} ({type(error).__name__}: {error}); `muster delete` removes the app") from error


def decode_roles(parent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the roles of the AppDef, by their labels, in its order. Arguments and errors are those of `decode_app`."""
    roles = decode_app(parent).roles
    return dict(zip(kube.label_roles([role.name for role in roles]), roles, strict=True))
