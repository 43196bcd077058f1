"""`muster top`."""

from muster.cli.commands.parser import STATES_EPILOG, CommandParser


def add_arguments(parser: CommandParser) -> None:
    """Add its options."""
    parser.epilog = STATES_EPILOG
    parser.add_handle("?")
    parser.add_json()
    parser.add_argument("--once", action="store_true", help="print one page and exit")
    parser.set_defaults(run=_run)


def _run(*, handle: str | None, once: bool, as_json: bool) -> int:
    from muster.cli.top.command import show

    return show(handle, once=once, as_json=as_json)
