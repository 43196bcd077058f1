"""The commands for this machine: `prune`, `doctor` and `completion`."""

import argparse
import re
from typing import Final

from muster.cli.commands.parser import CommandParser, parse_count

_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw])", re.ASCII)
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def add_prune(parser: CommandParser) -> None:
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


def add_doctor(parser: CommandParser) -> None:
    """Add its options."""
    parser.description = f"{parser.about}: GPUs, torch, limits, interfaces, a Docker engine, a cluster, Slurm."
    parser.epilog = "exit code: 0 a job can run; 1 something prevents it; 2 wrong usage"
    parser.formatter_class = argparse.HelpFormatter
    parser.add_argument("--nproc", type=parse_count, metavar="N", help="workers of a job here (one for each GPU)")
    parser.add_argument("--devices", type=parse_count, metavar="N", help="how many GPUs there must be")
    parser.add_argument("--log-dir", metavar="DIR", help="where jobs write their logs")
    parser.add_json("one line of JSON for a bug report; it holds no secret")
    parser.set_defaults(run="muster.cli.doctor.command:diagnose")


def add_completion(parser: CommandParser) -> None:
    """Add the shells."""
    parser.description = parser.epilog = None
    parser.add_argument(
        "shell",
        choices=("bash", "zsh", "fish", "apps"),
        help="apps: print the names of jobs, for the completion itself",
    )
    parser.set_defaults(run="muster.cli.commands.completion:print_completion")
