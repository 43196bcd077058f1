"""The command line `muster`, also `python -m muster`."""

import argparse
import atexit
import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from muster import __version__
from muster._shared.contract import parse_digits, parse_seconds, show_controls
from muster._shared.control import ControlError, ExitCode
from muster._shared.reports import Answer

_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])", re.ASCII)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_MOST_LIMIT_S = 86400.0
_MOST_MINUTES = 10080.0
_TORCHX_COMMANDS = ("cancel", "describe", "runopts", "builtins", "configure", "tracker")

REQUESTS: Mapping[str, str] = {
    "stop": "let all ranks save and stop at one step, and end the job",
    "checkpoint": "let all ranks save at one step",
    "pause": "let all ranks wait at one step",
    "resume": "end a pause",
    "stacks": "print the Python stacks of all ranks, which keep running",
}
"""What is asked of the agents of a running job."""

_EPILOG = """\
exit code: 0 done; 1 refused, nothing was changed; 2 wrong usage; 3 no such app; 4 the app has ended already;
5 some ranks did not do it in time; 6 no agent answers, or a node was lost
"""


_RUN_EPILOG = """\
.torchxconfig counts as for `torchx run`. Ctrl-C stops the job politely; a second one kills it.
exit code: 0 the job has succeeded, or was submitted; 1 it has not; 2 wrong usage; 130 Ctrl-C
`python -m muster.run` is something else: torchrun's module API.
"""
_HOLD_EPILOG = """\
exit code: 0 agents wait on all nodes; 1 the hold has ended, or could not be submitted; 2 wrong usage; 130 Ctrl-C,
which releases the hold
"""
_REHEARSE_EPILOG = """\
{folder} in an argument is the folder of the run.
exit code: 0 all faults that were tried have the verdict "survived" (with --app: at least one); 1 anything else, such
as "started over", "result differs" or an undisturbed run that fails; 2 wrong usage; 130 Ctrl-C, 143 SIGTERM: everything
is undone
"""
_LOG_EPILOG = """\
exit code: 0 done; 1 there is nothing to read; 2 wrong usage; 3 no such app; 6 its scheduler is not reachable
"""
_EXEC_EPILOG = """\
Options come before CMD. The command has the variables of the workers of its node, and runs where they run. What it
leaves in the background ends with it.
exit code: that of the command, or 128 + n after signal n; with several nodes the first that is not 0; 2 wrong usage;
255 it was not run, or its node was lost, and a line says why
"""
_SHELL_EPILOG = """\
The shell is the node's $SHELL, else bash or sh. It has the variables of the workers, and ends with this command.
exit code: that of the shell; 2 wrong usage; 255 none was started, or its node was lost, and a line says why
"""
_STATES = """\
exit code: 0 succeeded; 1 failed; 7 cancelled; 8 how it ended, or whether it runs, is not known; 10 it runs; 11 it waits
to run; 2 wrong usage; 3 no such app; 6 its scheduler is not reachable
"""
_LIST_EPILOG = """\
exit code: 0 done; 2 wrong usage; 6 a scheduler that -s names is not reachable
"""


