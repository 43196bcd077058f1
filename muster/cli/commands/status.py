"""`muster status`."""

from muster.cli.commands.parser import STATES_EPILOG, CommandParser


def add_arguments(parser: CommandParser) -> None:
    """Add its options."""
    parser.epilog = STATES_EPILOG
    parser.add_handle("?", "last")
    parser.add_json()
    parser.set_defaults(run="muster.cli.overview:print_status")
