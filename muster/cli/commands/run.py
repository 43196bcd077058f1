"""The commands that start jobs: `run`, `rerun`, `rehearse`, `hold` and `release`."""

import argparse
import os
import shlex
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from muster._shared.contract import parse_seconds
from muster.cli.commands import build_parser, parse, run_words
from muster.cli.commands.parser import CommandParser, Once, parse_count, parse_index, parse_limit

_RUN_EPILOG: Final = """\
`muster run dist.ddp --help` shows what describes a job: program, nodes, processes, restarts.
.torchxconfig counts as for `torchx run`. Ctrl-C stops the job politely; a second one kills it.
exit code: 0 the job has succeeded, or was submitted; 1 it has not; 2 wrong usage; 130 Ctrl-C
`python -m muster.run` is something else: torchrun's module API.
"""


def add_run(parser: CommandParser) -> None:
    """Add its options, and the component."""
    parser.epilog = _RUN_EPILOG
    parser.add_argument(
        "--help-all", dest="help", action=_HelpAll, help="show this message and all parameters of dist.ddp, and exit"
    )
    parser.add_scheduler("the scheduler (local_cwd)")
    parser.add_argument("--dryrun", action="store_true", help="print what would be submitted, and submit nothing")
    parser.add_argument("--wait", action="store_true", help="wait for the end of the job; local_* always waits")
    parser.add_argument("--log", action="store_true", help="print the job's lines, and wait for the end")
    parser.add_argument("--workspace", action=Once, help="the folder that travels with the job (this one; '' for none)")
    parser.add_argument("--parent_run_id", action=Once, help="the run that this one belongs to, for trackers")
    parser.add_component(
        "a component such as dist.ddp or FILE.py:FUNCTION, and its arguments",
        more=" The last thing on the screen is its report.",
    )
    parser.set_defaults(run=partial(_submit, parser.line))


class _HelpAll(argparse.Action):
    """An option that prints what the component has, too."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """See `argparse`."""
        from muster.cli.run_command import build_app

        parser.print_help()
        print()
        build_app("dist.ddp", [self.option_strings[0]])


def _submit(line: tuple[str, ...], **options: Any) -> int:
    from muster.cli import run_command

    given = run_command.RunOptions(**options)
    if not (given.dryrun or run_command.wants_help(given.component)):
        from muster.cli.rerun_command import record_line

        record_line(line)
    return run_command.run(given)


_MOST_MINUTES: Final = 10080.0
_IDLE_S: Final = 1800.0
_HOLD_EPILOG: Final = """\
exit code: 0 agents wait on all nodes; 1 the hold has ended, or could not be submitted; 2 wrong usage; 130 Ctrl-C,
which releases the hold
"""


def add_hold(parser: CommandParser) -> None:
    """Add its options, and the component."""
    parser.epilog = _HOLD_EPILOG
    parser.add_scheduler("where the nodes are (local_cwd)")
    parser.add_argument(
        "--idle-minutes",
        dest="idle_s",
        type=_parse_minutes,
        default=_IDLE_S,
        metavar="MINUTES",
        help="end the hold after this time without a run (30)",
    )
    parser.add_json("print what is held as one line of JSON, when it is ready")
    parser.add_component(
        "a component without its program, as dist.ddp -j 2x4 (one node with a process for each GPU, or without "
        "GPUs for each core)",
        more=" It prints the hold's handle.",
    )
    parser.set_defaults(run="muster.cli.hold_command:hold")


def _parse_minutes(text: str) -> float:
    """Return seconds."""
    minutes = parse_seconds(text)
    if minutes is None or not 0.01 <= minutes <= _MOST_MINUTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes from 0.01 to {_MOST_MINUTES:g}")
    return minutes * 60


def add_release(parser: CommandParser) -> None:
    """Add its options."""
    parser.add_handle("?", text="as `muster hold` prints it (the only hold)")
    parser.add_argument("--now", action="store_true", help="stop the run that is on the hold first, if there is one")
    parser.add_json()
    parser.set_defaults(run=_run_release)


def _run_release(*, handle: str | None, now: bool, as_json: bool) -> int:
    from muster.cli import answers, hold_command

    return answers.print_answer(hold_command.release(handle, now=now), as_json=as_json)


def add_rerun(parser: CommandParser) -> None:
    """Add its option."""
    parser.epilog = "exit code: as of `muster run`"
    parser.add_argument(
        "--watch",
        action="store_true",
        help="run again whenever a file of the workspace changes; the previous run is stopped as by Ctrl-C",
    )
    parser.set_defaults(run=_run_rerun)


def _run_rerun(*, watch: bool) -> int:
    from muster.cli import rerun_command
    from muster.cli.answers import say

    words = rerun_command.read_line()
    say(f"muster {shlex.join(words)}")
    if not watch:
        return run_words(words)
    from muster.cli.run_command import find_workspace_folder

    return rerun_command.watch(words, find_workspace_folder(parse(build_parser(words), words).workspace))


_REHEARSE_EPILOG: Final = """\
{folder} in an argument is the folder of the run.
exit code: 0 all faults that were tried have the verdict "survived" (with --app: at least one); 1 anything else, such
as "started over", "result differs" or an undisturbed run that fails; 2 wrong usage; 130 Ctrl-C, 143 SIGTERM: everything
is undone
"""


def add_rehearse(parser: CommandParser) -> None:
    """Add its options, and the component."""
    parser.epilog = _REHEARSE_EPILOG
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
    parser.add_component(
        "the job, as for `muster run`", more=" The first run is undisturbed. Each run has a copy of this folder."
    )
    parser.set_defaults(run="muster.cli.rehearse.command:rehearse")
