"""What every adapter must do, of a real Slurm."""

import os
import signal

import pytest

from muster._shared import processes
from muster._shared.control import ControlError
from muster.schedulers.slurm import running_apps
from muster.schedulers.supervision.state import ReplicaId
from muster.testing import SchedulerContract
from muster.testing.contract_apps import COUNTS, build_agents

pytestmark = pytest.mark.slurm


class TestSlurm(SchedulerContract):
    """Replicas are tasks of one job."""

    factory = "muster.schedulers.slurm:create_scheduler"
    steps = (SchedulerContract.steps[0], "muster.schedulers.slurm.client:submit_script")

    @pytest.fixture(autouse=True)
    def _cluster(self, slurm):
        self.cluster = slurm

    @pytest.mark.long
    def test_rules_say_what_follows_from_a_failure(self, scheduler):
        super().test_rules_say_what_follows_from_a_failure(scheduler)

    @pytest.mark.long
    def test_a_command_that_is_killed_leaves_nothing_that_cannot_be_removed(self, scheduler):
        super().test_a_command_that_is_killed_leaves_nothing_that_cannot_be_removed(scheduler)

    def lose_replica(self, scheduler, app_id, index):
        """Its node's task goes on, as where the replica was killed for its memory: another node has no place for it.

        The loss of the node itself is in `test_slurm_faults`.
        """
        app = running_apps.read_app(scheduler._find_registry().open(app_id))
        supervisor = app.nodes[ReplicaId("w", index)].record.supervisor.pid
        for pid, parent in processes.list_parents().items():
            if parent == supervisor:
                os.kill(pid, signal.SIGKILL)

    def list_left(self, app_id):
        state = self._folder / "state" / "muster"
        links = [path for path in (state / "slurm").glob("*") if path.name.startswith(app_id)]
        folders = [path for path in (state / "logs" / "contract").glob("*") if path.name.startswith(app_id)]
        jobs = self.cluster.run("squeue", "-h", "-o", "%j").splitlines()
        return [str(each) for each in (*links, *folders, *(name for name in jobs if name == app_id))]

    def test_an_elastic_job_gets_another_size(self, scheduler):
        """A job of Slurm's can only shrink."""
        app_id = self.submit(scheduler, build_agents(COUNTS, nodes=2, least=1, image=self.image))
        for index in range(2):
            self.wait_line(scheduler, app_id, "of 2 counts", index)
        scheduler.resize_app(app_id, 1, None)
        self.wait_line(scheduler, app_id, "0 of 1 counts", 0)
        with pytest.raises(ControlError, match="can only shrink"):
            scheduler.resize_app(app_id, 2, None)
        job_nodes = self.cluster.run("squeue", "-h", "--name", app_id, "-o", "%D")
        assert job_nodes == "1", "the other node is given back"
        described = scheduler.describe(app_id)
        assert described.state.name == "RUNNING"
        assert "lost node" not in described.msg
        assert [each.state.name for each in described.roles_statuses[0].replicas] == ["RUNNING", "CANCELLED"]
