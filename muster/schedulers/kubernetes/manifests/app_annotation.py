"""Encodes an AppDef as an annotation and decodes it, so that `describe` returns all of it."""

import base64
import json
import zlib
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from typing import Any, Final

from torchx import specs

from muster.schedulers.errors import SchedulerError
from muster.schedulers.kubernetes.labels import APPDEF_ANNOTATION
from muster.schedulers.secret_variables import mask_env

_LIMIT_BYTES: Final = 200_000
"""Kubernetes allows 256 KiB for all annotations of an object."""

_MOUNTS: Final = {kind.__name__: kind for kind in (specs.BindMount, specs.VolumeMount, specs.DeviceMount)}


def encode_app(app: Any) -> str:
    """The AppDef as compressed JSON in base64. Deterministic.

    Raises:
        SchedulerError: too large for an annotation.
    """
    document = {"name": app.name, "metadata": app.metadata, "roles": [_encode_role(role) for role in app.roles]}
    text = json.dumps(document, default=str, separators=(",", ":"))
    encoded = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    if len(encoded) > _LIMIT_BYTES:
        raise SchedulerError(
            f"app {app.name!r} has {len(encoded)} bytes when encoded, the limit is {_LIMIT_BYTES}; shorten args or env"
        )
    return encoded


def _encode_role(role: Any) -> dict[str, Any]:
    encoded: dict[str, Any] = {}
    for item in fields(role):
        value = getattr(role, item.name)
        if item.name in ("overrides", "base_image") or value is None:
            continue
        if item.name == "mounts":
            value = [{"kind": type(mount).__name__, **asdict(mount)} for mount in value]
        elif item.name == "env":
            value = mask_env(value)  # annotations must not contain secrets
        elif isinstance(value, Enum):
            value = value.value
        elif is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        encoded[item.name] = value
    return encoded


def decode_app(text: str) -> Any:
    """The inverse of `encode_app`. Drops fields that this version of TorchX does not have.

    Raises:
        ValueError: the annotation is malformed.
    """
    try:
        document = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
    except zlib.error as error:
        raise ValueError(f"annotation {APPDEF_ANNOTATION} is malformed: {error}") from error
    roles = [_decode_role(role) for role in document["roles"]]
    return specs.AppDef(name=document["name"], roles=roles, metadata=document["metadata"])


def _decode_role(data: dict[str, Any]) -> Any:
    known = {item.name for item in fields(specs.Role)}
    values = {key: value for key, value in data.items() if key in known}
    policies = {policy.value: policy for policy in specs.RetryPolicy}
    values["retry_policy"] = policies.get(values.get("retry_policy", ""), specs.RetryPolicy.APPLICATION)
    values["resource"] = _decode_resource(values["resource"])
    values["mounts"] = [_decode_mount(mount) for mount in values["mounts"]]
    if "workspace" in values:  # only TorchX nightly has this field
        values["workspace"] = specs.Workspace(**values["workspace"])
    return specs.Role(**values)


def _decode_resource(data: dict[str, Any]) -> Any:
    known = {item.name for item in fields(specs.Resource)}
    return specs.Resource(**{key: value for key, value in data.items() if key in known})


def _decode_mount(data: dict[str, Any]) -> Any:
    kind = _MOUNTS[data["kind"]]
    return kind(**{key: value for key, value in data.items() if key != "kind"})
