"""Builds the documents of a submission from an AppDef: pure, offline, deterministic, without secrets.

`build_request` builds what a dry run prints. `complete_documents` adds what only the submission knows, and nothing else
changes them. `Request.describe_additions` names these additions.

A dry run prints files and the AppDef's annotation by name, size and digest or, with `dryrun=full`, whole. `kubectl
create` takes what `dryrun=full` prints. It does not take the summary, on purpose: its files are not base64.
"""

import base64
import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from muster._shared.contract import TOKEN_PLACEHOLDER
from muster.schedulers.errors import SchedulerError
from muster.schedulers.kubernetes import kube
from muster.schedulers.kubernetes.manifests import bundles, jobs
from muster.schedulers.kubernetes.manifests.features import build_feature_objects
from muster.schedulers.kubernetes.manifests.inputs import SECRET_ARGUMENT, AppInputs, build_inputs
from muster.schedulers.kubernetes.manifests.pod import build_labels, needs_agent
from muster.schedulers.kubernetes.options import parse_options
from muster.schedulers.naming import derive_token
from muster.schedulers.secret_variables import MASK, is_secret, mask_args


@dataclass(frozen=True, kw_only=True)
class Request:
    """The objects that a submission creates, in order. It is never changed. Prints as YAML."""

    inputs: AppInputs = field(repr=False)
    documents: Sequence[Mapping[str, Any]]
    images_to_push: Mapping[str, Any] = field(default_factory=dict)
    """The argument of TorchX's `push_images`, only with `image_repo`."""

    @property
    def parents(self) -> Sequence[Mapping[str, Any]]:
        """The documents that own the others."""
        return [document for document in self.documents if document["kind"] in kube.PARENT_KINDS]

    @property
    def has_several_jobs(self) -> bool:
        """Whether the roles are Jobs of Kubernetes. None of them ends because another one has failed."""
        return self.inputs.options.flavor == "job" and len(self.inputs.roles) > 1

    @property
    def may_add_pod_group(self) -> bool:
        """Whether the cluster decides if the app gets a PodGroup."""
        options = self.inputs.options
        return options.flavor == "job" and options.resolved_gang == "auto" and self.inputs.minimum > 1

    def describe_additions(self) -> list[str]:
        """Return what a submission adds to the documents, for the dry run."""
        added = [] if self.inputs.options.namespace else ["the namespace of the context"]
        added += ["the values of the Secret"] if self.inputs.token_roles or self.inputs.secret_values else []
        owners = ", ".join(parent["metadata"]["name"] for parent in self.parents)
        added += [f"the annotation {kube.SUBMISSION_ANNOTATION}", f"ownerReferences to {owners}"]
        added += ["a PodGroup if the cluster has them (gang=auto)"] if self.may_add_pod_group else []
        return added

    def __str__(self) -> str:
        return render_request(self.documents, self.inputs, self.describe_additions())


def build_request(
    app: Any,
    cfg: Mapping[str, Any],
    *,
    name: str,
    workspaces: Mapping[str, bytes] | None = None,
    images_to_push: Mapping[str, Any] | None = None,
    submitter: str = "",
) -> Request:
    """Build the documents of one app. Changes no argument, contacts no cluster.

    Args:
        app: a `torchx.specs.AppDef`.
        cfg: resolved options.
        name: the app's unique name, a DNS label.
        workspaces: packed folders, by the key in `Role.metadata`.
        images_to_push: copied to the request.
        submitter: the submitting user, as a valid label value. "": no label says it.

    Raises:
        SchedulerError: one line with the wrong value and what is allowed.
    """
    options = parse_options(cfg)
    packed = dict(workspaces or {})
    keys = {
        role.name: role.metadata[kube.WORKSPACE_KEY]
        for role in app.roles
        if role.metadata.get(kube.WORKSPACE_KEY) in packed
    }
    inputs = build_inputs(app, options, name=name, workspaces=keys, submitter=submitter)
    documents = [*_build_prerequisites(inputs, packed), *_build_workload(inputs)]
    documents = _add_gang(inputs, documents)
    for document in documents if options.namespace else ():
        metadata = document["metadata"]
        document["metadata"] = {"name": metadata["name"], "namespace": options.namespace, **metadata}
    return Request(inputs=inputs, documents=tuple(documents), images_to_push=images_to_push or {})


