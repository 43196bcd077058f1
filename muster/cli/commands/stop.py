"""`muster stop`."""

from muster.cli.commands.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    """Add its options."""
    parser.add_handle()
    parser.add_json()
    parser.add_limit()
    parser.add_argument(
        "--now", action="store_true", help="end the job as `torchx cancel` does: the ranks are not asked to save"
    )
    parser.set_defaults(run=_run)


def _run(*, handle: str, limit_s: float, now: bool, as_json: bool) -> int:
    from muster.cli import answers, operations

    return answers.print_request(lambda: operations.stop(handle, limit_s=limit_s, now=now), as_json=as_json)
