"""`muster events`."""

from muster.cli.commands.parser import RECORDS_EPILOG, CommandParser


def add_arguments(parser: CommandParser) -> None:
    """Add its options."""
    parser.epilog = RECORDS_EPILOG
    parser.add_handle("?", "last")
    parser.add_role()
    parser.add_json("print each record as one line of JSON")
    parser.set_defaults(run=_run)


def _run(*, handle: str, role: str | None, as_json: bool) -> int:
    from muster.cli.afterwards.commands import print_events

    return print_events(handle, role=role, as_json=as_json)
