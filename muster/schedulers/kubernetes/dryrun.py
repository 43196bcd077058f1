"""Prints documents as YAML that `kubectl apply` takes unchanged."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

_BUNDLE_MARK: Final = "@@bundle-{index}@@"

_SECRET_COMMENT: Final = """\
# Values are filled in at submission and never printed; without the token the agents refuse to run. By hand:
#   kubectl create secret generic {name} {literals} --dry-run=client -o yaml | kubectl apply -f -
"""
TOKEN_LITERAL: Final = '--from-literal=token="$(openssl rand -hex 32)"'


def render_documents(documents: Sequence[Mapping[str, Any]], secret_keys: Sequence[str] = ()) -> str:
    """The documents as one YAML stream, in the order of creation; no secret is among them, whatever they hold.

    Args:
        documents: plain dicts.
        secret_keys: keys of our Secret, for the comment on how to fill it.
    """
    return "---\n".join(_render(document, secret_keys) for document in documents)


def _render(document: Mapping[str, Any], secret_keys: Sequence[str]) -> str:
    import yaml

    shown = dict(document)
    comment = ""
    if shown["kind"] == "Secret":
        shown.pop("data", None)
        shown.pop("stringData", None)
        literals = [TOKEN_LITERAL if key == "token" else f"--from-literal={key}=..." for key in secret_keys]
        comment = _SECRET_COMMENT.format(name=shown["metadata"]["name"], literals=" ".join(literals))
    # A YAML emitter looks at every character: half a second for a megabyte of base64, which needs no looking at.
    bundles = list(shown.get("binaryData", {}).items())
    marks = {name: _BUNDLE_MARK.format(index=index) for index, (name, _) in enumerate(bundles)}
    if bundles:
        shown["binaryData"] = marks
    text: str = yaml.dump(shown, Dumper=_dumper(), sort_keys=False, default_flow_style=False, width=120)
    for name, content in bundles:
        text = text.replace(f"'{marks[name]}'", json.dumps(content))
    return comment + text


def _dumper() -> Any:
    """Without anchors: the same mapping in two places is written twice, which every YAML reader understands."""
    import yaml

    class PlainDumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # PyYAML's signature
            return True

    return PlainDumper
