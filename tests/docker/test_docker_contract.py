"""What every adapter must do, of a real engine: apps that outlive their command are those of `docker`."""

import os

import pytest

from muster.schedulers.docker.running_apps import orphaned_apps
from muster.schedulers.docker.sdk import pick_address
from muster.schedulers.supervision.registry import find_state_dir
from muster.testing import SchedulerContract

pytestmark = pytest.mark.docker


class TestDocker(SchedulerContract):
    """Replicas are containers."""

    factory = "muster.schedulers.docker:create_detached_scheduler"
    image = "muster-test:torch"
    steps = ("muster.schedulers.docker.running_apps.creation:_join_network", *SchedulerContract.steps)

    @pytest.mark.long
    def test_rules_say_what_follows_from_a_failure(self, scheduler):
        super().test_rules_say_what_follows_from_a_failure(scheduler)

    @pytest.mark.long
    def test_a_command_that_is_killed_leaves_nothing_that_cannot_be_removed(self, scheduler):
        super().test_a_command_that_is_killed_leaves_nothing_that_cannot_be_removed(scheduler)

    @pytest.fixture(autouse=True)
    def _engine(self, client, state_home):
        self.client = client

    def lose_replica(self, scheduler, app_id, index):
        labels = [f"io.muster.app={app_id}", f"io.muster.replica={index}"]
        (container,) = self.client.containers.list(filters={"label": labels}, ignore_removed=True)
        container.kill()  # removed, it would take its log with it

    def list_left(self, app_id):
        api, label = self.client.api, {"label": "io.muster.app"}
        volumes = api.volumes(filters=label)["Volumes"] or ()
        found = [*api.containers(all=True, filters=label), *api.networks(filters=label), *volumes]
        names = [(each["Labels"]["io.muster.app"], each.get("Id", "")) for each in found]
        marks = [path.name for path in (find_state_dir(os.environ) / "docker-submissions").glob(f"{app_id}*")]
        return [*(f"{name} {what}" for name, what in names if name.startswith(app_id)), *marks]

    def sweep(self, scheduler):
        state_dir = find_state_dir(os.environ)
        for mark in (state_dir / "docker-submissions").glob("*"):
            os.utime(mark, (0, 0))  # no supervisor of it is just starting any more
        orphaned_apps.sweep(state_dir, pick_address(os.environ))
