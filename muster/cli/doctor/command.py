"""Prints what was seen: a line each for people, or one JSON object for a bug report."""

import json
import os
import textwrap
from collections.abc import Iterable
from shutil import get_terminal_size

from muster import __version__
from muster._shared.contract import show_controls
from muster.cli.doctor.machine import Observation, Verdict, look_at_machine
from muster.cli.doctor.services import look_at_services

_NAME_COLUMNS = 24


def diagnose(*, nproc: int | None, devices: int | None, log_dir: str | None, as_json: bool) -> int:
    """Look, and print what was seen. Return 1 if any of it is an error, else 0."""
    found = [
        *look_at_machine(os.environ, nproc=nproc, devices=devices, log_dir=log_dir),
        *look_at_services(os.environ),
    ]
    if as_json:
        print(json.dumps({"muster": __version__, "observations": [each.to_json() for each in found]}))
    else:
        print("\n".join(format_observations(found, get_terminal_size((100, 0)).columns)))
    return int(any(each.verdict is Verdict.ERROR for each in found))


def format_observations(found: Iterable[Observation], columns: int) -> list[str]:
    """Return a paragraph each: name, verdict, what was seen, and below it the next step."""
    lines = []
    for each in found:
        head = f"{each.name:<13} {each.verdict.value:<8} "
        texts = [(head, each.text), *([(" " * len(head), f"-> {each.advice}")] if each.advice else [])]
        for first, text in texts:
            width = max(columns, len(head) + _NAME_COLUMNS)
            wrapped = textwrap.wrap(
                show_controls(text),
                width,
                initial_indent=first,
                subsequent_indent=" " * len(head),
                break_long_words=False,
                break_on_hyphens=False,
            )
            lines += wrapped or [head.rstrip()]
    return lines
