"""Encodes an AppDef as JSON and decodes it, so that `describe` returns the AppDef that was submitted, field by field.

All adapters keep an AppDef in this form. Fields of a role that only one TorchX line has are kept, and come back on that
line. Secrets in environments are masked, because not only the submitting user reads descriptions.

`asdict` and a library for the way back do not fit: mounts need their class, and a field of the other line
must not fail.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from enum import Enum
from typing import Any, Final

from torchx import specs
from torchx.specs import AppDef, Resource, RetryPolicy, Role

from muster._shared.contract import FORMAT, check_format
from muster.schedulers.secret_variables import list_named_secrets, mask_args, mask_env

_MOUNTS: Final = {kind.__name__: kind for kind in (specs.BindMount, specs.VolumeMount, specs.DeviceMount)}
_NOT_KEPT: Final = ("overrides",)
"""The nightly's values that are still to be computed. TorchX applies them before an adapter sees the role."""


def dump_app(app: AppDef, *, without_metadata: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the AppDef as JSON values. Values that JSON does not have become text.

    Args:
        app: not changed.
        without_metadata: keys that the adapter itself added to the roles' metadata.
    """
    roles = [_encode_role(role) for role in app.roles]
    for role in roles:
        role["metadata"] = {key: value for key, value in role["metadata"].items() if key not in without_metadata}
    return {"format": FORMAT, "name": app.name, "metadata": _plain(app.metadata or {}), "roles": roles}


def _encode_role(role: Role) -> dict[str, Any]:
    shown = replace(role, env=mask_env(role.env, list_named_secrets(role.metadata)), args=mask_args(role.args))
    encoded = {item.name: _plain(getattr(shown, item.name)) for item in fields(role) if item.name not in _NOT_KEPT}
    encoded["mounts"] = [{"kind": type(mount).__name__, **_plain(mount)} for mount in role.mounts]
    return {name: value for name, value in encoded.items() if value is not None}


def _plain(value: Any) -> Any:
    """Return the value in types that JSON has."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return str(value)


def load_app(document: Mapping[str, Any]) -> AppDef:
    """Load an AppDef that `dump_app` wrote.

    Raises:
        FormatError: it has another format.
        KeyError, TypeError, ValueError: not such a document.
    """
    check_format(document.get("format"), "the description of the app")
    roles = [_decode_role(role) for role in document["roles"]]
    return AppDef(name=document["name"], roles=roles, metadata=dict(document["metadata"]))


def _decode_role(data: Mapping[str, Any]) -> Role:
    decoders: dict[str, Callable[[Any], Any]] = {
        # The other TorchX line may have submitted a policy that this one lacks.
        "retry_policy": lambda name: RetryPolicy.__members__.get(name, RetryPolicy.APPLICATION),
        "resource": lambda resource: Resource(**_select_known(Resource, resource)),
        "mounts": lambda mounts: [_decode_mount(**mount) for mount in mounts],
        "workspace": lambda workspace: None if workspace is None else specs.Workspace(**workspace),
    }
    known = _select_known(Role, data)
    return Role(**{name: decoders[name](value) if name in decoders else value for name, value in known.items()})


def _select_known(kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a class of TorchX has on this line."""
    names = {item.name for item in fields(kind)}
    return {name: value for name, value in data.items() if name in names}


def _decode_mount(kind: str, **given: Any) -> Any:
    return _MOUNTS[kind](**given)
