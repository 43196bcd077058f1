"""The supervisor's `ReplicaDriver` of runs on a hold: for each node a client of the node's holder."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import muster
from muster.schedulers.agent_command import build_ask_command
from muster.schedulers.local.hold_lock import lock_hold
from muster.schedulers.processes.driver import ProcessDriver
from muster.schedulers.processes.launch import Launch
from muster.schedulers.supervision.driver import StartError, take_lent_fds
from muster.schedulers.supervision.state import ReplicaId

LOCK: Final = "hold"
"""Name of the lent descriptor that keeps the hold."""
_CLIENT: Final = str(Path(muster.__file__).parent / "agent/hold/client.py")


class HeldDriver(ProcessDriver):
    """Starts clients. Node i of the run is node i of the hold, which is this app's while the supervisor lives."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        hold = self.spec.details["hold"]
        lent = take_lent_fds().get(LOCK)
        # A supervisor that was started again has nothing lent.
        self._lock_fd = lent[0] if lent else lock_hold(hold["lock"], self.spec.app_id)

    def build_launch(self, replica: ReplicaId, start_number: int) -> Launch:
        """See `ProcessDriver`."""
        hold = self.spec.details["hold"]
        if self._lock_fd is None:
            raise StartError(f"{hold['handle']} runs another app now")
        launch = super().build_launch(replica, start_number)
        places = [ReplicaId(role.name, index) for role in self.spec.roles for index in range(role.replicas)]
        words = len(build_ask_command(launch.command, ()))
        folder = hold["folders"][places.index(replica)]
        # -I -S: it needs no installed package, and no variable of the run's own may lead it to other modules.
        command = [sys.executable, "-I", "-S", _CLIENT, folder, self.spec.app_id, str(words), *launch.command]
        return replace(launch, command=command)

    def close(self, *, succeeded: bool) -> None:
        """See `ReplicaDriver`. The hold is free."""
        super().close(succeeded=succeeded)
        if self._lock_fd is not None:
            os.close(self._lock_fd)


def create_driver(**kwargs: Any) -> HeldDriver:
    """Return the `driver.DriverFactory` of held."""
    return HeldDriver(**kwargs)
