"""What every adapter must do, of ssh with real servers."""

import contextlib
import os
import signal
import sys

import pytest
from harness import find_processes

from muster.schedulers.adapter import ReplicaId
from muster.testing import SchedulerContract


class TestSsh(SchedulerContract):
    """Replicas are processes behind sshd."""

    factory = "muster.schedulers.ssh:create_scheduler"

    @pytest.fixture(autouse=True)
    def _on_hosts(self, world, runs, monkeypatch):
        self._runs = runs
        cfg = {"hosts": world.names, "ssh": world.ssh, "python": sys.executable, "folder": str(runs)}
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

    @pytest.mark.long
    def test_rules_say_what_follows_from_a_failure(self, scheduler):
        super().test_rules_say_what_follows_from_a_failure(scheduler)

    def lose_replica(self, scheduler, app_id, index):
        """The keeper and all below it: as when the host is switched off."""
        handle = scheduler.find_folder(app_id).read_record().handles[ReplicaId("w", index)]
        for pid in find_processes(f"{self._runs}/muster-{app_id}/w-{index}-{handle['start']}/"):
            with contextlib.suppress(ProcessLookupError):  # the end of one before ends others
                os.kill(pid, signal.SIGKILL)

    def list_left(self, app_id):
        folders = [path for path in self._runs.glob("*") if path.name.startswith(f"muster-{app_id}")]
        return [str(each) for each in (*folders, *find_processes(str(self._runs)))]
