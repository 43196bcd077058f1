"""What every adapter must do, of ssh with real servers."""

import os
import signal
import sys
from pathlib import Path

import pytest

from muster._shared import processes
from muster.schedulers.adapter import ReplicaId
from muster.testing import SchedulerContract


class TestSsh(SchedulerContract):
    """Replicas are processes behind sshd."""

    factory = "muster.schedulers.ssh:create_scheduler"

    @pytest.fixture(autouse=True)
    def _on_hosts(self, world, runs, monkeypatch):
        self._runs = runs
        cfg = {"hosts": world.names, "ssh": world.ssh, "python": sys.executable, "folder": str(runs), "lost_s": 5.0}
        monkeypatch.setattr(type(self), "cfg", cfg)

    @pytest.mark.long
    def test_a_command_that_is_killed_leaves_nothing_that_cannot_be_removed(self, scheduler):
        super().test_a_command_that_is_killed_leaves_nothing_that_cannot_be_removed(scheduler)

    @pytest.mark.long
    def test_an_elastic_job_gets_another_size(self, scheduler):
        super().test_an_elastic_job_gets_another_size(scheduler)

    @pytest.mark.long
    def test_a_cancel_during_the_start_ends_it(self, scheduler):
        super().test_a_cancel_during_the_start_ends_it(scheduler)

    def lose_replica(self, scheduler, app_id, index):
        """The keeper and all below it: as when the host is switched off."""
        handle = scheduler.find_folder(app_id).read_record().handles[ReplicaId("w", index)]
        needle = f"{self._runs}/muster-{app_id}/w-{index}-{handle['start']}/".encode()
        for pid in processes.list_parents():
            try:
                told = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if needle in told:
                os.kill(pid, signal.SIGKILL)

    def list_left(self, app_id):
        folders = [path for path in self._runs.glob("*") if path.name.startswith(f"muster-{app_id}")]
        needle = str(self._runs).encode()
        found = []
        for pid in processes.list_parents():
            try:
                told = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if needle in told and pid != os.getpid():
                found.append(pid)
        return [str(each) for each in (*folders, *found)]
