"""`muster run`: `torchx run` with a terminal of its own.

It takes TorchX's arguments, `.torchxconfig` and exit codes, and submits by TorchX's own `Runner`, to one scheduler that
is made with `muster.schedulers.adapter`. A component that is literally one of this package's `dist.*` is called without
TorchX's search for components, which imports all that are installed. TorchX itself is imported, because every adapter
is one of its schedulers, and a component makes its AppDef. `python -m muster.run` is something else: torchrun's module
API.
"""

import argparse
import contextlib
import inspect
import io
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint, entry_points
from itertools import groupby
from pprint import pformat
from typing import Any, Final

from torchx import specs
from torchx.runner import config
from torchx.schedulers.api import DescribeAppResponse
from torchx.specs import AppDef, AppState, is_terminal
from torchx.specs.builders import materialize_appdef, parse_args

from muster._shared.contract import print_line
from muster._shared.control import CommandExit, ControlError
from muster.cli.adapters import open_runner
from muster.cli.answers import say
from muster.cli.streaming import LinePrinter, list_stderr
from muster.schedulers.adapter.properties import DEFAULT
from muster.schedulers.adapter.scheduler import LogRequest, PluginScheduler
from muster.schedulers.adapter.status import count_replicas, parse_status
from muster.schedulers.adapter.waiting_line import WaitingLine
from muster.schedulers.agent_command import is_agent_role
from muster.schedulers.failure_report import find_root_cause
from muster.schedulers.runner import config_file
from muster.schedulers.runner.command_line import is_interrupted
from muster.schedulers.runner.dry_run import get_app
from muster.schedulers.runner.option_parsing import FALSE_WORDS
from muster.schedulers.runner.roles import name_workspace
from muster.schedulers.wording.job_line import format_line

_WAIT_S: Final = 60.0
_INTERRUPTED: Final = 128 + signal.SIGINT
_CLOSE_S: Final = 1.0
"""For last lines after the scheduler was closed, which waits for them itself where it ends the job."""
_COMPONENTS: Final = "muster.components.dist"
_DIST: Final = ("ddp", "spmd", "torchrun")
_OF_TORCHRUN: Final = ("nnodes", "nproc", "nproc_per_node")
"""Flags of torchrun for what -j says."""
_HELP, _HELP_ALL = "--help", "--help-all"
_NEAR: Final = 0.75
"""How much a name is like the one that is meant. With less, `--data` of a script would be `--metadata`."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of the command. None: one is not given."""

    scheduler: str | None
    scheduler_args: str | None
    dryrun: bool
    wait: bool
    log: bool
    workspace: str | None
    parent_run_id: str | None
    component: Sequence[str]
    """The words that follow the options."""


def run(options: RunOptions) -> int:
    """Submit a job, and print its lines until it has ended. Return the exit code.

    Raises:
        ArgumentError: the words name no component, or repeat an argument.
        ControlError: the scheduler cannot be used, or the job cannot be submitted.
    """
    config_file.check_files()
    defaults = config.get_configs(prefix="cli", name="run")
    name = options.scheduler or defaults.get("scheduler") or DEFAULT
    workspace = defaults.get("workspace") if options.workspace is None else options.workspace
    component, words = split_component(options.component, defaults.get("component"))
    os.environ.setdefault("TORCHX_CONTEXT_NAME", "cli_run")
    with open_runner(name, options.scheduler_args) as (scheduler, runner, cfg):
        for option, value in scheduler.properties.run_options.items():
            cfg.setdefault(option, value)
        info = runner.dryrun(
            build_app(component, words),
            name,
            cfg=cfg,
            workspace=name_workspace(os.getcwd()) if workspace is None else workspace,
            parent_run_id=options.parent_run_id,
        )
        if options.dryrun:
            app = get_app(info)
            print(f"\n=== APPLICATION ===\n{pformat(app and asdict(app), indent=2, width=80)}")
            print(f"\n=== SCHEDULER REQUEST ===\n{info}")
            return 0
        handle = runner.schedule(info)
        print_line(handle, sys.stdout)
        sys.stdout.flush()
        app_id = specs.parse_app_handle(handle)[2]
        is_attached = scheduler.properties.waits or str(cfg.get("detach")).lower() in FALSE_WORDS
        if not (is_attached or options.wait or options.log):
            response = scheduler.describe(app_id)
            if response is not None:
                say(format_line(parse_status(response)))
            return 0
        return _follow(scheduler, app_id, is_attached=is_attached, shows_lines=is_attached or options.log)


