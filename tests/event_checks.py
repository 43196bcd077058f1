"""Checks what agents have written against the public JSON schema of event records, stricter than a reader may be.

A field of a detail that is not declared is refused here: the schema lets later versions add some.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = Path(__file__).parent.parent / "muster/cli/history/events.schema.json"


def check_events(folder: Path) -> None:
    """Fail on a record in a file below the folder that does not fit. What is no record is left out: a cut-off line."""
    for path in folder.rglob("events.jsonl"):
        if path.is_file() and not path.is_symlink():
            for line in path.read_bytes().splitlines():
                check_line(line, str(path))


def check_line(line: bytes, where: str = "") -> None:
    """Fail on one that does not fit."""
    try:
        record = json.loads(line)
    except ValueError:
        return
    if isinstance(record, dict) and "time_s" in record:
        for error in find_errors(record):
            raise AssertionError(f"{where}: {error} in {line!r}")


def find_errors(record: Mapping[str, Any]) -> list[str]:
    common, details = _build_validators()
    errors = [each.message for each in common.iter_errors(record)]
    if not errors:
        errors = [each.message for each in details[record["what"]].iter_errors(record["detail"])]
    return errors


@functools.cache
def _build_validators() -> tuple[Any, Mapping[str, Any]]:
    """Of the common fields, and of the detail by `what`: all conditions of the schema at once are ten times slower."""
    import jsonschema

    schema = json.loads(SCHEMA.read_text())
    definitions = {name: {**each, "additionalProperties": False} for name, each in schema["$defs"].items()}
    common = {name: each for name, each in schema.items() if name not in ("allOf", "$defs")}
    details = {
        rule["if"]["properties"]["what"]["const"]: {**rule["then"]["properties"]["detail"], "$defs": definitions}
        for rule in schema["allOf"]
    }
    make = jsonschema.Draft202012Validator
    return make({**common, "additionalProperties": False}), {name: make(each) for name, each in details.items()}
