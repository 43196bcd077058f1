"""The holds of all adapters. Those of this machine are `local.holds`, and the others are asked through their adapter.

    <state>/muster/holds/<app id>     the scheduler that has the app; removed when it has ended

A hold is an app one of whose roles runs the holder. The user's state folder lists them, in `holds`. A handle that is
not there may name a hold that another machine has submitted. The nodes of a hold elsewhere are asked what it does.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from torchx.specs import AppState, is_terminal

from muster._shared.contract import HOLD_FLAG, HOLD_METADATA, HOLD_STATE_NAME, HoldKey, print_line
from muster._shared.control import ControlError
from muster._shared.foreign_files import read_whole
from muster.schedulers.adapter.properties import find_properties
from muster.schedulers.adapter.scheduler import PluginScheduler
from muster.schedulers.agent_command import find_agent_flag
from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.held.link import load_scheduler
from muster.schedulers.local import holds as local
from muster.schedulers.local.hold_lock import find_owner, lock_hold
from muster.schedulers.local.holds import Hold, open_hold
from muster.schedulers.node_program.frames import HOLD_DIR
from muster.schedulers.node_program.session import WORDS, Order, find_name, run_captured
from muster.schedulers.supervision.registry import find_state_dir
from muster.schedulers.wording.reasons import Reasons

RUNS: Final = "held"
"""The scheduler under whose name runs are found."""
INDEX: Final = "holds"
"""In the state folder: a file for each hold."""
SHARED_KEY: Final = "muster.hold_shares_folders"
"""In the metadata of a hold's role: its nodes have the folders of this machine, so that no workspace travels."""
_STATE_LIMIT_S: Final = 8.0
_AT_ONCE: Final = 16
_POLL_S: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class RemoteHold:
    """A hold of another adapter."""

    scheduler: str
    app_id: str
    role: str
    nodes: int
    processes: int
    """Most of a run on each node. 0: not known."""
    version: str
    """The version of the muster that has submitted it."""
    shares_folders: bool
    lock_path: Path
    """The path of the file that the supervisor of a run from this machine has locked."""

    @property
    def handle(self) -> str:
        """The handle as people write it."""
        return f"{self.scheduler}://{self.app_id}"

    def read_states(self) -> list[Mapping[str, Any]]:
        """Return what the holders report, by node. It is empty where one reports nothing."""
        with contextlib.closing(load_scheduler(self.scheduler)) as scheduler:
            return read_states(scheduler, self)

    def find_run(self) -> str:
        """Return the name of the run that has the hold. "": none has."""
        owner = find_owner(self.lock_path)
        return owner or str(next(iter(self.read_states()), {}).get(HoldKey.RUN, ""))


AnyHold: TypeAlias = Hold | RemoteHold


def read_states(scheduler: PluginScheduler, hold: RemoteHold) -> list[Mapping[str, Any]]:
    """Read what the holders of all nodes report, on several at a time."""
    from concurrent.futures import ThreadPoolExecutor  # a run on a hold of this machine needs none

    def read(index: int) -> Mapping[str, Any]:
        return read_state(scheduler, hold.app_id, hold.role, index)

    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, max(1, hold.nodes))) as pool:
        return list(pool.map(read, range(hold.nodes)))


