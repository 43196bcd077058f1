"""`muster checkpoint`, `pause`, `resume` and `stacks`: what is asked of the agents of a running job."""

from functools import partial

from muster._shared.contract import AskKind
from muster.cli.commands.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    """Add the options, which they all have. The name of the command is that of the question."""
    parser.add_handle()
    parser.add_json()
    parser.add_limit()
    parser.set_defaults(run=partial(_run, AskKind(parser.command)))


def _run(kind: AskKind, *, handle: str, limit_s: float, as_json: bool) -> int:
    from muster.cli import answers, operations

    return answers.print_request(lambda: operations.ask(handle, kind, limit_s=limit_s), as_json=as_json)
