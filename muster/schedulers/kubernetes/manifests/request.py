"""From an AppDef to the documents of a submission: pure, offline, deterministic; holds no secret."""

import base64
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from muster.schedulers.errors import SchedulerError
from muster.schedulers.kubernetes.labels import APPDEF_ANNOTATION
from muster.schedulers.kubernetes.manifests.app_annotation import encode_app
from muster.schedulers.kubernetes.manifests.bundles import METADATA_KEY, build_bundles, build_config_map
from muster.schedulers.kubernetes.manifests.dry_run import render_documents
from muster.schedulers.kubernetes.manifests.inputs import AppInputs, build_inputs
from muster.schedulers.kubernetes.manifests.job import build_jobs, build_service
from muster.schedulers.kubernetes.manifests.jobset import build_jobset
from muster.schedulers.kubernetes.manifests.pod import build_labels
from muster.schedulers.kubernetes.manifests.pod_group import VOLCANO_VERSION, add_pod_group, native_version
from muster.schedulers.kubernetes.manifests.volcano import build_volcano_job
from muster.schedulers.kubernetes.manifests.volumes import needs_bundle
from muster.schedulers.kubernetes.names import config_map_name, secret_name
from muster.schedulers.kubernetes.options import Options, parse_options
from muster.schedulers.kubernetes.schema import check_document
from muster.schedulers.naming import derive_token

PARENT_KINDS: Final = ("Job", "JobSet")
"""The first of these in a request owns all other objects."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a submission creates, in order. Prints as YAML."""

    name: str
    options: Options
    documents: list[dict[str, Any]]
    minimum: int
    """Pods that must run at the same time."""
    elastic: bool
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What `with_token` puts into the Secret beside the tokens."""
    token_roles: Mapping[str, str] = field(default_factory=dict)
    """Key in the Secret -> name of the agent role whose token it holds."""
    images_to_push: Mapping[str, Any] = field(default_factory=dict)
    """As TorchX's `push_images` wants them; only with `image_repo`."""

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
    """Builds the documents of one app. Mutates nothing, asks nobody.

    Args:
        app: a `torchx.specs.AppDef`.
        cfg: resolved options.
        name: the app's unique name, a DNS label.
        token: the app's secret; None leaves the Secret without data, as a dry run prints it.
        workspaces: packed folders by the key that `Role.metadata` carries.
        images_to_push: goes into the request as it is.

    Raises:
        SchedulerError: one line that names what is wrong and what is allowed.
    """
    options = parse_options(cfg)
    packed = dict(workspaces or {})
    keys = {role.name: role.metadata[METADATA_KEY] for role in app.roles if role.metadata.get(METADATA_KEY) in packed}
    plan = build_inputs(app, options, name=name, workspaces=keys)
    documents = [*_build_supplies(plan, token, packed), *_build_workload(plan)]
    documents = _add_gang(plan, documents)
    for document in documents:
        _set_namespace(document, options.namespace)
        check_document(document, options.schema_version)
    elastic = any(role.elastic for role in plan.roles)
    return Request(
        name=name,
        options=options,
        documents=documents,
        minimum=plan.minimum,
        elastic=elastic,
        secrets=plan.secret_values,
        token_roles=plan.token_roles,
        images_to_push=images_to_push or {},
    )


def _build_supplies(plan: AppInputs, token: str | None, packed: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """What must be there before the first pod: a Secret 2 s late delays its container by 11 s (seen on 1.36)."""
    labels = build_labels(plan)
    supplies: list[dict[str, Any]] = []
    if plan.token_roles or plan.secret_values:
        tokens = {} if token is None else _derive_tokens(token, plan.token_roles)
        supplies.append(build_secret(secret_name(plan.name), labels, tokens))
    if any(needs_bundle(plan, role) for role in plan.roles):
        needs_agent = bool(plan.token_roles) and plan.options.agent == "bundled"
        used = {role.workspace for role in plan.roles if role.workspace}
        bundles = build_bundles({key: packed[key] for key in sorted(used)}, needs_agent=needs_agent)
        supplies.append(build_config_map(config_map_name(plan.name), labels, bundles))
    if plan.options.flavor == "job":
        supplies.append(build_service(plan))
    return supplies


def build_secret(name: str, labels: Mapping[str, str], values: Mapping[str, str]) -> dict[str, Any]:
    """The Secret with some values, or without data."""
    secret: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": dict(labels)},
        "type": "Opaque",
    }
    return {**secret, "data": _encode(values)} if values else secret


def _encode(values: Mapping[str, str]) -> dict[str, str]:
    return {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}


def _build_workload(plan: AppInputs) -> list[dict[str, Any]]:
    if plan.options.flavor == "job":
        workload = build_jobs(plan)
    elif plan.options.flavor == "jobset":
        workload = [build_jobset(plan)]
    else:
        workload = [build_volcano_job(plan)]
    if plan.options.suspend and plan.options.flavor == "volcano":
        raise SchedulerError("suspend=true is not possible with flavor=volcano, whose Jobs cannot be made suspended")
    workload[0]["metadata"].setdefault("annotations", {})[APPDEF_ANNOTATION] = encode_app(plan.app)
    return workload


def _add_gang(plan: AppInputs, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    options = plan.options
    if options.flavor != "job" or options.resolved_gang not in ("podgroup", "volcano"):
        return documents
    if options.resolved_gang == "volcano":
        return add_pod_group(documents, api_version=VOLCANO_VERSION, minimum=plan.minimum, queue=options.queue)
    version = native_version(options.schema_version)
    if version is None:
        raise SchedulerError(
            f"gang=podgroup needs Kubernetes 1.36 or newer; kube_version is "
            f"{options.schema_version[0]}.{options.schema_version[1]}"
        )
    return add_pod_group(documents, api_version=version, minimum=plan.minimum)


def _set_namespace(document: dict[str, Any], namespace: str | None) -> None:
    if namespace:
        metadata = document["metadata"]
        document["metadata"] = {"name": metadata["name"], "namespace": namespace, **metadata}


def _derive_tokens(token: str, roles: Mapping[str, str]) -> dict[str, str]:
    return {key: derive_token(token, role) for key, role in roles.items()}


def with_token(request: Request, token: str, namespace: str) -> list[dict[str, Any]]:
    """Copies of the request's documents as they are sent: in their namespace, the Secret filled."""
    documents = [copy.deepcopy(document) for document in request.documents]
    values = {**request.secrets, **_derive_tokens(token, request.token_roles)}
    for document in documents:
        document["metadata"]["namespace"] = namespace
        if document["kind"] == "Secret" and document["metadata"]["name"].startswith(f"{request.name}-"):
            document["data"] = {**_encode(values), **document.get("data", {})}
    return documents
