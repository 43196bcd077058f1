"""Prints documents as YAML that `kubectl apply` accepts unchanged."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

_PLACEHOLDER: Final = "@@bundle-{index}@@"

_SECRET_COMMENT: Final = """\
# Submission fills in the values, which are never printed. Agents without a token refuse to run. To fill them in:
#   kubectl {place}patch secret {name} --type=merge -p "{patch}"
"""
_TOKEN_VALUE: Final = "$(openssl rand -hex 32)"


def render_documents(
    documents: Sequence[Mapping[str, Any]], *, token_keys: Sequence[str] = (), secret_keys: Sequence[str] = ()
) -> str:
    """The documents as one YAML stream, in the order of creation, without the values of Secrets.

    Args:
        documents: plain dicts.
        token_keys: keys of tokens in our Secret, for the comment on how to fill it.
        secret_keys: the Secret's other keys.
    """
    values = {**dict.fromkeys(token_keys, _TOKEN_VALUE), **dict.fromkeys(secret_keys, "...")}
    return "---\n".join(_render(document, values) for document in documents)


def _render(document: Mapping[str, Any], secret_values: Mapping[str, str]) -> str:
    import yaml

    shown = dict(document)
    comment = ""
    if shown["kind"] == "Secret":
        shown.pop("data", None)
        shown.pop("stringData", None)
        comment = _build_secret_comment(shown["metadata"], secret_values)
    # The YAML emitter inspects every character, half a second for a megabyte of base64: emit placeholders instead.
    bundles = list(shown.get("binaryData", {}).items())
    placeholders = {name: _PLACEHOLDER.format(index=index) for index, (name, _) in enumerate(bundles)}
    if bundles:
        shown["binaryData"] = placeholders
    text: str = yaml.dump(shown, Dumper=_build_dumper(), sort_keys=False, default_flow_style=False, width=120)
    for name, content in bundles:
        text = text.replace(f"'{placeholders[name]}'", json.dumps(content))
    return comment + text


def _build_secret_comment(metadata: Mapping[str, Any], values: Mapping[str, str]) -> str:
    """The comment with a command to run after the documents are applied: a patch, which keeps the Secret's labels."""
    patch = json.dumps({"stringData": dict(values)}, separators=(",", ":")).replace('"', '\\"')
    place = f"-n {metadata['namespace']} " if "namespace" in metadata else ""
    return _SECRET_COMMENT.format(name=metadata["name"], place=place, patch=patch)


def _build_dumper() -> Any:
    """A dumper without anchors: writes a mapping that occurs twice twice, for any YAML reader."""
    import yaml

    class PlainDumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # PyYAML's signature
            return True

    return PlainDumper
