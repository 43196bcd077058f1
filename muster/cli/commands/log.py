"""`muster log`."""

import argparse
import re

from muster.cli.commands.parser import RECORDS_EPILOG, CommandParser, parse_index


def add_arguments(parser: CommandParser) -> None:
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
    parser.set_defaults(run="muster.cli.output.log_command:print_log")


def _parse_regex(text: str) -> "re.Pattern[str]":
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not a regular expression: {error}") from error