def _build_prerequisites(inputs: AppInputs, packed: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Return what must exist before the first pod: a Secret 2 s late delays a container by 11 s (measured on 1.36)."""
    labels = build_labels(inputs)
    prerequisites: list[dict[str, Any]] = []
    if inputs.token_roles or inputs.secret_values:
        # Without its values.
        head = {"name": kube.build_secret_name(inputs.name), "labels": dict(labels)}
        prerequisites.append(kube.build_document(kube.SECRET, head, type="Opaque"))
    if any(needs_agent(inputs, role) for role in inputs.roles):
        prerequisites.append(bundles.build_agent_config_map(kube.build_config_map_name(inputs.name), labels))
    used = {role.workspace: packed[role.workspace] for role in inputs.roles if role.workspace}
    if used:
        prerequisites.append(bundles.build_workspace_secret(kube.build_workspace_name(inputs.name), labels, used))
    if inputs.options.flavor == "job":
        prerequisites.append(jobs.build_service(inputs))
    return prerequisites + build_feature_objects(inputs, labels)


def _build_workload(inputs: AppInputs) -> list[dict[str, Any]]:
    workload = jobs.build_jobs(inputs) if inputs.options.flavor == "job" else [jobs.build_jobset(inputs)]
    encoded = bundles.encode_app(inputs.app)
    for parent in workload:  # one role's Job may be deleted first
        parent["metadata"].setdefault("annotations", {})[kube.APPDEF_ANNOTATION] = encoded
    return workload


def _add_gang(inputs: AppInputs, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    options = inputs.options
    if options.resolved_gang not in ("podgroup", "volcano"):
        return documents
    is_native = options.resolved_gang == "podgroup"
    version = jobs.find_native_version(options.schema_version) if is_native else kube.VOLCANO_POD_GROUP_VERSION
    if version is None:
        raise SchedulerError(
            f"gang=podgroup needs Kubernetes 1.36 or newer; kube_version is "
            f"{options.schema_version[0]}.{options.schema_version[1]}"
        )
    return jobs.add_pod_group(documents, version, inputs)


# -- what only the submission knows -----------------------------------------------------------------------------------


def complete_documents(
    request: Request, *, namespace: str, secret: str, submission_id: str, pod_group_version: str | None = None
) -> list[dict[str, Any]]:
    """Copy of the request's documents, ready to send. The owner's uid is known only once it exists.

    Args:
        request: see `build_request`.
        namespace: of the objects.
        secret: the app's, from which the tokens of its roles follow.
        submission_id: of this submission.
        pod_group_version: the cluster's version of PodGroup, one of `POD_GROUP_VERSIONS`. It is given only with
            `Request.may_add_pod_group`.
    """
    documents = [copy.deepcopy(dict(document)) for document in request.documents]
    inputs = request.inputs
    if pod_group_version is not None:
        documents = jobs.add_pod_group(documents, pod_group_version, inputs)
    tokens = {key: derive_token(secret, role) for key, role in inputs.token_roles.items()}
    values = {**inputs.secret_values, **tokens}
    for document in documents:
        metadata = document["metadata"]
        metadata["namespace"] = namespace
        metadata.setdefault("annotations", {})[kube.SUBMISSION_ANNOTATION] = submission_id
        if document["kind"] == "Secret" and metadata["name"] == kube.build_secret_name(inputs.name):
            document["data"] = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    return documents


_FILE_FIELDS: Final = frozenset({"binaryData", "data"})

_REFERENCE: Final = re.compile(re.escape(f"$({SECRET_ARGUMENT})").replace(re.escape("{number}"), r"\d+"))
"""A reference to a variable that our Secret has."""

_WHOLE: Final = "Printed whole, since it differs from node to node and no Secret can hold it"
_SUMMARY: Final = "# A summary, not for kubectl: -cfg dryrun=full prints the files and the AppDef whole.\n"
_CREATE: Final = "# For kubectl create -f FILE, or apply --server-side -f FILE: plain apply refuses large objects.\n"
_PLACEHOLDERS: Final = "# Placeholders. Put values in: sed -i {expressions} FILE\n"


def render_request(documents: Sequence[Mapping[str, Any]], inputs: AppInputs, additions: Sequence[str]) -> str:
    """Print the documents as one YAML stream, in the order of creation, with placeholders for the values of our Secret.

    Args:
        documents: plain dicts.
        inputs: what they were built from.
        additions: what a submission adds.
    """
    full = inputs.options.dryrun == "full"
    heading = "".join(f"# {line}\n" for line in ("A submission adds:", *(f"  {text}" for text in additions)))
    heading += _CREATE if full else _SUMMARY
    secrets: list[str] = []
    masked = [_mask(document, secrets) for document in documents]
    heading += "".join(f"# {_WHOLE}: {each}\n" for each in dict.fromkeys(secrets)) if full else ""
    values = {key: TOKEN_PLACEHOLDER.format(key=key) for key in inputs.token_roles}
    values |= {key: f"<{key}>" for key in inputs.secret_values}
    return heading + "---\n".join(_render(each, values, full=full) for each in (documents if full else masked))


def _render(document: Mapping[str, Any], placeholders: Mapping[str, str], *, full: bool) -> str:
    import yaml

    shown, comment = dict(document), ""
    if shown["kind"] == "Secret" and "data" not in shown:
        shown["stringData"] = dict(placeholders)
        comment = _PLACEHOLDERS.format(expressions=" ".join(map(_build_expression, placeholders.values())))
    if not full:
        shown["metadata"] = _summarize_app(shown["metadata"])
        for part in shown.keys() & _FILE_FIELDS:
            shown[part] = {name: _summarize(text) for name, text in shown[part].items()}
    # A mapping that occurs twice is written twice, for any YAML reader.
    plain = json.loads(json.dumps(shown))
    return comment + str(yaml.safe_dump(plain, sort_keys=False, default_flow_style=False, width=120))


def _build_expression(placeholder: str) -> str:
    """Return how `sed` replaces a placeholder: a token by a random one, a variable by the one of the user's shell."""
    name = placeholder.strip("<>")
    value = "$(openssl rand -hex 32)" if name.startswith("token-") else f"${name.partition('.')[2]}"
    return f'-e "s|{placeholder}|{value}|"'


def _summarize_app(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    encoded = (metadata.get("annotations") or {}).get(kube.APPDEF_ANNOTATION)
    if encoded is None:
        return metadata
    return {**metadata, "annotations": {**metadata["annotations"], kube.APPDEF_ANNOTATION: _summarize(encoded)}}


def _mask(content: Any, found: list[str]) -> Any:
    """Return the commands and variables without what looks secret in them.

    Args:
        content: of a document.
        found: gets what is masked and is not in our Secret, because its value differs from node to node.
    """
    if isinstance(content, Mapping):
        name, value = content.get("name"), content.get("value")
        if isinstance(name, str) and isinstance(value, str) and is_secret(name, value):
            found.append(f"{name}={MASK}")
            return {**content, "value": MASK}
        return {
            key: _mask_words(each, found)
            if key in ("command", "args") and isinstance(each, list)
            else _mask(each, found)
            for key, each in content.items()
        }
    return [_mask(each, found) for each in content] if isinstance(content, list) else content


def _mask_words(words: Sequence[str], found: list[str]) -> list[str]:
    masked = mask_args(words)
    for flag, word, shown in zip(["", *words], words, masked, strict=False):
        if word != shown and not _REFERENCE.search(word):
            found.append(f"{flag} {MASK}" if shown == MASK and flag.startswith("-") else shown)
    return masked


def _summarize(content: str) -> str:
    raw = base64.b64decode(content)
    return f"<{len(raw):,} bytes, sha256 {hashlib.sha256(raw).hexdigest()[:16]}>"
