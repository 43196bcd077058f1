"""Merges the user's `pod_template` into ours, the way `kubectl patch --type strategic` would.

Lists of named items (containers, volumes, env, ports) are merged item by item. Other lists are replaced. `null` removes
a field, `$patch: delete` an item, `$patch: replace` all earlier items or fields. Fields that the version of Kubernetes
does not have are refused offline; the API server checks their values.

`fields.json` is derived from the OpenAPI schemas of every version we support (`tests/doubles/kubernetes_fields.py`
writes it, a test compares it with them).

Source: kubernetes/community, contributors/devel/sig-api-machinery/strategic-merge-patch.md.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from muster.schedulers.errors import OptionError, SchedulerError
from muster.schedulers.kubernetes import kube

MINIMUM: Final = (1, 29)
"""Fixed number of nodes: backoffLimitPerIndex and podReplacementPolicy are enabled by default."""

MINIMUM_ELASTIC: Final = (1, 31)
"""Elastic jobs: successPolicy is enabled by default."""

VERSION_SENTENCE: Final = (
    f"Kubernetes {MINIMUM[0]}.{MINIMUM[1]} or newer is needed for a fixed number of nodes, "
    f"{MINIMUM_ELASTIC[0]}.{MINIMUM_ELASTIC[1]} for elastic jobs"
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """The whole of `fields.json`."""

    newest: tuple[int, int]
    types: Mapping[str, Mapping[str, Any]]
    """Name -> the rows of its fields."""


def parse_version(text: str) -> tuple[int, int]:
    """Parse `1.31`, `v1.31.4` or a cloud's `1.31+`: (1, 31).

    Raises:
        ValueError: the text is not a version.
    """
    major, _, rest = text.removeprefix("v").partition(".")
    minor = rest.partition(".")[0].rstrip("+")
    return int(major), int(minor)


def check_version(version: tuple[int, int], *, elastic: bool, source: str) -> None:
    """Refuse a version that lacks what the job needs.

    Args:
        version: of the cluster, or the one that `kube_version` names.
        elastic: whether a role has fewer minimum than maximum replicas.
        source: of the version, for the message: "the server" or "kube_version".

    Raises:
        SchedulerError: too old.
    """
    if version < (MINIMUM_ELASTIC if elastic else MINIMUM):
        raise SchedulerError(f"{VERSION_SENTENCE}; {source} is {version[0]}.{version[1]}")


@lru_cache(maxsize=1)
def load_table() -> Table:
    """Read `fields.json`, once per process."""
    raw = json.loads((Path(__file__).parent / "fields.json").read_text())
    return Table(newest=parse_version(raw["newest"]), types=raw["types"])


def find_field(type_name: str, name: str, path: str, version: tuple[int, int]) -> Mapping[str, Any]:
    """Return the row of the field `name` of a type.

    Its `kind` is "string", "#Container", "[]#Container", "{}string"... Its `key` identifies a list's items when a patch
    is merged; without it the patch's list replaces the list. `retain`: a merged item is replaced as a whole (a volume
    has one source). `since` and `until`: the first and the last version that has it.

    Raises:
        OptionError: this version has no such field. The message suggests a similar name.
    """
    fields = load_table().types[type_name]
    if name not in fields:
        type_word = type_name.rpartition(".")[2]
        raise OptionError(f"{path}.{name} is not a field of {type_word}{_suggest(name, fields)}", "pod_template")
    row: Mapping[str, Any] = {"kind": fields[name]} if isinstance(fields[name], str) else fields[name]
    newest = ".".join(map(str, load_table().newest))
    since, until = row.get("since", "1.29"), row.get("until", newest)
    if not parse_version(since) <= version <= parse_version(until):
        given = ".".join(map(str, version))
        raise OptionError(f"{path}.{name} exists in Kubernetes {since} to {until}, not in {given}", "pod_template")
    return row


def _suggest(name: str, known: Mapping[str, Any]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known))}"


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
    """
    spec = patch.get("spec")
    for name, reason in _RESERVED_FIELDS.items():
        if isinstance(spec, Mapping) and name in spec:
            raise OptionError(f"pod_template.spec.{name} cannot be set: {reason}", "pod_template")
    merged = _merge_mapping(template, patch, "PodTemplateSpec", "pod_template", version)
    _check_labels(template, merged)
    _check_images(merged)
    return merged


def _check_images(merged: Mapping[str, Any]) -> None:
    """Refuse a container without an image. The schema allows it, because a controller may fill the image in."""
    spec = merged.get("spec") or {}
    for container in (each for name in ("initContainers", "containers") for each in spec.get(name) or ()):
        if not container.get("image"):
            raise OptionError(
                f"pod_template adds a container {container['name']!r} without an image; muster's container is "
                f"{kube.CONTAINER!r}",
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
            if value not in ("delete", "replace", "merge"):
                raise OptionError(f"{path}.{_DIRECTIVE} {value!r} is not one of delete, merge, replace", "pod_template")
            continue
        field = find_field(type_name, name, path, version)
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge_value(merged.get(name), value, field, f"{path}.{name}", version)
    return merged


def _merge_value(base: Any, value: Any, field: Mapping[str, Any], path: str, version: tuple[int, int]) -> Any:
    kind = field["kind"]
    if kind.startswith("#"):
        return _merge_mapping(base or {}, _check_form(value, Mapping, path), kind[1:], path, version)
    if kind.startswith("{}"):
        merged = {**(base or {}), **_check_form(value, Mapping, path)}
        return {name: item for name, item in merged.items() if item is not None}
    if kind.startswith("[]#") and "key" in field:
        return _merge_list(base or [], _check_form(value, list, path), field, path, version)
    return copy.deepcopy(value)


def _check_form(value: Any, form: type[Any], path: str) -> Any:
    if not isinstance(value, form):
        word = "list" if form is list else "mapping"
        raise OptionError(f"{path} must be a {word}, not {value!r}", "pod_template")
    return value


def _merge_list(base: Any, items: Any, field: Mapping[str, Any], path: str, version: tuple[int, int]) -> list[Any]:
    key, type_name = field["key"], field["kind"][3:]
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
        old = {} if position is None or field.get("retain") else merged[position]
        new = _merge_mapping(old, item, type_name, where, version)
        if position is None:
            merged.append(new)
        else:
            merged[position] = new
    return merged
