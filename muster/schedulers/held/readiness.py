"""Waits until a hold that was just submitted is ready."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from torchx.specs import AppState, is_terminal

from muster._shared.contract import HoldKey
from muster._shared.control import CommandExit, ControlError
from muster.schedulers.adapter.scheduler import PluginScheduler
from muster.schedulers.adapter.status import build_status
from muster.schedulers.adapter.waiting_line import WaitingLine
from muster.schedulers.held.holds import build_remote, forget_hold, read_states
from muster.schedulers.local.holds import open_hold
from muster.schedulers.supervision.registry import find_state_dir
from muster.schedulers.wording.words import word_all

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
