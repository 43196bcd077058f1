"""Docker: replicas are containers of one engine.

TorchX calls `scheduler`. `request` turns an AppDef into the request to the engine (pure, the dry run). `options`
declares its `-cfg` options, and `option_values` checks those that go to the engine as they are. `spec` holds the
request as records and prints it for the dry run. `shared_network` puts an app on a network of several apps, `devices`
assigns GPUs, and `users` names the submitting user. `container_body` builds the body of the engine's API call for a
container. `driver` runs the replicas for the supervisor. It stays here because state files name this module. The
package `engine` is our interface to the Docker engine, and `live` handles an app on it.

This module imports nothing: a supervisor loads single modules of this package and needs no TorchX.
"""

from typing import Any


def create_scheduler(session_name: str, **kwargs: object) -> Any:  # noqa: ARG001  # TorchX passes its own to all
    """Create `local_docker`, whose apps end with the command that submitted them.

    Raises:
        PlatformError: this system is not Linux.
    """
    from muster.schedulers.runner.platforms import require_linux

    require_linux("local_docker")
    from muster.schedulers.docker.scheduler import DockerScheduler

    return DockerScheduler("local_docker", session_name, detached=False)


def create_detached_scheduler(session_name: str, **kwargs: object) -> Any:  # noqa: ARG001
    """Create `docker`, whose apps outlive the command. Raises as `create_scheduler`."""
    from muster.schedulers.runner.platforms import require_linux

    require_linux("docker")
    from muster.schedulers.docker.scheduler import DockerScheduler

    return DockerScheduler("docker", session_name, detached=True)