def split_component(words: Sequence[str], default: str | None) -> tuple[str, list[str]]:
    """Return the component's name and its arguments, as TorchX splits them.

    Args:
        words: what follows the options.
        default: of `.torchxconfig`, where the words name no component. None: there is none.

    Raises:
        ArgumentError: the words name no component, or repeat an argument.
    """
    rest = list(words[1:] if words[:1] == ["--"] else words)
    named = rest.pop(0) if rest and not rest[0].startswith("-") else default
    for _, group in groupby(rest, key=lambda word: word == "--"):
        counts = Counter(word for word in group if word.startswith("-") and word not in ("-", "--"))
        repeated = [word for word, count in counts.items() if count > 1]
        if repeated:
            raise argparse.ArgumentError(None, f"repeated arguments of the component: {', '.join(repeated)}")
    if not named:
        line = "name a component, such as dist.ddp; or in .torchxconfig, section [cli:run], `component`"
        raise argparse.ArgumentError(None, line)
    return named, rest


def list_own(words: Sequence[str]) -> Sequence[str]:
    """Return the arguments of a component without those of its script."""
    return words[: words.index("--")] if "--" in words else words


def wants_help(words: Sequence[str]) -> bool:
    """Return whether a component is asked for its parameters, and nothing is run."""
    return not {_HELP, _HELP_ALL}.isdisjoint(list_own(words))


def build_app(component: str, words: Sequence[str]) -> AppDef:
    """Build the AppDef of a component, with the defaults of `.torchxconfig`.

    Raises:
        ControlError: there is no such component, or its arguments are wrong.
    """
    defaults = config.load_sections(prefix="component").get(component)
    function = None
    try:
        function = find_function(component)
        _check_words(component, function, words, defaults)
        return materialize_appdef(function, list(words), defaults)
    except Exception as error:
        from torchx.specs.finder import ComponentNotFoundException, ComponentValidationException

        if isinstance(error, ComponentNotFoundException):
            hint = _hint_at_component(component)
            if hint:
                raise ControlError(f"there is no component {component!r}: {hint}", CommandExit.REFUSED) from error
        is_no_file = isinstance(error, FileNotFoundError) and function is None
        is_known = isinstance(error, (ComponentValidationException, ComponentNotFoundException))
        if not (is_no_file or is_known or _is_of_decoding(error)):
            raise
        raise ControlError(f"component {component}: {' '.join(str(error).split())}", CommandExit.REFUSED) from error


def _is_of_decoding(error: Exception) -> bool:
    """Return whether TorchX has raised it for an argument that should be pairs or a list."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, ValueError) and frame.f_globals.get("__name__") == "torchx.util.types"


def _check_words(component: str, function: Any, words: Sequence[str], defaults: dict[str, str] | None) -> None:
    """Refuse wrong arguments of a component in one line. TorchX's parser prints a screen of usage above its error.

    Raises:
        SystemExit: 0, after the help that the words ask for was printed.
        ControlError: the arguments are wrong.
    """
    errors, told = io.StringIO(), io.StringIO()
    asked = [_HELP if word == _HELP_ALL else word for word in words]  # TorchX's parser finds out whether it is asked
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(told):
            parse_args(function, asked, defaults)
    except SystemExit as end:
        if not end.code:
            print(_format_help(function, words, defaults) or told.getvalue(), end="")
            raise
        line = " ".join(errors.getvalue().rpartition(": error: ")[2].split())
        hint = _hint_at_unknown(component, words, inspect.signature(function).parameters)
        raise ControlError(f"arguments of {component}: {line}; {hint}", CommandExit.USAGE) from end


def _format_help(function: Any, words: Sequence[str], defaults: Mapping[str, str] | None) -> str:
    """Return the help of one of this package's components. "": it is none."""
    if function.__module__ != _COMPONENTS:
        return ""
    from muster.components.help_text import format_help

    return format_help(function, defaults or {}, shows_all=_HELP_ALL in words)


def _hint_at_component(name: str) -> str:
    """Say which component may be meant by a name that has none. "": none is like it."""
    from difflib import get_close_matches

    from torchx.specs.finder import get_components

    if name.endswith(".py"):
        return f"dist.ddp runs a script: `muster run dist.ddp --script {name}`"
    known = get_components()
    near = [each for each in known if each.endswith(f".{name}")] or get_close_matches(name, known, 1, _NEAR)
    return f"did you mean {near[0]!r}?" if near else ""


def _hint_at_unknown(component: str, words: Sequence[str], parameters: Collection[str]) -> str:
    """Say what may be meant by flags for which a component has no parameter, or else where each word belongs."""
    from difflib import get_close_matches

    flags = [word[2:].partition("=")[0] for word in list_own(words) if word.startswith("--")]
    unknown = [flag.replace("-", "_") for flag in flags if flag not in parameters]
    if "j" in parameters and any(name in _OF_TORCHRUN for name in unknown):
        return "use `-j NODESxPROCESSES`, for example -j 2x4"
    meant = [f"'--{near}'" for name in unknown for near in get_close_matches(name, parameters, 1, _NEAR)]
    if meant:
        return f"did you mean {' and '.join(meant)}?"
    where = "options of `muster run` stand before the component, arguments of the script follow `--`"
    return f"`muster run {component} --help` lists them; {where}"