class _Formatter(logging.Formatter):
    """TorchX's warnings quote files of others."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """See `logging`."""
        return show_controls(super().formatMessage(record))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # Else the interpreter searches all objects for cycles at its end, a tenth of the CPU time of `muster run`.
    atexit.register(gc.freeze)
    try:
        code = _run(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nmuster: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `muster stacks ... | head`
        null_fd = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_fd, 1)  # the rest is written at exit
        os.close(null_fd)
        return 128 + signal.SIGPIPE
    return code


def _run(argv: Sequence[str] | None) -> int:
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("muster: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    parser = build_parser()
    args = _parse(parser, argv)
    if os.path.expanduser("~") == "~":  # TorchX looks for it when it is imported
        print("muster: this user has no home folder: set HOME", file=sys.stderr)
        return 2
    if args.command == "prune":
        from muster.cli.prune import prune

        return prune(older_than_s=args.older_than, dry_run=args.dry_run, yes=args.yes)
    if args.command in ("run", "rehearse", "hold"):
        return _run_job(args, parser, sys.argv[1:] if argv is None else argv)
    if args.command == "rerun":
        return _rerun(parser, watches=args.watch)
    if args.command in ("status", "list", "log", "top", "events", "timeline"):
        return _show(args)
    if args.command in ("exec", "shell"):
        return _go_inside(args, parser)
    if args.command == "release":
        return _release(args)
    if args.command == "doctor":
        from muster.cli.doctor.command import diagnose

        return diagnose(nproc=args.nproc, devices=args.devices, log_dir=args.log_dir, as_json=args.json)
    if args.command == "completion":
        from muster.cli.completion import write_completion

        return write_completion(args.shell, parser)
    return _run_request(args)


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Do as `parse_args`, but what a command does not know is refused with the usage of that command."""
    from muster.cli.completion import list_commands, list_options

    words = order_exec_words(sys.argv[1:] if argv is None else argv)
    commands = list_commands(parser)
    if words and not words[0].startswith("-") and words[0] not in commands:
        parser.exit(ExitCode.USAGE, f"muster: {_refuse_command(words[0], commands)}\n")
    args, unknown = parser.parse_known_args(words)
    if unknown:
        hint = _find_near_option(unknown[0], list_options(parser)[args.command])
        if "component" in args:
            hint = hint or "; a component such as dist.ddp must stand before its arguments"
        commands[args.command].error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return args


