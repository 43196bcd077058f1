"""Builds the documents of a submission from an AppDef: pure, offline, deterministic, without secrets."""

import base64
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from muster.schedulers.errors import SchedulerError
from muster.schedulers.kubernetes.kinds import PARENT_KINDS, VOLCANO_POD_GROUP_VERSION
from muster.schedulers.kubernetes.labels import APPDEF_ANNOTATION
from muster.schedulers.kubernetes.manifests.app_annotation import encode_app
from muster.schedulers.kubernetes.manifests.config_map import METADATA_KEY, build_bundles, build_config_map
from muster.schedulers.kubernetes.manifests.dry_run import render_documents
from muster.schedulers.kubernetes.manifests.inputs import AppInputs, build_inputs
from muster.schedulers.kubernetes.manifests.job import build_jobs, build_service
from muster.schedulers.kubernetes.manifests.jobset import build_jobset
from muster.schedulers.kubernetes.manifests.pod import build_labels
from muster.schedulers.kubernetes.manifests.pod_group import add_pod_group, find_native_version
from muster.schedulers.kubernetes.manifests.volcano import build_volcano_job
from muster.schedulers.kubernetes.manifests.volumes import needs_bundle
from muster.schedulers.kubernetes.names import build_config_map_name, build_secret_name
from muster.schedulers.kubernetes.options import Options, parse_options
from muster.schedulers.kubernetes.schema import check_document
from muster.schedulers.naming import derive_token


@dataclass(frozen=True, kw_only=True)
class Request:
    """The objects that a submission creates, in order. Prints as YAML."""

    name: str
    options: Options
    documents: list[dict[str, Any]]
    minimum: int
    """Pods that must run at the same time."""
    elastic: bool
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What `complete_documents` writes to the Secret besides the tokens."""
    token_roles: Mapping[str, str] = field(default_factory=dict)
    """Key in the Secret -> name of the agent role whose token it is."""
    images_to_push: Mapping[str, Any] = field(default_factory=dict)
    """The argument of TorchX's `push_images`; only with `image_repo`."""

    @property
    def parent(self) -> dict[str, Any]:
        """The document that owns the others."""
        return next(document for document in self.documents if document["kind"] in PARENT_KINDS)

    def __str__(self) -> str:
        return render_documents(self.documents, token_keys=list(self.token_roles), secret_keys=list(self.secrets))


def build_request(
    app: Any,
    cfg: Mapping[str, Any],
    *,
    name: str,
    token: str | None = None,
    workspaces: Mapping[str, bytes] | None = None,
    images_to_push: Mapping[str, Any] | None = None,
) -> Request:
    """Builds the documents of one app. Changes no argument, contacts no cluster.

    Args:
        app: a `torchx.specs.AppDef`.
        cfg: resolved options.
        name: the app's unique name, a DNS label.
        token: the app's secret; None: a Secret without data, as in a dry run.
        workspaces: packed folders, by the key in `Role.metadata`.
        images_to_push: copied to the request.

    Raises:
        SchedulerError: one line with the wrong value and what is allowed.
    """
    options = parse_options(cfg)
    packed = dict(workspaces or {})
    keys = {role.name: role.metadata[METADATA_KEY] for role in app.roles if role.metadata.get(METADATA_KEY) in packed}
    inputs = build_inputs(app, options, name=name, workspaces=keys)
    documents = [*_build_prerequisites(inputs, token, packed), *_build_workload(inputs)]
    documents = _add_gang(inputs, documents)
    for document in documents:
        _set_namespace(document, options.namespace)
        check_document(document, options.schema_version)
    elastic = any(role.elastic for role in inputs.roles)
    return Request(
        name=name,
        options=options,
        documents=documents,
        minimum=inputs.minimum,
        elastic=elastic,
        secrets=inputs.secret_values,
        token_roles=inputs.token_roles,
        images_to_push=images_to_push or {},
    )


def _build_prerequisites(inputs: AppInputs, token: str | None, packed: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """What must exist before the first pod: a Secret 2 s late delays a container by 11 s (measured on 1.36)."""
    labels = build_labels(inputs)
    prerequisites: list[dict[str, Any]] = []
    if inputs.token_roles or inputs.secret_values:
        tokens = {} if token is None else _derive_tokens(token, inputs.token_roles)
        prerequisites.append(build_secret(build_secret_name(inputs.name), labels, tokens))
    if any(needs_bundle(inputs, role) for role in inputs.roles):
        needs_agent = bool(inputs.token_roles) and inputs.options.agent == "bundled"
        used = {role.workspace for role in inputs.roles if role.workspace}
        bundles = build_bundles({key: packed[key] for key in sorted(used)}, needs_agent=needs_agent)
        prerequisites.append(build_config_map(build_config_map_name(inputs.name), labels, bundles))
    if inputs.options.flavor == "job":
        prerequisites.append(build_service(inputs))
    return prerequisites


def build_secret(name: str, labels: Mapping[str, str], values: Mapping[str, str]) -> dict[str, Any]:
    """The Secret, with values or without data."""
    secret: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": dict(labels)},
        "type": "Opaque",
    }
    return {**secret, "data": _encode(values)} if values else secret


def _encode(values: Mapping[str, str]) -> dict[str, str]:
    return {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}


def _build_workload(inputs: AppInputs) -> list[dict[str, Any]]:
    if inputs.options.flavor == "job":
        workload = build_jobs(inputs)
    elif inputs.options.flavor == "jobset":
        workload = [build_jobset(inputs)]
    else:
        workload = [build_volcano_job(inputs)]
    if inputs.options.suspend and inputs.options.flavor == "volcano":
        raise SchedulerError(
            "suspend=true cannot be used with flavor=volcano: a Volcano Job cannot be created suspended"
        )
    workload[0]["metadata"].setdefault("annotations", {})[APPDEF_ANNOTATION] = encode_app(inputs.app)
    return workload


def _add_gang(inputs: AppInputs, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    options = inputs.options
    if options.flavor != "job" or options.resolved_gang not in ("podgroup", "volcano"):
        return documents
    if options.resolved_gang == "volcano":
        return add_pod_group(
            documents, api_version=VOLCANO_POD_GROUP_VERSION, minimum=inputs.minimum, queue=options.queue
        )
    version = find_native_version(options.schema_version)
    if version is None:
        raise SchedulerError(
            f"gang=podgroup needs Kubernetes 1.36 or newer; kube_version is "
            f"{options.schema_version[0]}.{options.schema_version[1]}"
        )
    return add_pod_group(documents, api_version=version, minimum=inputs.minimum)


def _set_namespace(document: dict[str, Any], namespace: str | None) -> None:
    if namespace:
        metadata = document["metadata"]
        document["metadata"] = {"name": metadata["name"], "namespace": namespace, **metadata}


def _derive_tokens(token: str, roles: Mapping[str, str]) -> dict[str, str]:
    return {key: derive_token(token, role) for key, role in roles.items()}


def complete_documents(request: Request, token: str, namespace: str) -> list[dict[str, Any]]:
    """Copies of the request's documents, ready to send: with their namespace and the Secret's values."""
    documents = [copy.deepcopy(document) for document in request.documents]
    values = {**request.secrets, **_derive_tokens(token, request.token_roles)}
    for document in documents:
        document["metadata"]["namespace"] = namespace
        if document["kind"] == "Secret" and document["metadata"]["name"].startswith(f"{request.name}-"):
            document["data"] = {**_encode(values), **document.get("data", {})}
    return documents
