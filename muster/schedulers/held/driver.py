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
from muster.schedulers.processes.driver import Launch, ProcessDriver
from muster.schedulers.processes.link_driver import LinkDriver
from muster.schedulers.supervision.app_folder import AppSpec
from muster.schedulers.supervision.driver import EventQueue, StartError, take_lent_fds
from muster.schedulers.supervision.state import ReplicaId

LOCK: Final = "hold"
"""Name of the lent descriptor that keeps the hold."""
WORKSPACE_NAME: Final = "workspace.json"
"""In the app's state folder: the entries of the workspace, see `packing.list_workspace`."""
_GATE_NAME: Final = "claimed"
"""In the app's state folder: the run has node 0 of the hold."""
_CLIENT: Final = str(Path(muster.__file__).parent / "agent/hold/client.py")


class HeldDriver(ProcessDriver):
    """Starts clients. Node i of the run is node i of the hold, which is this app's while the supervisor lives."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hold: Mapping[str, Any] = self.spec.details["hold"]
        lent = take_lent_fds().get(LOCK)
        # A restarted supervisor has nothing lent.
        self._lock_fd = lent[0] if lent else lock_hold(self.hold["lock"], self.spec.app_id)

    def build_launch(self, replica: ReplicaId, start_number: int) -> Launch:
        """See `ProcessDriver`."""
        if self._lock_fd is None:
            raise StartError(f"{self.hold['handle']} runs another app now")
        launch = super().build_launch(replica, start_number)
        return self.build_client(replica, launch, len(build_ask_command(launch.command, ())))

    def build_client(self, replica: ReplicaId, launch: Launch, words: int) -> Launch:
        """Build what stands for a node of the run.

        Args:
            replica: the node.
            launch: what the node would be without a hold.
            words: so many words of its command are not the agent's flags.
        """
        places = [ReplicaId(role.name, index) for role in self.spec.roles for index in range(role.replicas)]
        folder = self.hold["folders"][places.index(replica)]
        # -I -S: no variable of the run leads to other modules.
        command = [sys.executable, "-I", "-S", _CLIENT, folder, self.spec.app_id, str(words), *launch.command]
        return replace(launch, command=command)

    def close(self, *, succeeded: bool) -> None:
        """See `ReplicaDriver`. The hold is free."""
        super().close(succeeded=succeeded)
        if self._lock_fd is not None:
            os.close(self._lock_fd)


class RemoteHeldDriver(HeldDriver, LinkDriver):
    """Starts links: the hold is another adapter's."""

    LISTENS = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        (self.folder.state_dir / _GATE_NAME).unlink(missing_ok=True)

    def build_client(self, replica: ReplicaId, launch: Launch, words: int) -> Launch:
        """See `HeldDriver`."""
        hold, remote = self.hold, self.hold["remote"]
        listed = self.folder.state_dir / WORKSPACE_NAME
        entries = json.loads(read_whole(listed, 256 << 20)) if listed.exists() else None
        nodes = self.spec.roles[0].replicas
        order = {
            "run": self.spec.app_id,
            "index": replica.index,
            "others": list(range(nodes, remote["nodes"])) if replica.index == 0 else [],
            "hold": {**remote, "handle": hold["handle"]},
            "gate": str(self.folder.state_dir / _GATE_NAME),
            "root": hold["root"],
            "node": {
                "run": self.spec.app_id,
                "args": launch.command[words:],
                "env": launch.env,
                "cwd": hold["cwd"],
                "waits": hold["waits"],
                "workspace": entries,
            },
        }
        (self.folder.replica_dir(replica) / STATE_NAME).unlink(missing_ok=True)  # of an earlier start
        return self.build_link(replica, "muster.schedulers.held.link", order)


def create_driver(*, spec: AppSpec, event_queue: EventQueue) -> HeldDriver:
    """Return the `driver.DriverFactory` of held."""
    made = RemoteHeldDriver if "remote" in spec.details["hold"] else HeldDriver
    return made(spec=spec, event_queue=event_queue)
