"""The supervisor's `ReplicaDriver` of runs on a hold: for each node a client of the node's holder.

On this machine it is `muster/agent/hold/client.py`. Elsewhere it is a `link`, which reaches the node through its
adapter.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import muster
from muster._shared.foreign_files import read_whole
from muster.schedulers.agent_command import build_ask_command
from muster.schedulers.local.hold_lock import lock_hold
from muster.schedulers.node_program.frames import STATE_NAME
from muster.schedulers.processes.launch import Launch
from muster.schedulers.processes.link_driver import LinkDriver
from muster.schedulers.supervision.driver import StartError, take_lent_fds
from muster.schedulers.supervision.state import ReplicaId
from muster.schedulers.wording.reasons import Code, Reason, Reasons

LOCK: Final = "hold"
"""Name of the lent descriptor that keeps the hold."""
WORKSPACE_NAME: Final = "workspace.json"
"""In the app's state folder: the entries of the workspace, see `packing.list_workspace`."""
_GATE_NAME: Final = "claimed"
"""In the app's state folder: the run has node 0 of the hold."""
_CLIENT: Final = str(Path(muster.__file__).parent / "agent/hold/client.py")
_KILL_LIMIT_S: Final = 10.0


class HeldDriver(LinkDriver):
    """Starts clients. Node i of the run is node i of the hold, which is this app's while the supervisor lives."""

    def __init__(self, **kwargs: Any) -> None:
        hold = kwargs["spec"].details["hold"]
        self._remote: Mapping[str, Any] | None = hold.get("remote")
        self.LISTENS = self._remote is None
        super().__init__(**kwargs)
        lent = take_lent_fds().get(LOCK)
        # A restarted supervisor has nothing lent.
        self._lock_fd = lent[0] if lent else lock_hold(hold["lock"], self.spec.app_id)
        if self._remote is not None:
            (self.folder.state_dir / _GATE_NAME).unlink(missing_ok=True)

    def build_launch(self, replica: ReplicaId, start_number: int) -> Launch:
        """See `ProcessDriver`."""
        hold = self.spec.details["hold"]
        if self._lock_fd is None:
            raise StartError(f"{hold['handle']} runs another app now")
        if self._remote is not None:
            return self._build_link(replica, start_number, self._remote)
        launch = super().build_launch(replica, start_number)
        places = [ReplicaId(role.name, index) for role in self.spec.roles for index in range(role.replicas)]
        words = len(build_ask_command(launch.command, ()))
        folder = hold["folders"][places.index(replica)]
        # -I -S: no variable of the run leads to other modules.
        command = [sys.executable, "-I", "-S", _CLIENT, folder, self.spec.app_id, str(words), *launch.command]
        return replace(launch, command=command)

    def _build_link(self, replica: ReplicaId, start_number: int, remote: Mapping[str, Any]) -> Launch:
        hold = self.spec.details["hold"]
        plan = self.spec.details["replicas"][replica.role][replica.index]
        entries = None
        if hold["has_workspace"]:
            entries = json.loads(read_whole(self.folder.state_dir / WORKSPACE_NAME, 256 << 20))
        nodes = self.spec.roles[0].replicas
        order = {
            "run": self.spec.app_id,
            "index": replica.index,
            "others": list(range(nodes, remote["nodes"])) if replica.index == 0 else [],
            "hold": {**remote, "handle": hold["handle"]},
            "gate": str(self.folder.state_dir / _GATE_NAME),
            "root": hold["root"],
            "replica_dir": str(self.folder.replica_dir(replica)),
            "role_dir": str(self.folder.role_dir(replica.role)),
            "node": {
                "run": self.spec.app_id,
                "args": plan["command"][len(build_ask_command(plan["command"], ())) :],
                "env": self.build_env(plan, replica, start_number),
                "cwd": hold["cwd"],
                "waits": hold["waits"],
                "workspace": entries,
            },
        }
        (self.folder.replica_dir(replica) / STATE_NAME).unlink(missing_ok=True)  # of an earlier start
        return self.build_link(replica, "muster.schedulers.held.link", order)

    def find_log_dir(self, replica: ReplicaId) -> Path | None:
        """See `ProcessDriver`: where a link puts it."""
        return super().find_log_dir(replica) if self._remote is None else self.folder.role_dir(replica.role)

    def kill(self, replica: ReplicaId) -> None:
        """See `ReplicaDriver`."""
        if self._remote is None:
            super().kill(replica)
        else:
            self.end_link(replica, _KILL_LIMIT_S)

    def explain_end(self, replica: ReplicaId, code: int) -> tuple[int | None, Reasons]:
        """See `ProcessDriver`. A link says why its node is lost."""
        text = "" if self._remote is None else self.read_loss(replica, code)
        return (None, (Reason(code=Code.LINK_LOST, text=text),)) if text else super().explain_end(replica, code)

    def close(self, *, succeeded: bool) -> None:
        """See `ReplicaDriver`. The hold is free."""
        super().close(succeeded=succeeded)
        if self._lock_fd is not None:
            os.close(self._lock_fd)


def create_driver(**kwargs: Any) -> HeldDriver:
    """Return the `driver.DriverFactory` of held."""
    return HeldDriver(**kwargs)
