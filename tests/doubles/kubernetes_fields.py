"""Derives `muster/schedulers/kubernetes/fields.json` from the published schemas of Kubernetes.

The table has what a merge of pod templates needs: the fields of every type that is reachable from theirs, their kinds,
how lists are merged, and the first and last version (of those the schemas cover) that has each. Run this file to write
the table again.
"""

import json
from pathlib import Path
from typing import Any

import kubernetes_validate

ROOT = "io.k8s.api.core.v1.PodTemplateSpec"
OLDEST = (1, 29)
IGNORED = ("Status", "ManagedFieldsEntry")
PATH = Path(__file__).resolve().parents[2] / "muster" / "schedulers" / "kubernetes" / "fields.json"


def list_versions() -> list[str]:
    """Versions like "1.29" that the installed schemas cover, oldest first."""
    names = [name.rsplit(".", 1)[0] for name in kubernetes_validate.utils.all_versions()]
    return [name for name in names if tuple(map(int, name.split("."))) >= OLDEST]


def load_definitions(version: str) -> dict[str, Any]:
    """All type definitions of one version's strict schema."""
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    return json.loads((folder / "_definitions.json").read_text())["$defs"]


def derive_kind(schema: dict[str, Any]) -> tuple[str, str | None]:
    """A field's kind and the type it refers to: "[]" and "{}" precede the kind of their items."""
    if "$ref" in schema:
        target = schema["$ref"].rpartition("/")[2]
        if target.endswith(".Quantity"):
            return "quantity", None
        if target.endswith(".IntOrString"):
            return "int-or-string", None
        if target.endswith((".Time", ".MicroTime")):
            return "string", None
        if target.endswith(".FieldsV1"):
            return "any", None
        return "#" + target, target
    names = schema.get("type") or []
    names = [names] if isinstance(names, str) else [name for name in names if name != "null"]
    if names == ["array"]:
        inner, target = derive_kind(schema["items"])
        return "[]" + inner, target
    if names == ["object"]:
        if "additionalProperties" not in schema:
            return "any", None
        inner, target = derive_kind(schema["additionalProperties"])
        return "{}" + inner, target
    if len(names) == 1:
        return names[0], None
    raise ValueError(f"unexpected schema {schema}")


def shorten(name: str) -> str:
    """The type's own name; with its version only where two reachable types would clash."""
    parts = name.split(".")
    return parts[-1] if "scheduling" not in parts else ".".join(parts[-2:])


def build_fields() -> dict[str, Any]:
    """The whole table."""
    types: dict[str, dict[str, Any]] = {}
    known = list_versions()
    for version in known:
        definitions = load_definitions(version)
        waiting = [ROOT]
        seen = set(waiting)
        while waiting:
            name = waiting.pop()
            definition = definitions[name]
            entry = types.setdefault(shorten(name), {})
            for field, schema in definition.get("properties", {}).items():
                if schema.get("$ref", "").endswith("Status") or shorten(name).endswith(IGNORED):
                    continue
                kind, target = derive_kind(schema)
                if target is not None:
                    kind = kind.replace("#" + target, "#" + shorten(target))
                row = entry.setdefault(field, {"kind": kind, "since": version, "until": version})
                row["until"] = version
                key = schema.get("x-kubernetes-patch-merge-key")
                strategy = schema.get("x-kubernetes-patch-strategy", "")
                if key and "merge" in strategy:
                    row["key"] = key
                    row["retain"] = "retainKeys" in strategy
                if target is not None and target not in seen:
                    seen.add(target)
                    waiting.append(target)
    return {
        "source": "derived from the OpenAPI schemas published by the Kubernetes project (Apache-2.0)",
        "oldest": known[0],
        "newest": known[-1],
        "types": {name: compact(entry, known) for name, entry in sorted(types.items())},
    }


def compact(entry: dict[str, Any], known: list[str]) -> dict[str, Any]:
    """One type, without default values."""
    fields: dict[str, Any] = {}
    for name, row in sorted(entry.items()):
        extras = {"key": row["key"]} if "key" in row else {}
        if row.get("retain"):
            extras["retain"] = True
        if row["since"] != known[0]:
            extras["since"] = row["since"]
        if row["until"] != known[-1]:
            extras["until"] = row["until"]
        fields[name] = {"kind": row["kind"], **extras} if extras else row["kind"]
    return fields


def render(table: dict[str, Any]) -> str:
    """One line per type, so that diffs stay small."""
    lines = [f'"{key}": {json.dumps(table[key])},' for key in ("source", "oldest", "newest")]
    types = [f'"{name}": {json.dumps(entry)}' for name, entry in table["types"].items()]
    return "{\n" + "\n".join(lines) + '\n"types": {\n' + ",\n".join(types) + "\n}\n}\n"


if __name__ == "__main__":
    PATH.write_text(render(build_fields()))
