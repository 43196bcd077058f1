"""The command line `muster`, also `python -m muster`.

`COMMANDS` has all commands. Each is in a group, whose module in this folder adds the arguments of the command to its
parser with `add_NAME`, and its function with `set_defaults(run=...)`: the function, or "MODULE:NAME" of one that is
loaded when the command runs. `main` calls it with what was parsed. The modules only say what the words mean: other
modules of `muster.cli` do the work. `parser` has what several commands have in common.

A module is loaded if a command of its group is named on the command line. `muster completion` loads all of them.
"""

import argparse
import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Final, NamedTuple

from muster import __version__
from muster._shared.contract import show_controls
from muster._shared.control import CommandExit, ControlError
from muster.cli.commands.parser import EPILOG, CommandParser

_TORCHX_COMMANDS: Final = ("cancel", "describe", "runopts", "builtins", "configure", "tracker")


class Command(NamedTuple):
    """One command."""

    group: str
    """The heading under which the reference has it."""
    text: str
    """Its help, in one line."""


_START, _SEE, _CONTROL = "Start jobs", "See jobs", "Control jobs"
_NODES, _MACHINE = "Work on nodes", "This machine"
_MODULES: Final = {_START: "start", _SEE: "see", _CONTROL: "control", _NODES: "nodes", _MACHINE: "machine"}
"""The module of each group."""
_FOLDER_TOO: Final = "APP_HANDLE may be the log folder of a job"
_AFTERWARDS: Final = "while the job runs or afterwards; APP_HANDLE may be a folder with the logs of a job"

COMMANDS: Final[Mapping[str, Command]] = {
    "run": Command(
        _START,
        "submit a job, as `torchx run` does, with live progress bars; the last thing on the screen is its report",
    ),
    "hold": Command(
        _START,
        "hold nodes: keep agents there that have imported torch, for runs with -s held; prints the hold's handle",
    ),
    "release": Command(_START, "end a hold"),
    "rerun": Command(_START, "run the last `muster run` of this folder again"),
    "rehearse": Command(
        _START, "run a job on this machine, undisturbed first, then once for each fault, and say whether it survives"
    ),
    "status": Command(_SEE, f"print how a job is doing, in one line, and its replicas; {_FOLDER_TOO}"),
    "log": Command(_SEE, "print the output of a job, of one of its nodes or of a rank"),
    "top": Command(
        _SEE,
        f"show a job on one screen while it runs: its ranks, logs, stacks; without APP_HANDLE all jobs; {_FOLDER_TOO}",
    ),
    "events": Command(
        _SEE, f"print what a job's agents have recorded on all nodes, by the leader's clock, {_AFTERWARDS}"
    ),
    "timeline": Command(
        _SEE, f"write a page that shows what happened to a job, and how much time that cost, {_AFTERWARDS}"
    ),
    "list": Command(_SEE, "list the newest jobs of all schedulers, one line each"),
    "stop": Command(_CONTROL, "let all ranks save and stop at one step, and end the job"),
    "checkpoint": Command(_CONTROL, "let all ranks save at one step"),
    "pause": Command(_CONTROL, "let all ranks wait at one step"),
    "resume": Command(_CONTROL, "end a pause"),
    "stacks": Command(_CONTROL, "print the Python stacks of all ranks, which keep running"),
    "resize": Command(_CONTROL, "change the number of nodes of an elastic job"),
    "recover": Command(
        _CONTROL,
        "continue a job (local_cwd, Docker, ssh) whose supervisor was lost, for example by a reboot",
    ),
    "delete": Command(_CONTROL, "stop the job if it runs, and remove it with its logs"),
    "exec": Command(_NODES, "run a command on one or all nodes of a running job"),
    "shell": Command(_NODES, "open a terminal on a node of a running job"),
    "prune": Command(
        _MACHINE, "remove what jobs that have ended left behind (this machine, its Docker engine, ssh, Slurm)"
    ),
    "doctor": Command(_MACHINE, "print what muster sees of this machine, each with a verdict and the next step"),
    "completion": Command(_MACHINE, "print the shell's completion of this command"),
}


class _Formatter(logging.Formatter):
    """TorchX's warnings quote files of others."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """See `logging`."""
        return show_controls(super().formatMessage(record))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # Else the interpreter searches all objects for cycles at its end, a tenth of the CPU time of `muster run`.
    atexit.register(gc.freeze)
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("muster: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    try:
        code = run_words(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nmuster: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `muster stacks ... | head`
        null_fd = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_fd, 1)  # the rest is written at exit
        os.close(null_fd)
        return 128 + signal.SIGPIPE
    return code


def run_words(argv: Sequence[str]) -> int:
    """Do what the words say, and return the exit code."""
    parser = build_parser(argv)
    options = vars(parse(parser, argv))
    if os.path.expanduser("~") == "~":  # TorchX looks for it when it is imported
        print("muster: this user has no home folder: set HOME", file=sys.stderr)
        return 2
    del options["command"]
    try:
        return int(find_function(options.pop("run"))(**options))
    except argparse.ArgumentError as error:
        parser.error(str(error))
    except ControlError as error:
        from muster.cli.answers import print_error

        return print_error(error, as_json=options.get("as_json", False))


def find_function(run: "str | Callable[..., int]") -> Callable[..., int]:
    """Return what a command calls with its options: a function, or that of "MODULE:NAME"."""
    if not isinstance(run, str):
        return run
    module, _, name = run.partition(":")
    function: Callable[..., int] = getattr(import_module(module), name)
    return function


def build_parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the whole command line.

    Args:
        words: of the line that is parsed. Commands that are not among them get no arguments. None: all get theirs.
    """
    parser = argparse.ArgumentParser(
        prog="muster",
        description="Starts jobs, shows them, and talks to those that run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"muster {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=CommandParser)
    for name, (group, text) in COMMANDS.items():
        command = commands.add_parser(name, command=name, line=tuple(words or ()), about=text, help=text)
        if words is None or name in words:
            getattr(import_module(f"{__name__}.{_MODULES[group]}"), f"add_{name}")(command)
    return parser


def list_parsers(parser: argparse.ArgumentParser) -> Mapping[str, CommandParser]:
    """Return the parser of each command."""
    return next(
        action.choices
        for action in parser._actions  # noqa: SLF001  # argparse has no other way to list them
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
    )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Do as `parse_args`, but what a command does not know is refused with the usage of that command."""
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        parser.exit(CommandExit.USAGE, f"muster: {_refuse_command(argv[0])}\n")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        command = list_parsers(parser)[args.command]
        near = _find_near(unknown[0].partition("=")[0], command.list_words())
        hint = f"; did you mean {near}?" if unknown[0].startswith("--") and near else ""
        if "component" in args:
            hint = hint or "; a component such as dist.ddp must stand before its arguments"
        command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return args


def _refuse_command(word: str) -> str:
    near = _find_near(word, COMMANDS)
    if word in _TORCHX_COMMANDS:
        hint = f"`torchx {word}` is one" + ("; `muster stop` lets the ranks save first" if word == "cancel" else "")
    else:
        hint = f"did you mean {near!r}?" if near else "`muster --help` lists them"
    return f"there is no command {word!r}: {hint}"


def _find_near(word: str, known: Iterable[str]) -> str:
    """Return the word that may be meant. "": none is like it."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, known, 1)), "")


if __name__ == "__main__":
    sys.exit(main())
