"""The commands for this machine: `doctor` and `completion`."""

import argparse

from muster.cli.commands.parser import CommandParser, parse_count


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
