"""`muster run`: the options of `torchx run`, on both of its lines."""

from functools import partial
from typing import Any, Final

from muster.cli.commands.parser import CommandParser, Once

_EPILOG: Final = """\
.torchxconfig counts as for `torchx run`. Ctrl-C stops the job politely; a second one kills it.
exit code: 0 the job has succeeded, or was submitted; 1 it has not; 2 wrong usage; 130 Ctrl-C
`python -m muster.run` is something else: torchrun's module API.
"""


def add_arguments(parser: CommandParser) -> None:
    """Add its options, and the component."""
    parser.epilog = _EPILOG
    parser.add_scheduler("the scheduler (local_cwd)")
    parser.add_argument("--dryrun", action="store_true", help="print what would be submitted, and submit nothing")
    parser.add_argument("--wait", action="store_true", help="wait for the end of the job; local_* always waits")
    parser.add_argument("--log", action="store_true", help="print the job's lines, and wait for the end")
    parser.add_argument("--workspace", action=Once, help="the folder that travels with the job (this one; '' for none)")
    parser.add_argument("--parent_run_id", action=Once, help="the run that this one belongs to, for trackers")
    parser.add_component("a component such as dist.ddp or FILE.py:FUNCTION, and its arguments")
    parser.set_defaults(run=partial(_run, parser.line))


def _run(line: tuple[str, ...], **options: Any) -> int:
    from muster.cli import run_command

    given = run_command.Given(**options)
    if not given.dryrun:
        from muster.cli.rerun.command import record_line

        record_line(line)
    return run_command.run(given)
