"""Prints documents as YAML that `kubectl apply` takes unchanged."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

_BUNDLE_MARK: Final = "@@bundle-{index}@@"

_SECRET_COMMENT: Final = """\
# Values are filled in at submission and never printed; without a token the agents refuse to run. By hand:
#   kubectl {place}patch secret {name} --type=merge -p "{patch}"
"""
_TOKEN_VALUE: Final = "$(openssl rand -hex 32)"


def render_documents(
    documents: Sequence[Mapping[str, Any]], *, token_keys: Sequence[str] = (), secret_keys: Sequence[str] = ()
) -> str:
    """The documents as one YAML stream, in the order of creation; no secret is among them, whatever they hold.

    Args:
        documents: plain dicts.
        token_keys: keys of our Secret that hold tokens, for the comment on how to fill it.
        secret_keys: its other keys.
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
        comment = _describe_filling(shown["metadata"], secret_values)
    # A YAML emitter looks at every character: half a second for a megabyte of base64, which needs no looking at.
    bundles = list(shown.get("binaryData", {}).items())
    marks = {name: _BUNDLE_MARK.format(index=index) for index, (name, _) in enumerate(bundles)}
    if bundles:
        shown["binaryData"] = marks
    text: str = yaml.dump(shown, Dumper=_dumper(), sort_keys=False, default_flow_style=False, width=120)
    for name, content in bundles:
        text = text.replace(f"'{marks[name]}'", json.dumps(content))
    return comment + text


def _describe_filling(metadata: Mapping[str, Any], values: Mapping[str, str]) -> str:
    """A command to be run after the documents are applied: a patch, so that the Secret keeps its labels."""
    patch = json.dumps({"stringData": dict(values)}, separators=(",", ":")).replace('"', '\\"')
    place = f"-n {metadata['namespace']} " if "namespace" in metadata else ""
    return _SECRET_COMMENT.format(name=metadata["name"], place=place, patch=patch)


def _dumper() -> Any:
    """Without anchors: the same mapping in two places is written twice, which every YAML reader understands."""
    import yaml

    class PlainDumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # PyYAML's signature
            return True

    return PlainDumper
