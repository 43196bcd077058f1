"""The holds of this machine: apps of `muster hold` whose replicas keep agents waiting for runs.

What a holder reports of itself is in its folder, see `_shared.contract.HoldKey`. A run's supervisor has the lock of its
hold as long as it lives.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from muster._shared.contract import HOLD_STATE_NAME, HoldKey, find_hold_dir
from muster._shared.foreign_files import parse_json, read_regular
from muster.schedulers.errors import EngineError
from muster.schedulers.local.hold_lock import find_owner
from muster.schedulers.supervision import client
from muster.schedulers.supervision.app_folder import AppFolder, AppSpec
from muster.schedulers.supervision.registry import AppRegistry
from muster.schedulers.wording.reasons import Code, Reason

_LOCK: Final = "hold.lock"
_STATE_LIMIT_BYTES: Final = 65536


@dataclass(frozen=True, kw_only=True)
class Hold:
    """A hold that has not ended."""

    scheduler: str
    app_id: str
    folder: AppFolder
    role: str
    nodes: int

    @property
    def handle(self) -> str:
        """The handle as people write it."""
        return f"{self.scheduler}://{self.app_id}"

    def list_folders(self) -> list[str]:
        """Return the folders of the holders, by node."""
        return [find_hold_dir(str(self.folder.role_dir(self.role)), index) for index in range(self.nodes)]

    def read_states(self) -> list[Mapping[str, Any]]:
        """Return what the holders report, by node. It is empty where one has reported nothing yet."""
        return [read_state(folder) for folder in self.list_folders()]

    @property
    def lock_path(self) -> Path:
        """The path of the file that the supervisor of a run has locked."""
        return self.folder.state_dir / _LOCK

    def find_run(self) -> str:
        """Return the name of the run that has the hold. "": none has."""
        return find_owner(self.lock_path)


def read_state(folder: str) -> Mapping[str, Any]:
    """Return what a holder reports. It is empty if that is nothing."""
    try:
        content = parse_json(read_regular(os.path.join(folder, HOLD_STATE_NAME), _STATE_LIMIT_BYTES))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def open_hold(state_dir: Path, scheduler: str, app_id: str) -> tuple[Hold | None, bool]:
    """Return the hold that an app is, and whether it has ended. None: it has, or `muster recover` must continue it."""
    folder = AppRegistry(state_dir, scheduler).open(app_id)
    try:
        spec, record = (None, None) if folder is None else client.read_app(folder)
    except (FileNotFoundError, EngineError):
        return None, False
    if folder is None or spec is None or client.has_ended(record):
        return None, True
    lives = record is None or client.is_supervised(folder, record) is not False
    return build_hold(folder, spec) if lives else None, False


def build_hold(folder: AppFolder, spec: AppSpec) -> Hold:
    """Return the hold that an app is."""
    role = spec.roles[0]
    return Hold(scheduler=spec.scheduler, app_id=spec.app_id, folder=folder, role=role.name, nodes=role.replicas)


def explain_hold(hold: Hold) -> Reason:
    """Return what a hold runs, or since when it is idle."""
    return explain_states(hold.find_run(), hold.read_states())


def explain_states(run: str, states: Sequence[Mapping[str, Any]]) -> Reason:
    """Return the same of any hold.

    Args:
        run: the name of the run that has the hold. "": none has.
        states: what its holders report, node 0 first.
    """
    if run:
        return Reason(code=Code.HOLD_RUNS, job=run)
    names = {str(state.get(HoldKey.STATE, "starting")) for state in states}
    since_s = states[0].get(HoldKey.IDLE_SINCE_S)
    limit_s = states[0].get(HoldKey.IDLE_LIMIT_S)
    if not isinstance(since_s, (int, float)) or not isinstance(limit_s, (int, float)):
        return Reason(code=Code.HOLD_STARTS)
    code = Code.HOLD_IMPORTS if "starting" in names else Code.HOLD_IDLE
    return Reason(code=code, age_s=time.time() - since_s, limit_s=limit_s)
