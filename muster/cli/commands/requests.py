"""`muster checkpoint`, `pause`, `resume`, `stacks`, `delete` and `recover`: what needs only the name of a job."""

from typing import Final

from muster.cli.commands.parser import CommandParser

_WITHOUT_LIMIT: Final = ("delete", "recover")
"""No rank has to do anything."""


def add_arguments(parser: CommandParser) -> None:
    """Add the options. The name of the command is that of the function of `operations`."""
    parser.add_handle()
    parser.add_request()
    if parser.command not in _WITHOUT_LIMIT:
        parser.add_limit()
