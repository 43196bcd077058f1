"""Docker: replicas are containers of one engine.

    request.py    AppDef -> request: pure, the dry run        options.py   -cfg
    plan.py       the request as records                      devices.py   which GPUs
    container.py  request -> the engine's words: pure         preflight.py can the image run it?
    engine.py     the SDK, the one boundary for its errors    creation.py  make all, undo all
    driver.py     replicas for the supervisor                 endings.py   why a container ended
    scheduler.py  what TorchX calls                           logs.py      output across containers

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
