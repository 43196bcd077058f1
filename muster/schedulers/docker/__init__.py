"""Docker: replicas are containers of one engine.

TorchX calls `scheduler`. `request` turns an AppDef into the request to the engine (pure, the dry run). `options`
declares its `-cfg` options and parses their values. `spec` holds the request as records and prints it for the dry run.
`container_body` builds the body of the engine's API call for a container. `driver` runs the replicas for the
supervisor. It stays here because state files name this module. `engine` has one method per request to the Docker
engine, and `sdk` is the only module that imports Docker's SDK. The package `running_apps` handles an app on the engine.

This module imports next to nothing: a supervisor loads single modules of this package and needs no TorchX.
"""

from dataclasses import replace
from typing import Final

from muster.schedulers.adapter.properties import Factory, Properties

create_detached_scheduler: Final = Factory(
    name="docker",
    creates="muster.schedulers.docker.scheduler:DockerScheduler",
    properties=Properties(node_word="container", loses_files=True),
    needs_linux=True,
)
"""Its apps outlive the command."""
create_scheduler: Final = replace(
    create_detached_scheduler,
    name="local_docker",
    properties=replace(create_detached_scheduler.properties, waits=True, same_apps_as="docker"),
)
"""Its apps end with the command that submitted them."""
