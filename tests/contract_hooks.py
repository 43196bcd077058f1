"""What adapters whose replicas are processes of this machine tell the contract's tests."""

import os
import signal
from pathlib import Path

from muster._shared import processes
from muster.schedulers.supervision.state import ReplicaId
from muster.testing import SchedulerContract


class OnThisMachine(SchedulerContract):
    """A subclass names the scheduler."""

    name = ""

    def lose_replica(self, scheduler, app_id, index):
        handle = scheduler.find_folder(app_id).read_record().handles[ReplicaId("w", index)]
        os.kill(handle["pid"], signal.SIGKILL)

    def list_left(self, app_id):
        state = self._folder / "state" / "muster"
        links = [path for path in (state / self.name).glob("*") if path.name.startswith(app_id)]
        folders = [path for path in (state / "logs" / "contract").glob("*") if path.name.startswith(app_id)]
        return [str(each) for each in (*links, *folders, *self._list_processes())]

    def _list_processes(self):
        """Whatever has this test's folder in its environment or command, and is not this process."""
        needle = f"{self._folder}/state".encode()
        found = []
        for pid in processes.list_parents():
            try:
                told = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if needle in told and pid != os.getpid():
                found.append(pid)
        return found
