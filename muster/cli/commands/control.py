"""The commands that ask a running job for something, as `stop`, or run something on its nodes: `exec` and `shell`.

The name of any other command is that of the function of `operations`.
"""

import argparse
from typing import Final

from muster.cli.commands.parser import CommandParser, parse_count, parse_index


def add_stop(parser: CommandParser) -> None:
    """Add its options."""
    add_checkpoint(parser)
    parser.add_argument(
        "--now", action="store_true", help="end the job as `torchx cancel` does: the ranks are not asked to save"
    )


def add_checkpoint(parser: CommandParser) -> None:
    """Add the options of a request to all ranks."""
    parser.add_request()
    parser.add_limit()


add_pause = add_resume = add_checkpoint


def add_resize(parser: CommandParser) -> None:
    """Add its options."""
    parser.add_request()
    parser.add_argument("nodes", type=_parse_nodes, metavar="NODES", help="the new number, within MIN:MAX of -j")
    parser.add_role("which role, if several are elastic")


def add_recover(parser: CommandParser) -> None:
    """Add its options."""
    parser.description = f"{parser.description} Jobs of local_cwd, Docker and ssh have one."
    parser.add_request()


def _parse_nodes(text: str) -> int:
    return parse_count(text, "number of nodes")


_NOT_RUN: Final = 255
"""Exit code where muster has failed, and not the command: as of `ssh`."""
_EXEC_EPILOG: Final = """\
Options come before CMD. The command has the variables of the workers of its node, and runs where they run. What it
leaves in the background ends with it.
exit code: that of the command, or 128 + n after signal n; with several nodes the first that is not 0; 2 wrong usage;
255 it was not run, or its node was lost, and a line says why
"""


def add_exec(parser: CommandParser) -> None:
    """Add its options, and the words of the command, which may be options, too."""
    parser.usage = "%(prog)s [-h] [--all | --node N] [--role ROLE] APP_HANDLE ..."
    parser.epilog = _EXEC_EPILOG
    parser.add_handle()
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--all", dest="takes_all", action="store_true", help="on all nodes; each line begins with the name of its node"
    )
    which.add_argument("--node", type=parse_index, metavar="N", help="on this node of a role, counted from 0 (0)")
    parser.add_role()
    # It ends the options, as a command of `muster` does. With `REMAINDER` options after the handle would be words.
    words = parser.add_argument(
        "words", nargs=argparse.PARSER, default=[], metavar="CMD ...", help="a program and its arguments"
    )
    words.required = False
    parser.set_defaults(run="muster.cli.exec_command:run", failure_code=_NOT_RUN)


_SHELL_EPILOG: Final = """\
The shell is the node's $SHELL, else bash or sh. It has the variables of the workers, and ends with this command.
exit code: that of the shell; 2 wrong usage; 255 none was started, or its node was lost, and a line says why
"""


def add_shell(parser: CommandParser) -> None:
    """Add its options."""
    parser.epilog = _SHELL_EPILOG
    parser.add_handle()
    parser.add_argument("node", type=parse_index, nargs="?", metavar="NODE", help="node of a role, counted from 0 (0)")
    parser.add_role()
    parser.set_defaults(run="muster.cli.shell_command:run", failure_code=_NOT_RUN)