def read_state(scheduler: PluginScheduler, app_id: str, role: str, index: int) -> Mapping[str, Any]:
    """Read what the holder of one node reports. It is empty if that is nothing."""
    command = ["cat", f"{HOLD_DIR}/{HOLD_STATE_NAME}"]
    try:
        code, output, _ = run_beside_holder(scheduler, app_id, role, index, command, {}, _STATE_LIMIT_S)
        content = json.loads(output) if code == 0 else {}
    except (ControlError, EngineError, SchedulerError, OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def run_beside_holder(
    scheduler: PluginScheduler,
    app_id: str,
    role: str,
    index: int,
    command: Sequence[str],
    env: Mapping[str, str],
    limit_s: float,
) -> tuple[int, str, str]:
    """Run a command on a node of a hold. Return its exit code, standard output and standard error.

    Args:
        scheduler: the hold's.
        app_id: of the hold.
        role: of the hold.
        index: of the node.
        command: and its arguments, see `agents.complete_order`.
        env: its variables, beside the holder's.
        limit_s: the longest time, in seconds.

    Raises:
        ControlError, EngineError, SchedulerError: it cannot be run there, or does not end within the limit.
    """
    order = Order(app=find_name(app_id), index=index, command=command, env=env, is_hold=True)
    return run_captured(scheduler.open_in_node(app_id, role, index, WORDS), order, limit_s)


def explain_remote(state_dir: Path, scheduler: PluginScheduler, app_id: str, roles: Sequence[Any]) -> Reasons:
    """Return what a hold of another adapter runs, or since when it is idle. Empty: the app is no hold.

    Args:
        state_dir: see `registry.find_state_dir`.
        scheduler: the app's.
        app_id: of the app.
        roles: of the app.
    """
    if scheduler.properties.has_holders_here:
        return ()
    hold = build_remote(state_dir, scheduler.backend, app_id, roles)
    if hold is None:
        return ()
    run = find_owner(hold.lock_path)
    state = {} if run else read_state(scheduler, app_id, hold.role, 0)
    return (local.explain_states(run or str(state.get(HoldKey.RUN, "")), [state]),)


def is_remote(state_dir: Path, name: str | None) -> bool:
    """Return whether the hold that a person means is another adapter's, as far as known without asking any.

    Args:
        state_dir: see `registry.find_state_dir`.
        name: see `choose_hold`.
    """
    scheme, found, _ = (name or "").partition("://")
    if found:
        return not find_properties(scheme).has_holders_here
    names = {scheduler for app_id, scheduler in list_entries(state_dir) if _fits(app_id, name)}
    kinds = {not find_properties(scheduler).has_holders_here for scheduler in names}
    if kinds == {True, False}:
        kinds = {isinstance(each, RemoteHold) for each in find_all(state_dir) if _fits(each.app_id, name)}
    return kinds == {True}


def _fits(app_id: str, name: str | None) -> bool:
    return name is None or find_name(app_id).startswith(find_name(name.rpartition("/")[2]))


def find_all(state_dir: Path) -> list[AnyHold]:
    """Return the holds that have not ended, oldest first. Those that have ended are forgotten.

    Args:
        state_dir: see `registry.find_state_dir`.
    """
    found: list[AnyHold] = []
    for app_id, name in list_entries(state_dir):
        is_here = find_properties(name).has_holders_here
        hold, has_ended = open_hold(state_dir, name, app_id) if is_here else _open_remote(state_dir, name, app_id)
        if has_ended:
            forget_hold(state_dir, app_id)
        elif hold is not None:
            found.append(hold)
    return found


def _open_remote(state_dir: Path, name: str, app_id: str) -> tuple[RemoteHold | None, bool]:
    response = describe(name, app_id)
    if response is None or is_terminal(response.state):
        return None, True
    is_lost = response.state is AppState.UNKNOWN  # `muster recover` continues it
    return None if is_lost else build_remote(state_dir, name, app_id, list(response.roles)), False


def add_hold(state_dir: Path, scheduler: str, app_id: str) -> None:
    """Record a hold, with the scheduler that has the app."""
    folder = state_dir / INDEX
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / app_id).write_text(scheduler)


def list_entries(state_dir: Path) -> list[tuple[str, str]]:
    """Return what `add_hold` has recorded, oldest first: the app's id and its scheduler. Holds may have ended."""
    try:
        entries = [entry for entry in os.scandir(state_dir / INDEX) if not entry.name.startswith(".")]
    except FileNotFoundError:
        return []
    return [(entry.name, read_whole(entry).decode(errors="replace")) for entry in sorted(entries, key=_read_time)]


def _read_time(entry: "os.DirEntry[str]") -> int:
    return entry.stat().st_mtime_ns


def forget_hold(state_dir: Path, app_id: str) -> None:
    """Remove what `add_hold` has recorded."""
    with contextlib.suppress(OSError):
        (state_dir / INDEX / app_id).unlink()


def describe(scheduler_name: str, app_id: str) -> Any:
    """Return what an adapter reports to TorchX of an app. None: it is not known (any more).

    Raises:
        EngineError: that cannot be found out now.
    """
    with contextlib.closing(load_scheduler(scheduler_name)) as scheduler:
        return scheduler.describe_app(app_id)


