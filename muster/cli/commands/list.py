"""`muster list`."""

from typing import Final

from muster.cli.commands.parser import CommandParser, parse_count

_EPILOG: Final = """\
exit code: 0 done; 2 wrong usage; 6 a scheduler that -s names is not reachable
"""


def add_arguments(parser: CommandParser) -> None:
    """Add its options."""
    parser.description = f"{parser.description} It names schedulers that cannot be reached."
    parser.epilog = _EPILOG
    parser.add_argument(
        "-s",
        "--scheduler",
        dest="schedulers",
        action="append",
        default=[],
        metavar="SCHEDULER",
        help="only this scheduler; may be repeated",
    )
    parser.add_argument("-n", "--limit", type=parse_count, default=20, metavar="COUNT", help="how many at most (20)")
    parser.add_json("print the list as one line of JSON")
    parser.set_defaults(run="muster.cli.overview:print_list")
