"""The commands that show jobs: `status`, `list`, `top`, `log` and `stacks`."""

import argparse
import re
from typing import Final

from muster.cli.commands.parser import RECORDS_EPILOG, STATES_EPILOG, CommandParser, parse_count, parse_index


def add_status(parser: CommandParser) -> None:
    """Add its options."""
    parser.epilog = STATES_EPILOG
    parser.add_job()
    parser.add_json()
    parser.set_defaults(run="muster.cli.overview:print_status")


def add_log(parser: CommandParser) -> None:
    """Add its options."""
    parser.epilog = RECORDS_EPILOG
    parser.add_handle("?", "last")
    parser.add_role("only this role")
    parser.add_argument("--node", type=parse_index, metavar="N", help="only this node of a role, counted from 0")
    parser.add_argument("--rank", type=parse_index, metavar="N", help="only this global rank")
    parser.add_argument("--attempt", type=parse_index, metavar="N", help="this attempt, counted from 0 (the newest)")
    parser.add_argument("--failed", action="store_true", help="only the rank that is the root cause of the failure")
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines as they come")
    parser.add_argument("--grep", type=_parse_regex, metavar="REGEX", help="only lines that match")
    parser.add_argument(
        "--stream", choices=("stdout", "stderr", "combined"), default="combined", help="only this stream (combined)"
    )
    parser.set_defaults(run="muster.cli.log_command:print_log")


def _parse_regex(text: str) -> "re.Pattern[str]":
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not a regular expression: {error}") from error


def add_top(parser: CommandParser) -> None:
    """Add its options."""
    parser.description = f"{parser.description} Without APP_HANDLE it shows all jobs."
    parser.epilog = STATES_EPILOG
    parser.add_job(default=None)
    parser.add_json()
    parser.add_argument("--once", action="store_true", help="print one page and exit")
    parser.set_defaults(run="muster.cli.top.command:show")


_LIST_EPILOG: Final = """\
exit code: 0 done; 2 wrong usage; 6 a scheduler that -s names is not reachable
"""


def add_list(parser: CommandParser) -> None:
    """Add its options."""
    parser.description = f"{parser.description} It names schedulers that cannot be reached."
    parser.epilog = _LIST_EPILOG
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


def add_stacks(parser: CommandParser) -> None:
    """Add its options. The name is that of the function of `operations`."""
    parser.add_request()
    parser.add_limit()
