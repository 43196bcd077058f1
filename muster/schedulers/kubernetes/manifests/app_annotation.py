"""Encodes an AppDef as an annotation and decodes it, so that `describe` returns all of it."""

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

from muster._shared.contract import FormatError
from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes.labels import APPDEF_ANNOTATION, WORKSPACE_KEY
from muster.schedulers.kubernetes.names import label_roles
from muster.schedulers.runner.app_codec import dump_app, load_app
from muster.schedulers.runner.roles import BASE_IMAGE_KEY

_LIMIT_BYTES: Final = 200_000
"""Kubernetes allows 256 KiB for all annotations of an object."""


def encode_app(app: Any) -> str:
    """Return the AppDef as compressed JSON in base64. Deterministic.

    Raises:
        SchedulerError: too large for an annotation.
    """
    text = json.dumps(dump_app(app, without_metadata=(WORKSPACE_KEY, BASE_IMAGE_KEY)), separators=(",", ":"))
    encoded = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    if len(encoded) > _LIMIT_BYTES:
        raise SchedulerError(
            f"app {app.name!r} has {len(encoded)} bytes when encoded, the limit is {_LIMIT_BYTES}; shorten args or env"
        )
    return encoded


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
        text = metadata["annotations"][APPDEF_ANNOTATION]
        return load_app(json.loads(zlib.decompress(base64.b64decode(text, validate=True))))
    except FormatError as error:
        raise EngineError(f"{parent['kind']} {metadata['name']}: {error}") from error
    except (AttributeError, LookupError, TypeError, ValueError, zlib.error) as error:
        what = f"annotation {APPDEF_ANNOTATION} of {parent['kind']} {metadata['name']} is missing or malformed"
        raise EngineError(f"{what} ({type(error).__name__}: {error}); `muster delete` removes the app") from error


def decode_roles(parent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the roles of the AppDef, by their labels, in its order. Arguments and errors are those of `decode_app`."""
    roles = decode_app(parent).roles
    return dict(zip(label_roles([role.name for role in roles]), roles, strict=True))
