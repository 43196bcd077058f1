"""`muster hold` and `muster release`: nodes that keep agents with torch imported, for runs of `-s held`.

A hold is an app whose roles run the holder in place of the agent, with the agent's flags and without a program. It goes
on when this command ends.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from torchx import specs
from torchx.specs import AppDef, AppState, is_terminal, macros

import muster
from muster._shared.contract import HOLD_FLAG, HOLD_METADATA, AskOutcome, HoldKey, print_line
from muster._shared.control import CommandExit, ControlError, count_nodes
from muster._shared.processes import count_usable_cores
from muster._shared.reports import Answer
from muster.cli import operations, run_command
from muster.cli.adapters import open_runner
from muster.cli.answers import say
from muster.schedulers.adapter.properties import DEFAULT, find_properties
from muster.schedulers.adapter.scheduler import PluginScheduler
from muster.schedulers.adapter.status import build_status
from muster.schedulers.adapter.waiting_line import WaitingLine
from muster.schedulers.agent_command import is_agent_role, list_agent_flags
from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.gpus import list_devices
from muster.schedulers.held.holds import RUNS, SHARED_KEY, add_hold, build_remote, choose_hold, forget_hold, read_states
from muster.schedulers.local.holds import open_hold
from muster.schedulers.runner import config_file
from muster.schedulers.supervision.registry import find_state_dir
from muster.schedulers.wording.words import word_all

_MODULE: Final = "muster.hold"
"""Stands for the program that a component wants."""
_AGENT_WORDS: Final = 2
"""`-m muster.agent`."""
_RELEASE_S: Final = 60.0


def hold(
    *, scheduler: str | None, scheduler_args: str | None, idle_s: float, as_json: bool, component: list[str]
) -> int:
    """Submit a hold, and wait until agents wait on all its nodes. Return the exit code.

    Args:
        scheduler: its name. None: the default.
        scheduler_args: its options, as of `-cfg`.
        idle_s: the hold ends after this time without a run.
        as_json: print what is held as one line of JSON.
        component: its name without its program, and its arguments.

    Raises:
        ArgumentError: the words repeat an argument.
        ControlError: it cannot be submitted, or it has ended before it was ready.
    """
    config_file.check_files()
    name = scheduler or DEFAULT
    properties = find_properties(name)
    if properties.refuses_hold:
        raise ControlError(properties.refuses_hold, CommandExit.USAGE)
    app = build_hold_app(_build_app(component), idle_s=idle_s)
    with open_runner(name, scheduler_args) as (made, runner, cfg):
        if "detach" in dict(made.run_opts()) and str(cfg.setdefault("detach", "true")).lower() != "true":
            raise ControlError("a hold always goes on when its command ends: leave detach=false out", CommandExit.USAGE)
        for option, value in properties.hold_options.items():
            cfg.setdefault(option, value)
        if made.shares_folders(cfg):
            app.roles[0].metadata[SHARED_KEY] = "1"
        handle = runner.schedule(runner.dryrun(app, name, cfg=cfg, workspace=None))
        app_id = specs.parse_app_handle(handle)[2]
        add_hold(find_state_dir(os.environ), name, app_id)
        if not as_json:
            print_line(handle, sys.stdout)
            sys.stdout.flush()
        states = wait_ready(made, app_id, lambda line: say(f"{app_id} {line}"))
    _print_ready(handle, states, as_json=as_json)
    return 0


def _build_app(words: Sequence[str]) -> AppDef:
    """Return the component's app. Without a component, take this machine's devices, or its cores."""
    component, rest = run_command.split_component(words or ["dist.ddp"], None)
    if not any(word.partition("=")[0] in ("-j", "--j") for word in rest):
        count = len(list_devices(os.environ)) or count_usable_cores()
        rest = ["-j", f"1x{count}", *rest]
    if any(word.partition("=")[0] in ("-m", "--m", "--script") for word in rest) or "--" in rest:
        raise ControlError("a hold has no program of its own: leave --script, -m and arguments out", CommandExit.USAGE)
    return run_command.build_app(component, [*rest, "-m", _MODULE])


def build_hold_app(app: AppDef, *, idle_s: float) -> AppDef:
    """Make a hold of a component's app: its role runs the holder, with the agent's flags and no program.

    Raises:
        ControlError: the app has other roles than one that runs the agent.
    """
    if len(app.roles) != 1 or not is_agent_role(app.roles[0]):
        names = ", ".join(role.name for role in app.roles)
        line = f"a hold needs a component with one role, which runs muster's agent; this one has: {names}"
        raise ControlError(line, CommandExit.REFUSED)
    role = app.roles[0]
    flags = list_agent_flags(role.args)
    end = next((flag.begin for flag in flags if role.args[flag.begin] == "-m"), flags[-1].end)
    role.args = [*role.args[:_AGENT_WORDS], HOLD_FLAG, f"{macros.replica_id}:{idle_s:g}", *role.args[_AGENT_WORDS:end]]
    role.metadata[HOLD_METADATA] = muster.__version__
    app.metadata = {**app.metadata, HOLD_METADATA: "1"}
    return app


def _print_ready(handle: str, states: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    first, count = states[0], len(states)
    facts: dict[str, Any] = {
        "handle": handle,
        "nodes": count,
        "processes": int(first.get(HoldKey.NPROC, 0)),
        "modules": list(first.get(HoldKey.MODULES, ())),
        "import_s": max(float(state.get(HoldKey.IMPORT_S, 0.0)) for state in states),
        "idle_limit_s": float(first.get(HoldKey.IDLE_LIMIT_S, 0.0)),
        "exit_code": 0,
    }
    if as_json:
        print(json.dumps(facts))
        return
    processes, modules = facts["processes"], ", ".join(map(str, facts["modules"])) or "nothing"
    most = ("1 process" if processes == 1 else f"{processes} processes") + (" each" if count > 1 else "")
    print(
        f"ready: {count_nodes(count)} with up to {most}; {modules} imported in {facts['import_s']:.1f} s; ends after "
        f"{facts['idle_limit_s'] / 60:g} min without a run. `muster run -s held dist.ddp -j {count}x{processes} "
        f"--script main.py` runs on it, `muster release` ends it",
        file=sys.stderr,
    )


def release(name: str | None, *, now: bool) -> Answer:
    """End a hold.

    Args:
        name: which. None: the only one.
        now: also if a run is on it, which is stopped.

    Raises:
        ControlError: there is no such hold, or a run is on it.
    """
    try:
        state_dir = find_state_dir(os.environ)
        found = choose_hold(state_dir, name)
    except SchedulerError as error:
        raise ControlError(str(error), CommandExit.UNKNOWN) from error
    except EngineError as error:
        raise ControlError(str(error), CommandExit.LOST) from error
    run = found.find_run()
    if run and not now:
        stops = "" if " " in run else f"`muster stop {RUNS}://{run}` stops it, "  # else a program's, not an app
        hint = f"{stops}`muster release --now {found.app_id}` ends both"
        raise ControlError(f"{found.handle} runs {run}: {hint}", CommandExit.REFUSED)
    if run and " " not in run:
        _end(f"{RUNS}://{run}")
    _end(found.handle)
    forget_hold(state_dir, found.app_id)
    return Answer(outcome=AskOutcome.DONE, line=f"{found.handle} is released")


def _end(handle: str) -> None:
    """Cancel an app, if it is known here, and wait for its end."""
    until_s = time.monotonic() + _RELEASE_S
    with operations.open_scheduler(handle) as (scheduler, app_id):
        if scheduler.describe_app(app_id) is None:
            return  # another machine's runs end with the hold
        scheduler.cancel(app_id)
        while time.monotonic() < until_s:
            scheduler.wait_ended(app_id, until_s - time.monotonic())
            response = scheduler.describe_app(app_id)
            if response is None or is_terminal(response.state) or response.state is AppState.UNKNOWN:
                return


_POLL_S: Final = 0.05
_ELSEWHERE_POLL_S: Final = 1.0

_States: TypeAlias = Sequence[Mapping[str, Any]]


def wait_ready(scheduler: PluginScheduler, app_id: str, tell: Callable[[str], None]) -> _States:
    """Wait until agents wait on all nodes of a hold, and return what their holders report. Else cancel the hold.

    Args:
        scheduler: the hold's.
        app_id: of the hold.
        tell: gets lines that say why nodes wait for room.

    Raises:
        ControlError: the hold has ended.
    """
    state_dir = find_state_dir(os.environ)
    try:
        return _wait(scheduler, state_dir, app_id, tell)
    except BaseException:
        scheduler.cancel(app_id)
        forget_hold(state_dir, app_id)
        raise


def _wait(scheduler: PluginScheduler, state_dir: Path, app_id: str, tell: Callable[[str], None]) -> _States:
    is_here = scheduler.properties.has_holders_here
    waiting_line = WaitingLine(lambda _app_id, line: tell(line))
    while True:
        facts = scheduler.read_facts(app_id)
        if facts is None or is_terminal(facts.state):
            why = "it was deleted" if facts is None else word_all(facts.reasons) or facts.state.name
            raise ControlError(f"{app_id} has ended: {why}; `muster log {app_id}` prints why", CommandExit.REFUSED)
        waiting_line.update(build_status(facts))
        states: _States = ()
        if facts.state is AppState.RUNNING and is_here:
            hold, _ = open_hold(state_dir, scheduler.backend, app_id)
            states = () if hold is None else hold.read_states()
        elif facts.state is AppState.RUNNING:
            made = build_remote(state_dir, scheduler.backend, app_id, list(facts.app.roles))
            states = () if made is None else read_states(scheduler, made)
        if states and _are_ready(app_id, states):
            return states
        time.sleep(_POLL_S if is_here else _ELSEWHERE_POLL_S)


def _are_ready(app_id: str, states: _States) -> bool:
    names = {str(state.get(HoldKey.STATE, "")) for state in states}
    if "cold" in names:
        raise ControlError(f"no agent can wait; `muster log {app_id}` prints why", CommandExit.REFUSED)
    return names <= {"ready", "busy"}
