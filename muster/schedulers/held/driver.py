"""The supervisor's `ReplicaDriver` of runs on a hold: for each node a client of the node's holder.

On this machine it is `muster/agent/hold/client.py`. Elsewhere it is a `link`, which reaches the node through its
adapter.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import muster
from muster._shared.foreign_files import read_whole
from muster.schedulers.agent_command import build_ask_command
from muster.schedulers.held.link_names import GATE_NAME, LOCK, LOST, STATE_NAME, WORKSPACE_NAME
from muster.schedulers.local.hold_lock import lock_hold
from muster.schedulers.processes.driver import ProcessDriver
from muster.schedulers.processes.launch import Launch
from muster.schedulers.supervision.driver import Handle, StartError, take_lent_fds
from muster.schedulers.supervision.state import ReplicaId

_CLIENT: Final = str(Path(muster.__file__).parent / "agent/hold/client.py")
_KILL_LIMIT_S: Final = 10.0
_PROGRAM: Final = (
    "import sys; sys.path[:] = [*(path for path in sys.path if path), sys.argv[1]]\n"
    "from muster.schedulers.held.link import main\n"
    "sys.exit(main(int(sys.argv[2])))"
)


class HeldDriver(ProcessDriver):
    """Starts clients. Node i of the run is node i of the hold, which is this app's while the supervisor lives."""

    def __init__(self, **kwargs: Any) -> None:
        hold = kwargs["spec"].details["hold"]
        self._remote: Mapping[str, Any] | None = hold.get("remote")
        self.LISTENS = self._remote is None
        super().__init__(**kwargs)
        lent = take_lent_fds().get(LOCK)
        # A restarted supervisor has nothing lent.
        self._lock_fd = lent[0] if lent else lock_hold(hold["lock"], self.spec.app_id)
        self._orders: dict[ReplicaId, int] = {}
        if self._remote is not None:
            (self.folder.state_dir / GATE_NAME).unlink(missing_ok=True)

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
        """Build a link's command. Its order is in a file without a name, because it holds secrets."""
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
            "gate": str(self.folder.state_dir / GATE_NAME),
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
        fd = os.memfd_create("order")
        os.write(fd, json.dumps(order).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        self._close_order(replica)
        self._orders[replica] = fd
        with contextlib.suppress(FileNotFoundError):  # of an earlier start
            (self.folder.replica_dir(replica) / STATE_NAME).unlink()
        return Launch(
            command=[sys.executable, "-c", _PROGRAM, self.spec.import_root, str(fd)],
            env=self.spec.details["environment"],
            cwd=self.spec.folder,
            keep_fds=[fd],
        )

    def start(self, replica: ReplicaId, start_number: int) -> Handle:
        """See `ReplicaDriver`."""
        try:
            return super().start(replica, start_number)
        finally:
            self._close_order(replica)

    def _close_order(self, replica: ReplicaId) -> None:
        fd = self._orders.pop(replica, None)
        if fd is not None:
            os.close(fd)

    def find_log_dir(self, replica: ReplicaId) -> Path | None:
        """See `ProcessDriver`: where a link puts it."""
        return super().find_log_dir(replica) if self._remote is None else self.folder.role_dir(replica.role)

    def kill(self, replica: ReplicaId) -> None:
        """See `ReplicaDriver`. A link tells the node, and does not wait for it for long."""
        if self._remote is None:
            super().kill(replica)
            return
        self.send_signal(replica, signal.SIGQUIT)
        self._event_queue.set_timer(f"kill {replica}", _KILL_LIMIT_S, lambda: self.send_signal(replica, signal.SIGKILL))

    def explain_end(self, replica: ReplicaId, code: int) -> tuple[int | None, str]:
        """See `ProcessDriver`. A link says why its node is lost."""
        if self._remote is None:
            return super().explain_end(replica, code)
        self._event_queue.clear_timer(f"kill {replica}")
        reason = ""
        if code == LOST:
            with contextlib.suppress(OSError, ValueError):
                reason = json.loads(read_whole(self.folder.replica_dir(replica) / STATE_NAME))["reason"]
        return (None, reason) if reason else super().explain_end(replica, code)

    def close(self, *, succeeded: bool) -> None:
        """See `ReplicaDriver`. The hold is free."""
        super().close(succeeded=succeeded)
        if self._lock_fd is not None:
            os.close(self._lock_fd)


def create_driver(**kwargs: Any) -> HeldDriver:
    """Return the `driver.DriverFactory` of held."""
    return HeldDriver(**kwargs)