def find_function(component: str) -> Any:
    """Return the component's function.

    TorchX's search imports all components that are installed, for a list of them.
    """
    package, _, function = component.partition(".")
    ours = find_our_dist()
    if package == "dist" and function in _DIST and ours is not None:
        return getattr(ours.load(), function)
    from torchx.specs.finder import get_component

    return get_component(component).fn


def find_our_dist() -> EntryPoint | None:
    """Return the entry point of `dist.*` if it is this package's: of two of one name TorchX takes the last."""
    found = [point for point in entry_points(group="torchx.components") if point.name == "dist"]
    return found[-1] if found and found[-1].value == _COMPONENTS else None


def find_workspace_folder(named: str | None) -> str:
    """Return the folder whose files `muster rerun --watch` watches.

    Args:
        named: `--workspace`. None: that of `.torchxconfig`, or this folder.
    """
    config_file.check_files()
    workspace = config.get_configs(prefix="cli", name="run").get("workspace") if named is None else named
    folder = (workspace or "").removeprefix("file://")
    return folder if os.path.isdir(folder) else os.getcwd()


def _follow(scheduler: PluginScheduler, app_id: str, *, is_attached: bool, shows_lines: bool) -> int:
    """Print the job's lines, wait for its end, and end with its report. Return an exit code as `torchx run`."""
    printer = LinePrinter(sys.stderr)
    waiting_line = WaitingLine(lambda app_id, line: say(f"{app_id} {line}"))
    try:
        response = scheduler.describe(app_id)
        if shows_lines and response is not None:
            replicas = [(role, index) for role, count in count_replicas(response).items() for index in range(count)]
            printer.start(
                replicas,
                lambda role, index: _read_lines(scheduler, app_id, role, index),
                lambda role: scheduler.count_merged_ranks(app_id, role),
                (lambda: scheduler.read_status_line(app_id)) if scheduler.TELLS_STATUS else None,
            )
        while response is not None and not is_terminal(response.state) and response.state is not AppState.UNKNOWN:
            waiting_line.update(response)
            scheduler.wait_ended(app_id, _WAIT_S)
            response = scheduler.describe(app_id)
        has_report = printer.finish()
        if response is not None and response.state is AppState.FAILED and not shows_lines:
            has_report = _print_report(scheduler, app_id, response)
    except BaseException as error:
        scheduler.close()  # its last lines still come, and after Ctrl-C whether the job goes on
        printer.finish(_CLOSE_S)
        if not is_attached and isinstance(error, KeyboardInterrupt):
            return _INTERRUPTED  # `close` has said that the job goes on
        if not is_attached and not is_interrupted(error):
            say(f"{app_id} goes on; `muster stop {scheduler.backend}://{app_id}` ends it")
        raise
    if response is None:
        raise ControlError(f"{app_id} no longer exists: {scheduler.properties.deleted}", CommandExit.UNKNOWN)
    if response.state is AppState.SUCCEEDED or not has_report:
        facts = scheduler.read_facts(app_id)
        say(f"{app_id} {format_line(parse_status(response) if facts is None else facts)}")
    return 0 if response.state is AppState.SUCCEEDED else 1


def _print_report(scheduler: PluginScheduler, app_id: str, response: DescribeAppResponse) -> bool:
    """Print the report of a job whose lines were not shown, and return whether it was found in the output of node 0.

    Where it is not there, print what else is known of the root cause. The report may say that a traceback is above, so
    a line names the commands that print the job's output.
    """
    roles = [role.name for role in response.roles if is_agent_role(role)]
    if not roles:
        return False
    root_lines = f"`muster log --failed {app_id}` those of the root cause"
    say(f"the job's lines were not shown: `muster log {app_id}` prints them, {root_lines}")
    printer = LinePrinter(sys.stderr, shows_lines=False)
    printer.start([(role, 0) for role in roles], lambda role, index: _read_lines(scheduler, app_id, role, index))
    if printer.finish():
        return True
    root = next(filter(None, map(find_root_cause, parse_status(response).reports.values())), None)
    lines = [] if root is None else list(list_stderr(root))
    if root is not None and lines:
        say(f"the report is not in the output of node 0; it has these lines of rank {root.global_rank}, the root cause")
        for line in lines:
            print_line(line)
    return False


def _read_lines(scheduler: PluginScheduler, app_id: str, role: str, index: int) -> Iterable[str]:
    return scheduler.read_log(app_id, LogRequest(role=role, index=index, follow=True))
