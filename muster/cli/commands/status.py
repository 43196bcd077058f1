"""`muster status`."""

from muster.cli.commands.parser import STATES_EPILOG, CommandParser


def add_arguments(parser: CommandParser) -> None:
    """Add its options."""
    parser.epilog = STATES_EPILOG
    parser.add_handle("?", "last")
    parser.add_json()
    parser.set_defaults(run=_run)


def _run(*, handle: str, as_json: bool) -> int:
    from muster.cli.overview import print_status

    return print_status(handle, as_json=as_json)
