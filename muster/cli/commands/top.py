"""`muster top`."""

from muster.cli.commands.parser import STATES_EPILOG, CommandParser


def add_arguments(parser: CommandParser) -> None:
    """Add its options."""
    parser.epilog = STATES_EPILOG
    parser.add_handle("?")
    parser.add_json()
    parser.add_argument("--once", action="store_true", help="print one page and exit")
    parser.set_defaults(run="muster.cli.top.command:show")
