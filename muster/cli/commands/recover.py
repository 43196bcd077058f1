"""`muster recover`."""

from muster.cli.commands.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    """Add its options."""
    parser.add_handle()
    parser.add_json()
    parser.set_defaults(run=_run)


def _run(*, handle: str, as_json: bool) -> int:
    from muster.cli import answers, operations

    return answers.print_request(lambda: operations.recover(handle), as_json=as_json)
