"""The supervisor's `ReplicaDriver` of local_cwd, under the name that apps of all versions have in their spec."""

from muster.schedulers.processes.driver import ProcessDriver
from muster.schedulers.supervision.app_folder import AppSpec
from muster.schedulers.supervision.driver import EventQueue


def create_driver(*, spec: AppSpec, event_queue: EventQueue) -> ProcessDriver:
    """Return the `driver.DriverFactory` of local_cwd."""
    return ProcessDriver(spec=spec, event_queue=event_queue)
