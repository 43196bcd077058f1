"""`muster rehearse`."""

import os
from typing import Any, Final

from muster.cli.commands.parser import CommandParser, parse_count, parse_index, parse_limit

_EPILOG: Final = """\
{folder} in an argument is the folder of the run.
exit code: 0 all faults that were tried have the verdict "survived" (with --app: at least one); 1 anything else, such
as "started over", "result differs" or an undisturbed run that fails; 2 wrong usage; 130 Ctrl-C, 143 SIGTERM: everything
is undone
"""


def add_arguments(parser: CommandParser) -> None:
    """Add its options, and the component."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--faults", metavar="NAMES", help="FAULT or FAULT@MOMENT, separated by commas (all); `list` prints them"
    )
    parser.add_argument("--app", metavar="APP_HANDLE", help="disturb this running job instead of starting one")
    parser.add_argument("-y", "--yes", action="store_true", help="with --app: do not ask")
    parser.add_argument("--quick", action="store_true", help="only the faults that need no hang to be noticed")
    parser.add_argument(
        "--seed",
        type=parse_index,
        default=int.from_bytes(os.urandom(2), "big"),
        metavar="N",
        help="choose the same steps and ranks as the run with this seed",
    )
    parser.add_argument("--steps", type=parse_count, metavar="N", help="end each run after this number of steps")
    parser.add_argument(
        "--time-limit",
        dest="time_limit_s",
        type=parse_limit,
        metavar="SECONDS",
        help="limit of the undisturbed run; the other runs end at its last step. With --app: limit of a recovery",
    )
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="FILES",
        help="files that must be equal in all runs, such as ckpt/*.pt",
    )
    parser.add_argument(
        "--link",
        dest="links",
        type=os.path.normpath,
        action="append",
        default=[],
        metavar="PATH",
        help="link this instead of copying it; for files that the runs only read",
    )
    parser.add_argument("-o", "--output", metavar="DIR", help="page, results, logs (rehearsal)")
    parser.add_argument("--junit", metavar="FILE", help="write JUnit XML")
    parser.add_json("print the results as one line of JSON")
    parser.add_component("the job, as for `muster run`", more=" Each run has a copy of this folder.")
    parser.set_defaults(run=_run)


def _run(**options: Any) -> int:
    from muster.cli.rehearse.command import Request, rehearse

    return rehearse(Request(**options))
