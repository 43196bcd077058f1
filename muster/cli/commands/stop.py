"""`muster stop`."""

from muster.cli.commands.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    """Add its options."""
    parser.add_handle()
    parser.add_request()
    parser.add_limit()
    parser.add_argument(
        "--now", action="store_true", help="end the job as `torchx cancel` does: the ranks are not asked to save"
    )
