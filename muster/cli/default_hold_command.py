"""`muster hold --default`: whether everyday jobs of this machine start on agents that wait. Also its line of `list`."""

import argparse
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from muster._shared.contract import HOLD_STATE_NAME, HoldKey
from muster._shared.control import ControlError, ExitCode
from muster._shared.foreign_files import read_regular
from muster._shared.holds import default as default_hold
from muster._shared.holds.connection import SOCKET, connect
from muster.schedulers.adapter.job_line import format_duration
from muster.schedulers.errors import SchedulerError
from muster.schedulers.supervision.registry import find_state_dir

_STATE_LIMIT_BYTES: Final = 65536
_END_LIMIT_S: Final = 30.0
_OWN_FILES: Final = (SOCKET, HOLD_STATE_NAME, f"{HOLD_STATE_NAME}.new", "log")


def set_default(args: argparse.Namespace) -> int:
    """Switch the default hold on or off, print what there is of it, and return the exit code.

    Raises:
        ControlError: other options of `hold` were given, or a folder is unsafe.
    """
    if args.scheduler or args.scheduler_args or args.component:
        raise ControlError(
            "--default takes neither a scheduler nor a component: jobs say what they need", ExitCode.USAGE
        )
    if args.default == "off":
        switch_off()
    elif args.idle_minutes is not None or default_hold.read_idle_limit_s(os.environ) is None:
        _switch_on(60.0 * (args.idle_minutes or args.default_idle_minutes))
        print("muster: the default hold is on from now on; `muster hold --default off` ends it", file=sys.stderr)
    if args.json:
        print(json.dumps({**build_facts(), "exit_code": 0}))
    else:
        print("\n".join(describe()) or "the default hold is off")
    return 0


def build_facts() -> dict[str, Any]:
    """Build what `--json` has of it."""
    holds = [{"folder": folder, **state} for folder, state in _read_states().items()]
    limit_s = default_hold.read_idle_limit_s(os.environ)
    return {"is_on": limit_s is not None, HoldKey.IDLE_LIMIT_S: limit_s, "holds": holds}


def describe() -> list[str]:
    """Return a line for each default hold. If it is on and there is none, say so. If it is off, return no line."""
    limit_s = default_hold.read_idle_limit_s(os.environ)
    states = _read_states()
    lines = [f"default hold: {_describe_state(state)}" for state in states.values()]
    if lines or limit_s is None:
        return lines
    after = f"it ends after {format_duration(limit_s)} without one"
    return [f"default hold: on; the next job of local_cwd or muster-agent starts it, {after}"]


def _describe_state(state: Mapping[str, Any]) -> str:
    agents, jobs = int(state.get("agents", 0)), len(state.get("jobs", ()))
    since_s, limit_s = state.get(HoldKey.IDLE_SINCE_S), float(state.get(HoldKey.IDLE_LIMIT_S, 0.0))
    waits = "1 agent waits" if agents == 1 else f"{agents or 'no'} agents wait"
    runs = "1 agent of a job runs" if jobs == 1 else f"{jobs} agents of jobs run" if jobs else "a job runs"
    idle = runs if since_s is None else f"idle for {format_duration(max(0.0, time.time() - float(since_s)))}"
    return f"on; {waits}, {idle}; it ends after {format_duration(limit_s)} without a job ({state.get('python', '')})"


def _read_states() -> dict[str, dict[str, Any]]:
    """Return what the holds that listen report, by folder."""
    found = {}
    for folder in default_hold.list_folders(os.environ):
        with contextlib.suppress(OSError, ValueError):
            connect(folder).close()
            content = json.loads(read_regular(os.path.join(folder, HOLD_STATE_NAME), _STATE_LIMIT_BYTES))
            if isinstance(content, dict):
                found[folder] = content
    return found


def _switch_on(idle_limit_s: float) -> None:
    try:
        path = Path(find_state_dir(os.environ)) / default_hold.SETTINGS_NAME
        own = path.with_name(f"{path.name}.{os.getpid()}")
        own.write_text(json.dumps({default_hold.IDLE_LIMIT_KEY: idle_limit_s}))
        own.replace(path)
    except SchedulerError as error:
        raise ControlError(str(error), ExitCode.REFUSED) from error
    except OSError as error:
        raise ControlError(f"{error.filename}: {error.strerror}", ExitCode.REFUSED) from error
    if default_hold.read_idle_limit_s(os.environ) is None:
        raise ControlError(f"jobs do not find {path}: set HOME or XDG_STATE_HOME", ExitCode.REFUSED)
    for folder in default_hold.list_folders(os.environ):
        with contextlib.suppress(OSError), connect(folder) as connection:
            connection.send(json.dumps({default_hold.IDLE_LIMIT_KEY: idle_limit_s}).encode())


def switch_off() -> None:
    """End all default holds of this user. Jobs that run on them go on.

    Raises:
        ControlError: one does not end.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(default_hold.find_settings_path(os.environ))
    for folder in default_hold.list_folders(os.environ):
        try:
            connection = connect(folder)
        except PermissionError as error:
            raise ControlError(f"{folder}: {error.strerror}", ExitCode.REFUSED) from error
        except OSError:
            _remove(folder)  # it was killed
            continue
        with connection:
            _end(connection, folder)


def _end(connection: socket.socket, folder: str) -> None:
    connection.settimeout(_END_LIMIT_S)
    try:
        connection.send(b'{"end": true}')
        connection.recv(1)  # closed when all of it is gone
    except TimeoutError as error:
        raise ControlError(f"the hold of {folder} has not ended in {_END_LIMIT_S:g} s", ExitCode.LATE) from error
    except OSError:
        return  # it has ended


def _remove(folder: str) -> None:
    for name in _OWN_FILES:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, name))
    for path in (folder, os.path.dirname(folder)):
        with contextlib.suppress(OSError):  # the outer one may have others
            os.rmdir(path)
