"""Prints what became of a request, for people or as JSON, and asks whether it is meant."""

import json
import math
import signal
import sys
from collections.abc import Callable, Iterator

from muster._shared.codec import to_data
from muster._shared.contract import print_line, show_controls
from muster._shared.control import ControlError, describe_answer, get_exit_code
from muster._shared.fields import LateRank
from muster._shared.reports import Answer, RankProgress, Stack, name_ranks, remove_thread_ids


def print_request(ask: Callable[[], Answer], *, as_json: bool) -> int:
    """Ask, print the answer, and return the exit code. What was asked for is not taken back by Ctrl-C."""
    try:
        return print_answer(ask(), as_json=as_json)
    except KeyboardInterrupt:
        print("muster: interrupted: what was asked for may still be done", file=sys.stderr)
        return 128 + signal.SIGINT


def print_answer(answer: Answer, *, as_json: bool) -> int:
    """Print it, and return the exit code."""
    code = get_exit_code(answer)
    if as_json:
        print(json.dumps({**_build_json(answer), "exit_code": int(code)}))
    else:
        stream = sys.stdout if code == 0 else sys.stderr
        print_line(describe_answer(answer), stream)
        for line in format_stacks(answer.stacks):
            print_line(line, sys.stdout)
    return int(code)


def _build_json(answer: Answer) -> dict[str, object]:
    """Build what docs/muster-command.md promises: rows name their role, and what JSON has a number for is one."""
    progress = [
        {
            **_build_row(each),
            "values": {name: _read_value(text) for name, text in each.values},
            "has_moved": each.moved is not None,
        }
        for each in answer.progress
    ]
    late, stacks = ([_build_row(each) for each in rows] for rows in (answer.late, answer.stacks))
    return {**to_data(answer), "late": late, "stacks": stacks, "progress": progress}


def _build_row(row: LateRank | Stack | RankProgress) -> dict[str, object]:
    return {"role": row.role, **to_data(row)}


def _read_value(text: str) -> float | str:
    """Return a number. What JSON has none for stays text."""
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def say(line: str) -> None:
    """Print a line of the command's own."""
    print_line(f"muster: {line}")


def print_error(error: ControlError, *, as_json: bool) -> int:
    """Print why a request was not passed on, and return the exit code."""
    if as_json:
        print(json.dumps({"outcome": error.exit_code.name.lower(), "line": str(error), "exit_code": error.exit_code}))
    else:
        say(str(error))
    return int(error.exit_code)


def format_stacks(stacks: tuple[Stack, ...]) -> Iterator[str]:
    """Return the stacks by role and rank, equal ones once. Thread ids, in which all processes differ, do not count."""
    groups: dict[tuple[str, str], list[Stack]] = {}
    for stack in stacks:
        groups.setdefault((stack.role, remove_thread_ids(stack.text)), []).append(stack)
    for (role, _), group in groups.items():
        yield f"stacks of {f'{role}, ' if role else ''}{name_ranks(stack.global_rank for stack in group)}:"
        yield from (f"  {line}" for line in group[0].text.splitlines())


def confirm(question: str, what: str) -> bool:
    """Ask a person at the terminal. Return False without one, and say how to do `what` without it."""
    if not sys.stdin.isatty():
        print_line(f"use --yes to {what} without confirmation")
        return False
    try:
        answer = input(show_controls(f"{question} [y/N] "))
    except EOFError:  # Ctrl-D
        print()
        return False
    return answer.strip().lower() in ("y", "yes")
