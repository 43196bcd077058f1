"""Kubernetes' published strict schemas, JobSet's models, and schemas of Volcano's PodGroup and of a PodMonitor.

They judge documents without any code of ours: the double of the API server and the tests of manifests use them.
"""

import copy
import importlib
import json
import re
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=64)
def load_validator(version, name):
    """The published strict schema of one kind. kubernetes_validate itself reads two megabytes for every document."""
    package = importlib.import_module("kubernetes_validate")
    import jsonschema
    import referencing

    folder = Path(package.__file__).parent / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    schema = json.loads((folder / f"{name}.json").read_text())
    registry = referencing.Resource.from_contents(schema) @ (load_definitions(folder) @ referencing.Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)


@lru_cache(maxsize=16)
def load_definitions(folder):
    from referencing import Resource

    return Resource.from_contents(json.loads((folder / "_definitions.json").read_text()))


class Unknown(ValueError):
    """A document that a schema refuses, in one line."""


def judge(document, version):
    """What the API server checks of a document before any rule of its own. Raises Unknown.

    Args:
        document: of any kind that we create.
        version: of the server, "1.36"; a newer one than the newest published is judged by that.
    """
    import jsonschema

    try:
        validate_strictly(document, "{}.{}".format(*min(parse(version), NEWEST)))
    except (jsonschema.ValidationError, AssertionError) as error:
        path = ".".join(str(part) for part in getattr(error, "absolute_path", ()))
        raise Unknown(f"{path}: {getattr(error, 'message', error)}") from error


NEWEST = (1, 37)


def parse(version):
    """(major, minor)"""
    return tuple(int(part.rstrip("+")) for part in version.split("."))


def validate_published(document, version):
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", document["apiVersion"])
    validate_text(version, f"{document['kind'].lower()}-{group}", json.dumps(document))


@lru_cache(maxsize=64)
def validate_text(version, name, text):
    """The dry run of a submission and the submission send equal documents."""
    load_validator(version, name).validate(json.loads(text))


def validate_strictly(document, version):
    if document["apiVersion"].startswith("jobset"):
        check_jobset(document)
        for job in document["spec"]["replicatedJobs"]:
            inner = {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": "x"},
                "spec": job["template"]["spec"],
            }
            validate_published(inner, version)
    elif document["apiVersion"] == "scheduling.volcano.sh/v1beta1":
        check_volcano_pod_group(document)
    elif document["apiVersion"] == "monitoring.coreos.com/v1":
        check_pod_monitor(document)
    else:
        validate_published(document, version)


def check_jobset(document):
    """The models drop unknown fields: the output must equal the input."""
    from kubeflow_trainer_api import models

    shell = json.loads(json.dumps(document))
    for job in shell["spec"]["replicatedJobs"]:
        job["template"].pop("spec")  # checked against Kubernetes' own schema
    model = models.JobsetV1alpha2JobSet.from_dict(copy.deepcopy(shell))
    assert prune(json.loads(model.to_json())) == prune(shell)


def prune(value):
    if isinstance(value, dict):
        return {key: prune(item) for key, item in value.items() if item is not None and item != {}}
    return [prune(item) for item in value] if isinstance(value, list) else value


VOLCANO_POD_GROUP = {
    "type": "object",
    "additionalProperties": False,
    "required": ["minMember"],
    "properties": {
        "minMember": {"type": "integer", "minimum": 1},
        "queue": {"type": "string", "maxLength": 253},
        "priorityClassName": {"type": "string", "maxLength": 253},
    },
}
"""What we write of the spec: fields of every release since 0.4. Source: volcano-sh/volcano at v0.4.2 to v1.15.1,
scheduling v1beta1."""


def check_volcano_pod_group(document):
    import jsonschema

    assert document["kind"] == "PodGroup"
    assert document.keys() <= {"apiVersion", "kind", "metadata", "spec"}
    jsonschema.validate(document["spec"], VOLCANO_POD_GROUP)


POD_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["selector", "podMetricsEndpoints"],
    "properties": {
        "selector": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}},
        },
        "podMetricsEndpoints": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {"port": {"type": "string"}, "path": {"type": "string"}},
            },
        },
    },
}
"""What we write of the spec. Source: prometheus-operator at v0.50.0 to v0.86.0, monitoring v1."""


def check_pod_monitor(document):
    import jsonschema

    assert document["kind"] == "PodMonitor"
    assert document.keys() == {"apiVersion", "kind", "metadata", "spec"}
    jsonschema.validate(document["spec"], POD_MONITOR)
