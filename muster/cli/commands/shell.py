"""`muster shell`."""

from typing import Final

from muster._shared.control import ControlError
from muster.cli.commands.parser import CommandParser, parse_index

_EPILOG: Final = """\
The shell is the node's $SHELL, else bash or sh. It has the variables of the workers, and ends with this command.
exit code: that of the shell; 2 wrong usage; 255 none was started, or its node was lost, and a line says why
"""


def add_arguments(parser: CommandParser) -> None:
    """Add its options."""
    parser.epilog = _EPILOG
    parser.add_handle()
    parser.add_argument("node", type=parse_index, nargs="?", metavar="NODE", help="node of a role, counted from 0 (0)")
    parser.add_role()
    parser.set_defaults(run=_run)


def _run(*, handle: str, node: int | None, role: str | None) -> int:
    from muster.cli.exec import shell_command
    from muster.cli.exec.targets import print_failure

    try:
        return shell_command.run(handle, role=role, node=node)
    except ControlError as error:
        return print_failure(error)
