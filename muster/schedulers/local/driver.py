"""The supervisor's `ReplicaDriver` of local_cwd, under the name that apps of all versions have in their spec."""

from muster._shared.holds.default import read_idle_limit_s
from muster.schedulers.processes.driver import ProcessDriver
from muster.schedulers.processes.launch import Launch
from muster.schedulers.supervision.app_folder import AppSpec
from muster.schedulers.supervision.driver import EventQueue
from muster.schedulers.supervision.state import ReplicaId


class LocalDriver(ProcessDriver):
    """Starts agents on the user's default hold, where there is one."""

    def build_launch(self, replica: ReplicaId, start_number: int) -> Launch:
        """See `ProcessDriver`."""
        launch = super().build_launch(replica, start_number)
        caller_env = self.spec.details["base_env"]
        if not self.runs_agent(replica) or read_idle_limit_s(caller_env) is None:
            return launch
        from muster.schedulers.local.everyday import replace_launch

        return replace_launch(launch, caller_env, self.spec.app_id)


def create_driver(*, spec: AppSpec, event_queue: EventQueue) -> LocalDriver:
    """Return the `driver.DriverFactory` of local_cwd."""
    return LocalDriver(spec=spec, event_queue=event_queue)
