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
from typing import Any, Final, NamedTuple

import muster
from muster._shared.contract import show_controls
from muster._shared.control import CommandExit, ControlError
from muster.cli.commands.parser import EPILOG, CommandParser

_NO_TORCHX: Final = "needs TorchX, which is not installed: pip install 'torchx-muster[torchx]', or torchx-nightly"


class Command(NamedTuple):
    """One command."""

    group: str
    """One of `_TITLES`, and the module that adds its arguments."""
    text: str
    """Its help: one line of `muster --help`, of at most 80 columns."""


_TITLES: Final = {
    "run": "Run",
    "watch": "Watch",
    "control": "Control",
    "afterwards": "Afterwards",
    "setup": "Set up",
}
"""The heading of each group."""

COMMANDS: Final[Mapping[str, Command]] = {
    "run": Command("run", "submit a job, as `torchx run` does, with live progress bars"),
    "rerun": Command("run", "run the last `muster run` of this folder again"),
    "rehearse": Command("run", "run a job here, once for each fault, and say whether it survives"),
    "hold": Command("run", "keep nodes with torch imported, for runs with -s held"),
    "release": Command("run", "end a hold"),
    "status": Command("watch", "print how a job is doing, in one line, and its replicas"),
    "list": Command("watch", "list the newest jobs of all schedulers, one line each"),
    "top": Command("watch", "show a job on one screen while it runs, or all jobs"),
    "log": Command("watch", "print the output of a job, of one of its nodes or of a rank"),
    "stacks": Command("watch", "print the Python stacks of all ranks, which keep running"),
    "stop": Command("control", "let all ranks save and stop at one step, and end the job"),
    "checkpoint": Command("control", "let all ranks save at one step"),
    "pause": Command("control", "let all ranks wait at one step"),
    "resume": Command("control", "end a pause"),
    "resize": Command("control", "change the number of nodes of an elastic job"),
    "exec": Command("control", "run a command on one or all nodes of a running job"),
    "shell": Command("control", "open a terminal on a node of a running job"),
    "recover": Command("control", "continue a job whose supervisor was lost, as by a reboot"),
    "timeline": Command("afterwards", "write a page: what happened to a job, and what that cost"),
    "events": Command("afterwards", "print what the agents of all nodes have recorded"),
    "delete": Command("afterwards", "stop the job if it runs, and remove it with its logs"),
    "prune": Command("afterwards", "remove what jobs that have ended left behind"),
    "doctor": Command("setup", "print what muster sees of this machine, and the next steps"),
    "completion": Command("setup", "print the shell's completion of this command"),
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
    options: dict[str, Any] = {}
    failure_code = None
    try:
        options |= vars(parse(parser, argv))
        failure_code = options.pop("failure_code", None)
        if os.path.expanduser("~") == "~":  # TorchX looks for it when it is imported
            print("muster: this user has no home folder: set HOME", file=sys.stderr)
            return 2
        del options["command"]
        return int(find_function(options.pop("run"))(**options))
    except argparse.ArgumentError as error:
        parser.error(str(error))
    except ModuleNotFoundError as error:
        if error.name != "torchx":
            raise
        refusal = ControlError(f"muster {argv[0]} {_NO_TORCHX}", CommandExit.USAGE)
    except ControlError as error:
        refusal = error
    from muster.cli.answers import print_error

    code = print_error(refusal, as_json=options.get("as_json", False))
    return code if failure_code is None or code == CommandExit.USAGE else failure_code


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
    guide = os.path.join(os.path.dirname(muster.__file__), "SKILL.md")
    parser = argparse.ArgumentParser(
        prog="muster",
        usage="%(prog)s [-h] [--version] COMMAND ...",
        description=_list_commands(),
        epilog=f"`muster COMMAND --help` says more. For coding agents: {guide}\n\n{EPILOG}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"muster {muster.__version__}")
    commands = parser.add_subparsers(
        prog="muster",
        dest="command",
        metavar="COMMAND",
        required=True,
        parser_class=CommandParser,
        help=argparse.SUPPRESS,  # the description has them
    )
    for name, (group, text) in COMMANDS.items():
        command = commands.add_parser(name, command=name, line=tuple(words or ()), about=text)
        if words is None or name in words:
            getattr(import_module(f"{__name__}.{group}"), f"add_{name}")(command)
    return parser


def _list_commands() -> str:
    """Return the commands in their groups, which argparse does not have."""
    lines = ["Starts jobs, shows them, and talks to those that run."]
    for group, title in _TITLES.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<12}{command.text}" for name, command in COMMANDS.items() if command.group == group]
    return "\n".join(lines)


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
    hint = f"did you mean {near!r}?" if near else "`muster --help` lists them"
    return f"there is no command {word!r}: {hint}"


def _find_near(word: str, known: Iterable[str]) -> str:
    """Return the word that may be meant. "": none is like it."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, known, 1)), "")


if __name__ == "__main__":
    sys.exit(main())
