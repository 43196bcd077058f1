"""The command line `python -m muster`."""

import argparse
import logging
import re
import sys
from collections.abc import Sequence

from muster.cli.prune import prune

_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])", re.ASCII)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    logging.basicConfig(level=logging.WARNING, format="muster: %(message)s")
    args = _build_parser().parse_args(argv)
    return prune(older_than_s=args.older_than, dry_run=args.dry_run, yes=args.yes)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m muster", description="Commands beside TorchX's own.")
    commands = parser.add_subparsers(dest="command", required=True)
    text = "remove the logs, containers and volumes of jobs on this machine and its Docker engine that have ended"
    command = commands.add_parser("prune", help=text, description=f"{text}. Jobs that run are never touched.")
    command.add_argument(
        "--older-than",
        type=_parse_age,
        default=0.0,
        metavar="AGE",
        help="only jobs that ended this long ago or earlier: 30m, 12h, 7d, 2w (default: all that have ended)",
    )
    command.add_argument("--dry-run", action="store_true", help="print what would be removed and remove nothing")
    command.add_argument("-y", "--yes", action="store_true", help="do not ask")
    return parser


def _parse_age(text: str) -> float:
    match = _AGE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age such as 30m, 12h, 7d or 2w")
    return float(match[1]) * _UNITS_S[match[2]]


if __name__ == "__main__":
    sys.exit(main())
