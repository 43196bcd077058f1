"""`muster release`."""

from muster.cli.commands.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    """Add its options."""
    parser.add_handle("?", text="as `muster hold` prints it (the only hold)")
    parser.add_argument("--now", action="store_true", help="stop the run that is on the hold first, if there is one")
    parser.add_json()
    parser.set_defaults(run=_run)


def _run(*, handle: str | None, now: bool, as_json: bool) -> int:
    from muster.cli import answers, hold_command

    return answers.print_answer(hold_command.release(handle, now=now), as_json=as_json)
