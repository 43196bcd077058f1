"""`muster prune`."""

import argparse
import re
from typing import Final

from muster.cli.commands.parser import CommandParser

_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw])", re.ASCII)
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_arguments(parser: CommandParser) -> None:
    """Add its options."""
    parser.description = f"{parser.description} Running jobs are never touched."
    parser.epilog = None
    parser.formatter_class = argparse.HelpFormatter
    parser.add_argument(
        "--older-than",
        dest="older_than_s",
        type=_parse_age,
        default=0.0,
        metavar="AGE",
        help="only jobs that ended this long ago or earlier: 30m, 12h, 7d, 2w (default: all that have ended)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed and remove nothing")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.set_defaults(run="muster.cli.prune:prune")


def _parse_age(text: str) -> float:
    match = _AGE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age such as 30m, 12h, 7d or 2w")
    return float(match[1]) * _UNITS_S[match[2]]
