"""Makes the JSON schema of `status.json` from the records that declare it.

`python docs/status_schema.py` writes it beside its records; a test says when that was forgotten. Descriptions are the
strings below the fields.
"""

import ast
import inspect
import json
import sys
import textwrap
import types
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from muster._shared.fields import AS_OBJECT, Limit, Range  # noqa: E402
from muster._shared.job_view import JobStatus  # noqa: E402

PATH = ROOT / "muster/_shared/status.schema.json"


def build_schema() -> dict[str, Any]:
    """Build the schema, of draft 2020-12."""
    definitions: dict[str, Any] = {}
    _describe(JobStatus, definitions)
    root = definitions.pop("JobStatus")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "status.json of a muster job"}
    return {**head, **root, "$defs": definitions}


def _describe(annotation: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe_limited(args[0], args[1:], definitions)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_describe(arg, definitions) for arg in args]}
    if annotation is types.NoneType:
        return {"type": "null"}
    if annotation is bool:
        return {"type": "boolean"}
    if issubclass(annotation, Enum):
        return {"enum": [member.value for member in annotation]}
    if annotation.__name__ not in definitions:
        definitions[annotation.__name__] = {}
        definitions[annotation.__name__] = _describe_record(annotation, definitions)
    return {"$ref": f"#/$defs/{annotation.__name__}"}


def _describe_limited(base: Any, marks: tuple[Any, ...], definitions: dict[str, Any]) -> dict[str, Any]:
    limit = next((mark for mark in marks if isinstance(mark, Limit)), None)
    allowed = next((mark for mark in marks if isinstance(mark, Range)), None)
    if allowed is not None:
        kind = "integer" if base is int else "number"
        if max(abs(allowed.least), abs(allowed.most)) > 2**53:  # all that are finite
            return {"type": kind}
        return {"type": kind, "minimum": int(allowed.least), "maximum": int(allowed.most)}
    if limit is None:
        return _describe(base, definitions)
    if base is str:  # the limit counts bytes of UTF-8, of which no text has fewer than characters
        return {"type": "string", "maxLength": limit.most}
    item = get_args(base)[0]
    if AS_OBJECT in marks:
        value = _describe(get_args(item)[1], definitions)
        return {"type": "object", "additionalProperties": value, "maxProperties": limit.most}
    return {"type": "array", "items": _describe(item, definitions), "maxItems": limit.most}


def _describe_record(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    properties, required = {}, []
    texts = _read_texts(kind)
    for name, annotation in kind.__annotations__.items():
        field = _describe(annotation, definitions)
        if name in texts:
            field = {**field, "description": texts[name]}
        properties[name] = field
        if not hasattr(kind, name):
            required.append(name)
    about = inspect.getdoc(kind) or ""
    return {"type": "object", "description": " ".join(about.split()), "properties": properties, "required": required}


def _read_texts(kind: type) -> dict[str, str]:
    """Read the string below each field."""
    body: Any = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            found[field.target.id] = " ".join(text.value.value.split())
    return found


def print_schema() -> str:
    """Return the schema as the file has it."""
    return json.dumps(build_schema(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(print_schema())
