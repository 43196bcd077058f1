"""Merges the user's `pod_template` into ours, the way `kubectl patch --type strategic` would.

Lists of named items (containers, volumes, env, ports) are merged item by item. Other lists are replaced. `null` removes
a field, `$patch: delete` an item, `$patch: replace` all earlier items or fields. Unknown fields are refused.

Source: kubernetes/community, contributors/devel/sig-api-machinery/strategic-merge-patch.md.
"""

import copy
from collections.abc import Mapping
from typing import Any, Final

from muster.schedulers.errors import OptionError
from muster.schedulers.kubernetes.names import CONTAINER
from muster.schedulers.kubernetes.schema import Field, check_pod_template, find_field

_DIRECTIVE: Final = "$patch"

_RESERVED_FIELDS: Final = {
    "restartPolicy": "the Job replaces pods itself",
    "subdomain": "nodes find each other by it",
    "hostname": "nodes find each other by it",
}
"""Fields of the pod's spec that a patch must not set, and why."""

_RESERVED_LABELS: Final = "app.kubernetes.io/"


def merge_pod_template(
    template: Mapping[str, Any], patch: Mapping[str, Any], version: tuple[int, int]
) -> dict[str, Any]:
    """Return a copy of `template` with `patch` merged in. Neither argument is changed.

    Args:
        template: a complete pod template. The name of our container is "main".
        patch: any part of a PodTemplateSpec.
        version: of Kubernetes, (1, 31).

    Raises:
        OptionError: the patch sets a field that does not exist, or a reserved one.
        SchedulerError: the result is not a valid pod template.
    """
    spec = patch.get("spec")
    for name, reason in _RESERVED_FIELDS.items():
        if isinstance(spec, Mapping) and name in spec:
            raise OptionError(f"pod_template.spec.{name} cannot be set: {reason}", "pod_template")
    merged = _merge_mapping(template, patch, "PodTemplateSpec", "pod_template", version)
    _check_labels(template, merged)
    check_pod_template(merged, version)
    _check_images(merged)
    return merged


def _check_images(merged: Mapping[str, Any]) -> None:
    """Refuse a container without an image. The schema allows it, because a controller may fill the image in."""
    spec = merged.get("spec") or {}
    for container in (each for name in ("initContainers", "containers") for each in spec.get(name) or ()):
        if not container.get("image"):
            raise OptionError(
                f"pod_template adds a container {container['name']!r} without an image; muster's container is "
                f"{CONTAINER!r}",
                "pod_template",
            )


def _check_labels(template: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    """Refuse to change our labels, by which the Service, status and logs find the pods."""
    before = (template.get("metadata") or {}).get("labels") or {}
    after = (merged.get("metadata") or {}).get("labels") or {}
    for name, value in before.items():
        if name.startswith(_RESERVED_LABELS) and after.get(name) != value:
            raise OptionError(
                f"pod_template.metadata.labels.{name} cannot be set: muster finds pods by it", "pod_template"
            )


def _merge_mapping(
    base: Mapping[str, Any], patch: Mapping[str, Any], type_name: str, path: str, version: tuple[int, int]
) -> dict[str, Any]:
    replaces = patch.get(_DIRECTIVE) == "replace"
    merged: dict[str, Any] = {} if replaces else dict(copy.deepcopy(base))
    for name, value in patch.items():
        if name == _DIRECTIVE:
            _check_directive(value, path)
            continue
        field = find_field(type_name, name, path, version)
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge_value(merged.get(name), value, field, f"{path}.{name}", version)
    return merged


def _merge_value(base: Any, value: Any, field: Field, path: str, version: tuple[int, int]) -> Any:
    kind = field.kind
    if kind.startswith("#") and isinstance(value, Mapping):
        return _merge_mapping(base or {}, value, kind[1:], path, version)
    if kind.startswith("{}") and isinstance(value, Mapping):
        merged = {**(base or {}), **value}
        return {name: item for name, item in merged.items() if item is not None}
    if kind.startswith("[]#") and field.merge_key is not None and isinstance(value, (list, tuple)):
        return _merge_list(base or [], value, field, path, version)
    return copy.deepcopy(value)


def _merge_list(base: Any, items: Any, field: Field, path: str, version: tuple[int, int]) -> list[Any]:
    key, type_name = str(field.merge_key), field.kind[3:]
    merged = list(copy.deepcopy(base))
    for index, item in enumerate(items):
        where = f"{path}[{index}]"
        if not isinstance(item, Mapping) or (key not in item and item.get(_DIRECTIVE) != "replace"):
            raise OptionError(
                f"{where} must be a mapping with {key}, which identifies the items of this list", "pod_template"
            )
        if item.get(_DIRECTIVE) == "replace" and key not in item:
            merged.clear()
            continue
        position = next((i for i, old in enumerate(merged) if old.get(key) == item[key]), None)
        if item.get(_DIRECTIVE) == "delete":
            if position is not None:
                del merged[position]
            continue
        old = {} if position is None or field.retain else merged[position]
        new = _merge_mapping(old, item, type_name, where, version)
        if position is None:
            merged.append(new)
        else:
            merged[position] = new
    return merged


def _check_directive(value: Any, path: str) -> None:
    if value not in ("delete", "replace", "merge"):
        raise OptionError(f"{path}.{_DIRECTIVE} {value!r} is not one of delete, merge, replace", "pod_template")