def _find_near_option(word: str, options: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(word.partition("=")[0], options, 1)
    return f"; did you mean {near[0]}?" if word.startswith("--") and near else ""


def _refuse_command(word: str, commands: Iterable[str]) -> str:
    import difflib

    near = difflib.get_close_matches(word, commands, 1)
    if word in _TORCHX_COMMANDS:
        hint = f"`torchx {word}` is one" + ("; `muster stop` lets the ranks save first" if word == "cancel" else "")
    else:
        hint = f"did you mean {near[0]!r}?" if near else "`muster --help` lists them"
    return f"there is no command {word!r}: {hint}"


def order_exec_words(argv: Sequence[str]) -> list[str]:
    """Put the options of `exec` before its APP_HANDLE: argparse gives all that follows it to the command."""
    words = list(argv)
    if words[:1] != ["exec"]:
        return words
    options: list[str] = []
    rest = words[1:]
    handle: list[str] = []
    while rest and (rest[0].startswith("-") or not handle):
        if rest[0] == "--":
            break
        if not rest[0].startswith("-"):
            handle = [rest.pop(0)]
            continue
        has_value = any(each.startswith(rest[0]) for each in ("--node", "--role"))  # abbreviated, too
        options += rest[: 1 + has_value]
        del rest[: 1 + has_value]
    return ["exec", *options, *handle, *rest]


def _go_inside(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from muster.cli import answers
    from muster.cli.completion import list_commands
    from muster.cli.inside.targets import FAILED

    try:
        if args.command == "shell":
            from muster.cli.inside import shell_command

            return shell_command.run(args.handle, role=args.role, node=args.node)
        from muster.cli.inside import exec_command

        words = args.words[1:] if args.words[:1] == ["--"] else args.words
        if not words:
            list_commands(parser)["exec"].error("CMD is missing")
        return exec_command.run(args.handle, words, role=args.role, node=args.node, takes_all=args.all)
    except ControlError as error:
        code = answers.print_error(error, as_json=False)
        return code if error.exit_code is ExitCode.USAGE else FAILED


def _release(args: argparse.Namespace) -> int:
    from muster.cli import answers, hold_command

    try:
        return answers.print_answer(hold_command.release(args.handle, now=args.now), as_json=args.json)
    except ControlError as error:
        return answers.print_error(error, as_json=args.json)


def _rerun(parser: argparse.ArgumentParser, *, watches: bool) -> int:
    from muster.cli import answers
    from muster.cli.rerun import command

    try:
        words = command.read_line()
        command.show_line(words)
        if not watches:
            return _run(words)
        from muster.cli.run_command import find_workspace_folder

        return command.watch(words, find_workspace_folder(_parse(parser, words).workspace))
    except ControlError as error:
        return answers.print_error(error, as_json=False)


def _run_job(args: argparse.Namespace, parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    from muster.cli import answers, run_command

    try:
        if args.command == "run":
            if not args.dryrun:
                from muster.cli.rerun.command import record_line

                record_line(words)
            return run_command.run(args, parser)
        if args.command == "hold":
            from muster.cli import hold_command

            return hold_command.hold(args, parser)
        from muster.cli.rehearse.command import rehearse

        return rehearse(args, parser)
    except ControlError as error:
        return answers.print_error(error, as_json=getattr(args, "json", False))


def _show(args: argparse.Namespace) -> int:
    from muster.cli import answers, overview

    as_json = getattr(args, "json", False)
    try:
        if args.command == "log":
            return _print_log(args)
        if args.command in ("events", "timeline"):
            return _tell_afterwards(args)
        if args.command == "status":
            return overview.print_status(args.handle, as_json=args.json)
        if args.command == "top":
            from muster.cli.top import command

            return command.show(args.handle, once=args.once, as_json=args.json)
        return overview.print_list(args.scheduler, limit=args.limit, as_json=args.json)
    except ControlError as error:
        return answers.print_error(error, as_json=as_json)


def _tell_afterwards(args: argparse.Namespace) -> int:
    from muster.cli.afterwards import commands

    if args.command == "events":
        return commands.print_events(args.handle, role=args.role, as_json=args.json)
    return commands.write_timeline(args.handle, role=args.role, output=args.output, as_json=args.json)


def _print_log(args: argparse.Namespace) -> int:
    from muster.cli.output import log_command

    query = log_command.LogQuery(
        role=args.role,
        node=args.node,
        rank=args.rank,
        attempt=args.attempt,
        failed=args.failed,
        follow=args.follow,
        grep=args.grep,
        stream=args.stream,
    )
    if os.path.isdir(args.handle):
        from muster.cli.afterwards import log_folder
        from muster.cli.output.run_folder import RunFolder

        if log_folder.is_log_folder(args.handle):
            folder = RunFolder(log_folder.find_run(args.handle), log_folder.read_run)
            return log_command.print_folder(folder, query)
    return log_command.print_log(args.handle, query)


def _run_request(args: argparse.Namespace) -> int:
    from muster.cli import answers, operations

    operation: Callable[..., Answer] = getattr(operations, args.command)
    words, options = _list_arguments(args)
    try:
        answer = operation(args.handle, *words, **options)
    except ControlError as error:
        return answers.print_error(error, as_json=args.json)
    except KeyboardInterrupt:
        print("muster: interrupted: what was asked for may still be done", file=sys.stderr)
        return 128 + signal.SIGINT
    return answers.print_answer(answer, as_json=args.json)


def _list_arguments(args: argparse.Namespace) -> tuple[list[int], dict[str, float | str]]:
    """Return what the operation gets besides the handle."""
    if args.command == "resize":
        return [args.nodes], {} if args.role is None else {"role": args.role}
    options = {} if args.limit is None else {"limit_s": args.limit}
    return [], {**options, "now": True} if getattr(args, "now", False) else options


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line. `completion` reads the words from it."""
    parser = argparse.ArgumentParser(
        prog="muster",
        description="Starts jobs, shows them, and talks to those that run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"muster {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands)
    _add_hold(commands)
    text = "run the last `muster run` of this folder again"
    command = commands.add_parser("rerun", help=text, description=f"{text}.", epilog="exit code: as of `muster run`")
    command.add_argument(
        "--watch",
        action="store_true",
        help="run again whenever a file of the workspace changes; the previous run is stopped as by Ctrl-C",
    )
    _add_rehearse(commands)
    _add_overview(commands)
    for name, text in REQUESTS.items():
        command = _add_command(commands, name, text)
        command.add_argument(
            "--limit", type=_parse_limit, default=None, metavar="SECONDS", help="how long the ranks may take (60)"
        )
        if name == "stop":
            command.add_argument(
                "--now",
                action="store_true",
                help="end the job as `torchx cancel` does: the ranks are not asked to save",
            )
    command = _add_command(commands, "resize", "change the number of nodes of an elastic job")
    command.add_argument("nodes", type=_parse_nodes, metavar="NODES", help="the new number, within MIN:MAX of -j")
    command.add_argument("--role", help="which role, if several are elastic")
    text = "continue a job (local_cwd, Docker, ssh) whose supervisor was lost, for example by a reboot"
    _add_command(commands, "recover", text).set_defaults(limit=None)
    command = _add_command(commands, "delete", "stop the job if it runs, and remove it with its logs")
    command.set_defaults(limit=None)
    _add_inside(commands)
    _add_prune(commands)
    _add_doctor(commands)
    command = commands.add_parser("completion", help="print the shell's completion of this command")
    command.add_argument(
        "shell",
        choices=("bash", "zsh", "fish", "apps"),
        help="apps: print the names of jobs, for the completion itself",
    )
    return parser


class _Once(argparse.Action):
    """An option that may be given once, as with `torchx run`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """See `argparse`."""
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} is specified more than once")
        setattr(namespace, self.dest, values)


def _add_submission(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    *,
    epilog: str,
    schedulers: str,
) -> argparse.ArgumentParser:
    """Add a command that submits an app, with a scheduler and its options."""
    command = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("-s", "--scheduler", action=_Once, help=schedulers)
    command.add_argument("-cfg", "--scheduler_args", action=_Once, help="its options: KEY=VALUE,KEY=VALUE")
    return command


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the options of `torchx run`, on both of its lines."""
    text = "submit a job, as `torchx run` does, with live progress bars; the last thing on the screen is its report"
    command = _add_submission(commands, "run", text, epilog=_RUN_EPILOG, schedulers="the scheduler (local_cwd)")
    command.add_argument("--dryrun", action="store_true", help="print what would be submitted, and submit nothing")
    command.add_argument("--wait", action="store_true", help="wait for the end of the job; local_* always waits")
    command.add_argument("--log", action="store_true", help="print the job's lines, and wait for the end")
    command.add_argument(
        "--workspace", action=_Once, help="the folder that travels with the job (this one; '' for none)"
    )
    command.add_argument("--parent_run_id", action=_Once, help="the run that this one belongs to, for trackers")
    command.add_argument(
        "component",
        nargs=argparse.REMAINDER,
        metavar="COMPONENT ...",
        help="a component such as dist.ddp or FILE.py:FUNCTION, and its arguments",
    )


def _add_hold(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "hold nodes: keep agents there that have imported torch, for runs with -s held; prints the hold's handle"
    command = _add_submission(commands, "hold", text, epilog=_HOLD_EPILOG, schedulers="where the nodes are (local_cwd)")
    command.add_argument(
        "--idle-minutes",
        type=_parse_minutes,
        default=30.0,
        metavar="MINUTES",
        help="end the hold after this time without a run (30)",
    )
    command.add_argument("--json", action="store_true", help="print what is held as one line of JSON, when it is ready")
    command.add_argument(
        "component",
        nargs=argparse.REMAINDER,
        metavar="COMPONENT ...",
        help="a component without its program, as dist.ddp -j 2x4 (one node with a process for each GPU, or without "
        "GPUs for each core)",
    )
    text = "end a hold"
    command = commands.add_parser("release", help=text, description=f"{text}.", epilog=_EPILOG)
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument("handle", metavar="APP_HANDLE", nargs="?", help="as `muster hold` prints it (the only hold)")
    command.add_argument("--now", action="store_true", help="stop the run that is on the hold first, if there is one")
    command.add_argument("--json", action="store_true", help="print the answer as one line of JSON")


def _add_rehearse(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "run a job on this machine, undisturbed first, then once for each fault, and say whether it survives"
    command = commands.add_parser(
        "rehearse",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. Each run has a copy of this folder.",
        epilog=_REHEARSE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--faults", metavar="NAMES", help="FAULT or FAULT@MOMENT, separated by commas (all); `list` prints them"
    )
    command.add_argument("--app", metavar="APP_HANDLE", help="disturb this running job instead of starting one")
    command.add_argument("-y", "--yes", action="store_true", help="with --app: do not ask")
    command.add_argument("--quick", action="store_true", help="only the faults that need no hang to be noticed")
    command.add_argument(
        "--seed", type=_parse_index, metavar="N", help="choose the same steps and ranks as the run with this seed"
    )
    command.add_argument("--steps", type=_parse_count, metavar="N", help="end each run after this number of steps")
    command.add_argument(
        "--time-limit",
        type=_parse_limit,
        metavar="SECONDS",
        help="limit of the undisturbed run; the other runs end at its last step. With --app: limit of a recovery",
    )
    command.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="FILES",
        help="files that must be equal in all runs, such as ckpt/*.pt",
    )
    command.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="PATH",
        help="link this instead of copying it; for files that the runs only read",
    )
    command.add_argument("-o", "--output", metavar="DIR", help="page, results, logs (rehearsal)")
    command.add_argument("--junit", metavar="FILE", help="write JUnit XML")
    command.add_argument("--json", action="store_true", help="print the results as one line of JSON")
    command.add_argument(
        "component", nargs=argparse.REMAINDER, metavar="COMPONENT ...", help="the job, as for `muster run`"
    )


def _add_overview(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    what = "APP_HANDLE may be the log folder of a job"
    _add_command(
        commands,
        "status",
        f"print how a job is doing, in one line, and its replicas; {what}",
        epilog=_STATES,
        one=False,
    )
    _add_log(commands)
    command = _add_command(
        commands,
        "top",
        f"show a job on one screen while it runs: its ranks, logs, stacks; without APP_HANDLE all jobs; {what}",
        epilog=_STATES,
        one=False,
    )
    command.set_defaults(handle=None)
    command.add_argument("--once", action="store_true", help="print one page and exit")
    _add_afterwards(commands)
    text = "list the newest jobs of all schedulers, one line each"
    command = commands.add_parser(
        "list",
        help=text,
        description=f"{text}. It names schedulers that cannot be reached.",
        epilog=_LIST_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("-s", "--scheduler", action="append", default=[], help="only this scheduler; may be repeated")
    command.add_argument("-n", "--limit", type=_parse_count, default=20, metavar="COUNT", help="how many at most (20)")
    command.add_argument("--json", action="store_true", help="print the list as one line of JSON")


def _add_afterwards(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    what = "while the job runs or afterwards; APP_HANDLE may be a folder with the logs of a job"
    text = f"print what a job's agents have recorded on all nodes, by the leader's clock, {what}"
    command = _add_command(commands, "events", text, epilog=_LOG_EPILOG, one=False, has_json=False)
    command.add_argument("--role", help="which role, if several run agents")
    command.add_argument("--json", action="store_true", help="print each record as one line of JSON")
    text = f"write a page that shows what happened to a job, and how much time that cost, {what}"
    command = _add_command(commands, "timeline", text, epilog=_LOG_EPILOG, one=False, has_json=False)
    command.add_argument("--role", help="which role, if several run agents")
    command.add_argument("-o", "--output", metavar="FILE", help="the page (NAME.html in this folder)")
    command.add_argument("--json", action="store_true", help="print the facts as one line of JSON")


def _add_log(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "print the output of a job, of one of its nodes or of a rank"
    command = _add_command(commands, "log", text, epilog=_LOG_EPILOG, one=False, has_json=False)
    command.add_argument("--role", help="only this role")
    command.add_argument("--node", type=_parse_index, metavar="N", help="only this node of a role, counted from 0")
    command.add_argument("--rank", type=_parse_index, metavar="N", help="only this global rank")
    command.add_argument("--attempt", type=_parse_index, metavar="N", help="this attempt, counted from 0 (the newest)")
    command.add_argument("--failed", action="store_true", help="only the rank that is the root cause of the failure")
    command.add_argument("-f", "--follow", action="store_true", help="print new lines as they come")
    command.add_argument("--grep", type=_parse_regex, metavar="REGEX", help="only lines that match")
    command.add_argument(
        "--stream", choices=("stdout", "stderr", "combined"), default="combined", help="only this stream (combined)"
    )


def _add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    *,
    epilog: str = _EPILOG,
    one: bool = True,
    has_json: bool = True,
) -> argparse.ArgumentParser:
    """Add a command that names an app. `one`: the name is required. Otherwise the newest is the default."""
    command = commands.add_parser(
        name, help=text, description=f"{text}.", epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument(
        "handle",
        metavar="APP_HANDLE",
        nargs=None if one else "?",
        default=None if one else "last",
        help="what torchx run prints (local_cwd://torchx/train-x7k2), the job's name, the beginning of its name, or "
        "its Slurm job id; `last` is the newest job that you submitted on this machine",
    )
    if has_json:
        command.add_argument("--json", action="store_true", help="print the answer as one line of JSON")
    return command


def _add_inside(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "run a command on one or all nodes of a running job"
    command = _add_command(commands, "exec", text, epilog=_EXEC_EPILOG, has_json=False)
    which = command.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="on all nodes; each line begins with the name of its node")
    which.add_argument("--node", type=_parse_index, metavar="N", help="on this node of a role, counted from 0 (0)")
    command.add_argument("--role", help="which role, if several run agents")
    command.add_argument("words", nargs=argparse.REMAINDER, metavar="CMD ...", help="a program and its arguments")
    text = "open a terminal on a node of a running job"
    command = _add_command(commands, "shell", text, epilog=_SHELL_EPILOG, has_json=False)
    command.add_argument(
        "node", type=_parse_index, nargs="?", metavar="NODE", help="node of a role, counted from 0 (0)"
    )
    command.add_argument("--role", help="which role, if several run agents")


def _add_prune(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "remove what jobs that have ended left behind (this machine, its Docker engine, ssh, Slurm)"
    command = commands.add_parser("prune", help=text, description=f"{text}. Running jobs are never touched.")
    command.add_argument(
        "--older-than",
        type=_parse_age,
        default=0.0,
        metavar="AGE",
        help="only jobs that ended this long ago or earlier: 30m, 12h, 7d, 2w (default: all that have ended)",
    )
    command.add_argument("--dry-run", action="store_true", help="print what would be removed and remove nothing")
    command.add_argument("-y", "--yes", action="store_true", help="do not ask")


def _add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "print what muster sees of this machine, each with a verdict and the next step"
    command = commands.add_parser(
        "doctor",
        help=text,
        description=f"{text}: GPUs, torch, limits, interfaces, a Docker engine, a cluster, Slurm.",
        epilog="exit code: 0 a job can run; 1 something prevents it; 2 wrong usage",
    )
    command.add_argument("--nproc", type=_parse_count, metavar="N", help="workers of a job here (one for each GPU)")
    command.add_argument("--devices", type=_parse_count, metavar="N", help="how many GPUs there must be")
    command.add_argument("--log-dir", metavar="DIR", help="where jobs write their logs")
    command.add_argument("--json", action="store_true", help="one line of JSON for a bug report; it holds no secret")


def _parse_age(text: str) -> float:
    match = _AGE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age such as 30m, 12h, 7d or 2w")
    return float(match[1]) * _UNITS_S[match[2]]


def _parse_nodes(text: str) -> int:
    return _parse_count(text, "number of nodes")


def _parse_count(text: str, what: str = "number") -> int:
    number = parse_digits(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what}, 1 or more")
    return number


def _parse_index(text: str) -> int:
    number = parse_digits(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 0 or more")
    return number


def _parse_regex(text: str) -> "re.Pattern[str]":
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not a regular expression: {error}") from error


def _parse_minutes(text: str) -> float:
    minutes = parse_seconds(text)
    if minutes is None or not 0.01 <= minutes <= _MOST_MINUTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes from 0.01 to {_MOST_MINUTES:g}")
    return minutes


def _parse_limit(text: str) -> float:
    limit_s = parse_seconds(text)
    if limit_s is None or not 1.0 <= limit_s <= _MOST_LIMIT_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to {_MOST_LIMIT_S:g}")
    return limit_s


if __name__ == "__main__":
    sys.exit(main())
