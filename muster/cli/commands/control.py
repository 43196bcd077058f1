"""The commands that ask a running job for something: `stop`, `checkpoint`, `pause`, `resize` and the like.

The name of a command is that of the function of `operations`.
"""

from muster.cli.commands.parser import CommandParser, parse_count


def add_stop(parser: CommandParser) -> None:
    """Add its options."""
    add_checkpoint(parser)
    parser.add_argument(
        "--now", action="store_true", help="end the job as `torchx cancel` does: the ranks are not asked to save"
    )


def add_checkpoint(parser: CommandParser) -> None:
    """Add the options of a request to all ranks."""
    add_delete(parser)
    parser.add_limit()


add_pause = add_resume = add_stacks = add_checkpoint


def add_resize(parser: CommandParser) -> None:
    """Add its options."""
    add_delete(parser)
    parser.add_argument("nodes", type=_parse_nodes, metavar="NODES", help="the new number, within MIN:MAX of -j")
    parser.add_role("which role, if several are elastic")


def add_delete(parser: CommandParser) -> None:
    """Add the options of a request for which no rank has to do anything."""
    parser.add_handle()
    parser.add_request()


add_recover = add_delete


def _parse_nodes(text: str) -> int:
    return parse_count(text, "number of nodes")
