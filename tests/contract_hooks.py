"""What adapters whose replicas are processes of this machine tell the contract's tests."""

import os
import signal

from harness import find_processes

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
        return [str(each) for each in (*links, *folders, *find_processes(f"{self._folder}/state"))]
