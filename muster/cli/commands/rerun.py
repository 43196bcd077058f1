"""`muster rerun`."""

import shlex

from muster.cli.commands import build_parser, parse, run_words
from muster.cli.commands.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    """Add its option."""
    parser.epilog = "exit code: as of `muster run`"
    parser.add_argument(
        "--watch",
        action="store_true",
        help="run again whenever a file of the workspace changes; the previous run is stopped as by Ctrl-C",
    )
    parser.set_defaults(run=_run)


def _run(*, watch: bool) -> int:
    from muster.cli.answers import say
    from muster.cli.rerun import command

    words = command.read_line()
    say(f"muster {shlex.join(words)}")
    if not watch:
        return run_words(words)
    from muster.cli.run_command import find_workspace_folder

    return command.watch(words, find_workspace_folder(parse(build_parser(words), words).workspace))
