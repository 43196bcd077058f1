"""Waits until a hold that was just submitted is ready."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from torchx.specs import AppState, is_terminal

from muster._shared.contract import HoldKey
from muster._shared.control import ControlError, ExitCode
from muster.schedulers.adapter.scheduler import PluginScheduler
from muster.schedulers.adapter.waiting_line import WaitingLine
from muster.schedulers.held.holds import build_remote, forget_hold, read_states
from muster.schedulers.local.holds import build_hold
from muster.schedulers.supervision import client
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir
from muster.schedulers.wording.words import word_all

_POLL_S: Final = 0.05
_ELSEWHERE_POLL_S: Final = 0.3

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
        if scheduler.properties.has_holders_here:
            return _wait_here(AppRegistry(state_dir, scheduler.backend), app_id)
        return _wait_elsewhere(scheduler, state_dir, app_id, tell)
    except BaseException:
        scheduler.cancel(app_id)
        forget_hold(state_dir, app_id)
        raise


def _wait_here(registry: AppRegistry, app_id: str) -> _States:
    while True:
        folder = registry.open(app_id)
        spec, record = (None, None) if folder is None else client.read_app(folder)
        if folder is None or spec is None or client.has_ended(record):
            told = "" if record is None else word_all(record.app.reasons)
            reason = told or ("it was deleted" if record is None else "before all nodes were ready")
            raise ControlError(f"{app_id} has ended: {reason}; `muster log {app_id}` prints why", ExitCode.REFUSED)
        states = build_hold(folder, spec).read_states()
        if _are_ready(app_id, states):
            return states
        time.sleep(_POLL_S)


def _wait_elsewhere(scheduler: PluginScheduler, state_dir: Path, app_id: str, tell: Callable[[str], None]) -> _States:
    waiting_line = WaitingLine(lambda _app_id, line: tell(line))
    while True:
        response = scheduler.describe_app(app_id)
        if response is None or is_terminal(response.state):
            state = "it was deleted" if response is None else response.state.name
            raise ControlError(f"{app_id} has ended: {state}; `muster log {app_id}` prints why", ExitCode.REFUSED)
        waiting_line.update(response)
        made = build_remote(state_dir, scheduler.backend, app_id, list(response.roles))
        if response.state is AppState.RUNNING and made is not None:
            states = read_states(scheduler, made, waits=True)
            if _are_ready(app_id, states):
                return states
        time.sleep(_ELSEWHERE_POLL_S)


def _are_ready(app_id: str, states: _States) -> bool:
    names = {str(state.get(HoldKey.STATE, "")) for state in states}
    if "cold" in names:
        raise ControlError(f"no agent can wait; `muster log {app_id}` prints why", ExitCode.REFUSED)
    return names <= {"ready", "busy"}
