"""The commands for what a job leaves behind: `timeline`, `events`, `delete` and `prune`."""

import argparse
import re
from typing import Final

from muster.cli.commands.parser import RECORDS_EPILOG, CommandParser

_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw])", re.ASCII)
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_events(parser: CommandParser) -> None:
    """Add its options."""
    parser.description = f"{parser.description} They are in the order of the leader's clock."
    parser.epilog = RECORDS_EPILOG
    parser.add_job()
    parser.add_role()
    parser.add_json("print each record as one line of JSON")
    parser.set_defaults(run="muster.cli.history.commands:print_events")


def add_timeline(parser: CommandParser) -> None:
    """Add its options."""
    parser.epilog = RECORDS_EPILOG
    parser.add_job()
    parser.add_role()
    parser.add_argument("-o", "--output", metavar="FILE", help="the page (NAME.html in this folder)")
    parser.add_json("print the facts as one line of JSON")
    parser.set_defaults(run="muster.cli.history.commands:write_timeline")


def add_delete(parser: CommandParser) -> None:
    """Add its options. The name is that of the function of `operations`."""
    parser.add_request()


def add_prune(parser: CommandParser) -> None:
    """Add its options."""
    parser.description = (
        f"{parser.description} It looks on this machine, in its Docker engine, at Slurm and on hosts behind ssh. "
        "Running jobs are never touched."
    )
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
