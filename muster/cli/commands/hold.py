"""`muster hold`."""

import argparse
from typing import Final

from muster._shared.contract import parse_seconds
from muster.cli.commands.parser import CommandParser

_MOST_MINUTES: Final = 10080.0
_IDLE_S: Final = 1800.0
_EPILOG: Final = """\
exit code: 0 agents wait on all nodes; 1 the hold has ended, or could not be submitted; 2 wrong usage; 130 Ctrl-C,
which releases the hold
"""


def add_arguments(parser: CommandParser) -> None:
    """Add its options, and the component."""
    parser.epilog = _EPILOG
    parser.add_scheduler("where the nodes are (local_cwd)")
    parser.add_argument(
        "--idle-minutes",
        dest="idle_s",
        type=_parse_minutes,
        default=_IDLE_S,
        metavar="MINUTES",
        help="end the hold after this time without a run (30)",
    )
    parser.add_json("print what is held as one line of JSON, when it is ready")
    parser.add_component(
        "a component without its program, as dist.ddp -j 2x4 (one node with a process for each GPU, or without "
        "GPUs for each core)"
    )
    parser.set_defaults(run="muster.cli.hold_command:hold")


def _parse_minutes(text: str) -> float:
    """Return seconds."""
    minutes = parse_seconds(text)
    if minutes is None or not 0.01 <= minutes <= _MOST_MINUTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes from 0.01 to {_MOST_MINUTES:g}")
    return minutes * 60
