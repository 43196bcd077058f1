"""Prints what became of a request, for people or as JSON."""

import json
import sys
from collections.abc import Iterator

from muster._shared.contract import show_controls
from muster._shared.control import Answer, ControlError, RankStack


def print_answer(answer: Answer, *, as_json: bool) -> int:
    """Print it; the exit code."""
    if as_json:
        print(json.dumps(answer.to_json()))
    else:
        for line in format_stacks(answer.stacks):
            print(show_controls(line))
        stream = sys.stdout if answer.exit_code == 0 else sys.stderr
        print(show_controls(answer.line), file=stream)
    return int(answer.exit_code)


def print_error(error: ControlError, *, as_json: bool) -> int:
    """Print why a request was not passed on; the exit code."""
    if as_json:
        print(json.dumps({"outcome": error.exit_code.name.lower(), "line": str(error), "exit_code": error.exit_code}))
    else:
        print(f"muster: {show_controls(str(error))}", file=sys.stderr)
    return int(error.exit_code)


def format_stacks(stacks: tuple[RankStack, ...]) -> Iterator[str]:
    """Stacks by role and rank, equal ones once. Thread ids, in which all processes differ, do not count."""
    groups: dict[tuple[str, str], list[RankStack]] = {}
    for stack in stacks:
        groups.setdefault((stack.role, _remove_thread_ids(stack.text)), []).append(stack)
    for (role, _), group in groups.items():
        names = ", ".join(str(stack.global_rank) for stack in group)
        yield f"stacks of {f'{role}, ' if role else ''}{'rank' if len(group) == 1 else 'ranks'} {names}:"
        yield from (f"  {line}" for line in group[0].text.splitlines())


def _remove_thread_ids(text: str) -> str:
    heads = (line.partition("hread 0x") for line in text.splitlines())
    return "\n".join(head if sign else line for line, (head, sign, _) in zip(text.splitlines(), heads, strict=True))
