"""`muster resize`."""

from muster.cli.commands.parser import CommandParser, parse_count


def add_arguments(parser: CommandParser) -> None:
    """Add its options."""
    parser.add_handle()
    parser.add_request()
    parser.add_argument("nodes", type=_parse_nodes, metavar="NODES", help="the new number, within MIN:MAX of -j")
    parser.add_role("which role, if several are elastic")


def _parse_nodes(text: str) -> int:
    return parse_count(text, "number of nodes")