def build_remote(state_dir: Path, scheduler_name: str, app_id: str, roles: Sequence[Any]) -> RemoteHold | None:
    """Return the hold that an app with these roles is. None: it is none."""
    role = next((each for each in roles if HOLD_FLAG in each.args), None)
    if role is None:
        return None
    processes = find_agent_flag(role.args, "nproc-per-node") or "1"
    folder = state_dir / INDEX
    folder.mkdir(mode=0o700, exist_ok=True)
    return RemoteHold(
        scheduler=scheduler_name,
        app_id=app_id,
        role=str(role.name),
        nodes=int(role.num_replicas),
        processes=int(processes) if processes.isdecimal() else 0,
        version=str(role.metadata.get(HOLD_METADATA, "")),
        shares_folders=SHARED_KEY in role.metadata,
        lock_path=folder / f".{app_id}.lock",
    )


def choose_hold(state_dir: Path, name: str | None) -> AnyHold:
    """Return the hold that a person means.

    Args:
        state_dir: see `find_all`.
        name: a handle, an app's id or its beginning. None: the only one.

    Raises:
        SchedulerError: there is none, or several. It is one line.
        EngineError: it cannot be found out now what there is.
    """
    scheme, found_scheme, _ = (name or "").partition("://")
    app_id = (name or "").rpartition("/")[2]
    if found_scheme and not find_properties(scheme).has_holders_here:
        response = describe(scheme, app_id)
        if response is not None and response.state is AppState.UNKNOWN:
            raise EngineError(f"{scheme}://{app_id}: {' '.join(str(response.msg).split())}")
        if response is not None and not is_terminal(response.state):
            hold = build_remote(state_dir, scheme, app_id, list(response.roles))
            if hold is not None:
                return hold
    holds = find_all(state_dir)
    names = ", ".join(each.handle for each in holds)
    if name is None:
        if not holds:
            raise SchedulerError("nothing is held here; `muster hold` holds this machine")
        if len(holds) > 1:
            raise SchedulerError(f"there are {len(holds)} holds here; name one of them: {names}")
        return holds[0]
    found = [each for each in holds if app_id in (each.app_id, find_name(each.app_id))] or [
        each for each in holds if app_id and find_name(each.app_id).startswith(app_id)
    ]
    if len(found) != 1:
        what = "nothing is held here" if not holds else f"{name!r} is none of the holds here: {names}"
        raise SchedulerError(f"{name!r} may be any of {', '.join(each.handle for each in found)}" if found else what)
    return found[0]


def take_hold(hold: AnyHold, name: str, *, waits: bool = False, hint: str = "") -> int:
    """Lock a hold, and return the descriptor that keeps it.

    Args:
        hold: the hold.
        name: of the run, or of a program's job.
        waits: wait for the end of the run that has it.
        hint: follows what is said of a hold that has a run.

    Raises:
        EngineError: it has a run. It is one line.
    """
    reported = ""
    while True:
        fd = lock_hold(hold.lock_path, name)
        if fd is not None:
            return fd
        run = hold.find_run()
        if run and not waits:
            raise EngineError(f"{hold.handle} runs {run} now{hint}")
        if run and run != reported:
            print_line(f"held: waiting for {run} on {hold.handle}")
            reported = run
        time.sleep(_POLL_S)


@dataclass(frozen=True, kw_only=True)
class LentNode:
    """A node that a job has until its lock is released."""

    handle: str
    folder: str
    """The holder's."""
    lock_fd: int
    """A process that has this file description keeps the hold. The caller closes it."""


def lend_node(name: str | None, job: str, processes: int) -> LentNode:
    """Take a hold of this machine for a job.

    Args:
        name: a handle, an app's id or its beginning. None: the only hold.
        job: its name, for other programs that want the hold. It has a blank, which no app's name has.
        processes: how many workers it starts.

    Raises:
        SchedulerError: there is no such hold, or the job does not fit. It is one line.
        EngineError: the hold runs another job. It is one line.
    """
    hold = choose_hold(find_state_dir(os.environ), name)
    if not isinstance(hold, Hold):
        raise SchedulerError(f"{hold.handle} is not on this machine: functions run only on a hold of this machine")
    held = int(hold.read_states()[0].get("nproc", 0))
    if held and processes > held:
        raise SchedulerError(f"nproc={processes}: {hold.handle} holds at most {held}")
    return LentNode(handle=hold.handle, folder=hold.list_folders()[0], lock_fd=take_hold(hold, job))
