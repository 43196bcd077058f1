"""The command line `muster`, also `python -m muster`."""

import argparse
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from muster import __version__
from muster._shared.control import ControlError
from muster._shared.reports import Answer

_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])", re.ASCII)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_MOST_LIMIT_S = 86400.0

REQUESTS: Mapping[str, str] = {
    "stop": "let all ranks save and stop at one step, and end the job",
    "checkpoint": "let all ranks save at one step",
    "pause": "let all ranks wait at one step",
    "resume": "end a pause",
    "stacks": "print the Python stacks of all ranks, which run on",
}
"""What is asked of the agents of a running job."""

_EPILOG = """\
exit code: 0 done; 1 refused, nothing was changed; 2 wrong usage; 3 no such app; 4 the app has ended already;
5 some ranks have not done it in time; 6 no agent answers, or a node was lost meanwhile
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    try:
        code = _run(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nmuster: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `muster stacks ... | head`
        null_fd = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_fd, 1)  # what is left is written at exit
        os.close(null_fd)
        return 128 + signal.SIGPIPE
    return code


def _run(argv: Sequence[str] | None) -> int:
    logging.basicConfig(level=logging.WARNING, format="muster: %(message)s")
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command == "prune":
        from muster.cli.prune import prune

        return prune(older_than_s=args.older_than, dry_run=args.dry_run, yes=args.yes)
    if args.command == "completion":
        from muster.cli.completion import write_completion

        return write_completion(args.shell, parser)
    return _run_request(args)


def _run_request(args: argparse.Namespace) -> int:
    from muster.cli import answers, operations

    operation: Callable[..., Answer] = getattr(operations, args.command)
    words, options = _list_arguments(args)
    try:
        answer = operation(args.handle, *words, **options)
    except ControlError as error:
        return answers.print_error(error, as_json=args.json)
    except KeyboardInterrupt:
        print("muster: interrupted: what was asked for may still be done", file=sys.stderr)
        return 128 + signal.SIGINT
    return answers.print_answer(answer, as_json=args.json)


def _list_arguments(args: argparse.Namespace) -> tuple[list[int], dict[str, float | str]]:
    """What the operation gets besides the handle."""
    if args.command == "resize":
        return [args.nodes], {} if args.role is None else {"role": args.role}
    return [], {} if args.limit is None else {"limit_s": args.limit}


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `completion` reads the words from it."""
    parser = argparse.ArgumentParser(
        prog="muster",
        description="Talks to running jobs. `torchx run`, `status`, `log` and `cancel` do the rest.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"muster {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in REQUESTS.items():
        command = _add_command(commands, name, text)
        command.add_argument(
            "--limit", type=_parse_limit, default=None, metavar="SECONDS", help="how long the ranks may take (60)"
        )
    command = _add_command(commands, "resize", "change the number of nodes of an elastic job")
    command.add_argument("nodes", type=_parse_nodes, metavar="NODES", help="the new number, within MIN:MAX of -j")
    command.add_argument("--role", help="which role, if several are elastic")
    text = "continue a job of this machine or its Docker engine whose supervisor was lost, after a reboot for instance"
    _add_command(commands, "recover", text).set_defaults(limit=None)
    command = _add_command(commands, "delete", "stop the job if it runs, and remove it with its logs")
    command.set_defaults(limit=None)
    _add_prune(commands)
    command = commands.add_parser("completion", help="print the shell's completion of this command")
    command.add_argument(
        "shell", choices=("bash", "zsh", "fish", "apps"), help="apps: names of jobs, which the completion asks for"
    )
    return parser


def _add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=text, description=f"{text}.", epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument(
        "handle",
        metavar="APP_HANDLE",
        help="as torchx run prints it: local_cwd://torchx/train-x7k2; or the job's name, or how its name begins; "
        "`last`: the newest job that you submitted on this machine",
    )
    command.add_argument("--json", action="store_true", help="print the answer as one line of JSON")
    return command


def _add_prune(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
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


def _parse_age(text: str) -> float:
    match = _AGE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age such as 30m, 12h, 7d or 2w")
    return float(match[1]) * _UNITS_S[match[2]]


def _parse_nodes(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes, 1 or more")
    return int(text)


def _parse_limit(text: str) -> float:
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = -1.0
    if not 1.0 <= limit_s <= _MOST_LIMIT_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to {_MOST_LIMIT_S:g}")
    return limit_s


if __name__ == "__main__":
    sys.exit(main())
