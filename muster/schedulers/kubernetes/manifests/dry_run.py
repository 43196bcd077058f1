"""Prints documents as YAML: files and the AppDef's annotation by name, size and digest or, with `dryrun=full`, whole.

`kubectl create` takes what `dryrun=full` prints. It does not take the summary, on purpose: its files are not base64.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from muster._shared.contract import TOKEN_PLACEHOLDER
from muster.schedulers.kubernetes.labels import APPDEF_ANNOTATION
from muster.schedulers.kubernetes.manifests.inputs import SECRET_ARGUMENT, AppInputs
from muster.schedulers.secret_variables import MASK, is_secret, mask_args

_FILE_FIELDS: Final = ("binaryData", "data")
_FILE_MARK: Final = "@@file-{index}@@"

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
    # Base64 takes the emitter half a second a megabyte.
    files = [(field, name, text) for field in _FILE_FIELDS for name, text in shown.get(field, {}).items()]
    for index, (field, name, _) in enumerate(files):
        shown[field] = {**shown[field], name: _FILE_MARK.format(index=index)}
    text: str = yaml.dump(shown, Dumper=_build_dumper(), sort_keys=False, default_flow_style=False, width=120)
    for index, (_, _, content) in enumerate(files):
        text = text.replace(f"'{_FILE_MARK.format(index=index)}'", json.dumps(content if full else _summarize(content)))
    return comment + text


def _build_expression(placeholder: str) -> str:
    """Return how `sed` replaces a placeholder: a token by a random one, a variable by the one of the user's shell."""
    name = placeholder.strip("<>")
    value = "$(openssl rand -hex 32)" if name.startswith("token-") else f"${name.partition('.')[2]}"
    return f'-e "s|{placeholder}|{value}|"'


def _summarize_app(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    encoded = (metadata.get("annotations") or {}).get(APPDEF_ANNOTATION)
    if encoded is None:
        return metadata
    return {**metadata, "annotations": {**metadata["annotations"], APPDEF_ANNOTATION: _summarize(encoded)}}


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


def _build_dumper() -> Any:
    """Return a dumper without anchors: writes a mapping that occurs twice twice, for any YAML reader."""
    import yaml

    class PlainDumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # PyYAML's signature
            return True

    return PlainDumper
