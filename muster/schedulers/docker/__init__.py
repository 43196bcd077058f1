"""Docker: replicas are containers of one engine.

`scheduler` is what TorchX calls. `request` turns an AppDef into what is asked of the engine (pure, the dry run),
`options` reads `-cfg`, `spec` is the request as records, `devices` assigns GPUs, `container_body` writes a container as
the engine's API wants it. `driver` runs the replicas for the supervisor; state files name this module, so it stays
here. The package `engine` is the Docker engine as we see it, `live` an app on it.

Imports nothing: a supervisor loads single modules of this package and needs no TorchX.
"""

from typing import Any


def create_scheduler(session_name: str, **kwargs: object) -> Any:  # noqa: ARG001  # TorchX hands every scheduler its own
    """`local_docker`: the app ends with the command that submitted it."""
    from muster.schedulers.docker.scheduler import DockerScheduler

    return DockerScheduler("local_docker", session_name, detached=False)


def create_detached_scheduler(session_name: str, **kwargs: object) -> Any:  # noqa: ARG001
    """`docker`: the same, and the app stays when the command has gone."""
    from muster.schedulers.docker.scheduler import DockerScheduler

    return DockerScheduler("docker", session_name, detached=True)
