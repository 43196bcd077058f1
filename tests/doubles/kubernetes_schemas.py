"""Kubernetes' published strict schemas, JobSet's models, and a schema of the fields of Volcano that we emit.

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

    if document["apiVersion"].startswith("bus.volcano"):
        return
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
    load_validator(version, f"{document['kind'].lower()}-{group}").validate(document)


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
    elif document["apiVersion"].startswith("batch.volcano"):
        check_volcano(document)
        for task in document["spec"]["tasks"]:
            template = {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": "x"},
                "template": task["template"],
            }
            validate_published(template, version)
    elif document["apiVersion"] != "scheduling.volcano.sh/v1beta1":
        validate_published(document, version)


def check_jobset(document):
    """The models drop unknown fields: the output must equal the input."""
    from kubeflow_trainer_api import models

    shell = copy.deepcopy(document)
    for job in shell["spec"]["replicatedJobs"]:
        job["template"].pop("spec")  # checked against Kubernetes' own schema
    model = models.JobsetV1alpha2JobSet.from_dict(copy.deepcopy(shell))
    assert prune(json.loads(model.to_json())) == prune(shell)


def prune(value):
    if isinstance(value, dict):
        return {key: prune(item) for key, item in value.items() if item is not None and item != {}}
    return [prune(item) for item in value] if isinstance(value, list) else value


VOLCANO_POLICY = {
    "type": "object",
    "additionalProperties": False,
    "required": ["action"],
    "properties": {
        "action": {"enum": ["RestartPod", "RestartJob", "TerminateJob", "CompleteJob"]},
        "event": {"enum": ["PodFailed", "TaskCompleted"]},
        "exitCode": {"type": "integer", "not": {"const": 0}},
    },
    "oneOf": [{"required": ["event"]}, {"required": ["exitCode"]}],
}
VOLCANO_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "batch.volcano.sh/v1alpha1"},
        "kind": {"const": "Job"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["minAvailable", "schedulerName", "tasks"],
            "properties": {
                "schedulerName": {"const": "volcano"},
                "minAvailable": {"type": "integer", "minimum": 1},
                "maxRetry": {"type": "integer", "minimum": 0},
                "queue": {"type": "string"},
                "priorityClassName": {"type": "string"},
                "ttlSecondsAfterFinished": {"type": "integer", "minimum": 0},
                "plugins": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "string"}}},
                "tasks": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["name", "replicas", "template"],
                        "properties": {
                            "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
                            "replicas": {"type": "integer", "minimum": 0},
                            "minAvailable": {"type": "integer", "minimum": 0},
                            "maxRetry": {"type": "integer", "minimum": 1},
                            "policies": {"type": "array", "items": VOLCANO_POLICY},
                            "template": {"type": "object"},
                        },
                    },
                },
            },
        },
    },
}


def check_volcano(document):
    import jsonschema

    jsonschema.validate(document, VOLCANO_SCHEMA)
    spec = document["spec"]
    assert spec["minAvailable"] <= sum(task["replicas"] for task in spec["tasks"])
    assert all(task["minAvailable"] <= task["replicas"] for task in spec["tasks"])
    names = [task["name"] for task in spec["tasks"]]
    assert len(set(names)) == len(names)
    for task in spec["tasks"]:
        events = [policy.get("event", policy.get("exitCode")) for policy in task["policies"]]
        assert len(set(events)) == len(events), "the webhook refuses an event with two actions"
