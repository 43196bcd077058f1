"""`muster resize`."""

from muster.cli.commands.parser import CommandParser, parse_count


def add_arguments(parser: CommandParser) -> None:
    """Add its options."""
    parser.add_handle()
    parser.add_json()
    parser.add_argument("nodes", type=_parse_nodes, metavar="NODES", help="the new number, within MIN:MAX of -j")
    parser.add_role("which role, if several are elastic")
    parser.set_defaults(run=_run)


def _run(*, handle: str, nodes: int, role: str | None, as_json: bool) -> int:
    from muster.cli import answers, operations

    return answers.print_request(lambda: operations.resize(handle, nodes, role=role), as_json=as_json)


def _parse_nodes(text: str) -> int:
    return parse_count(text, "number of nodes")
