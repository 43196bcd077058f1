"""Runs a command in a temporary container with a role's own image, environment and mounts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from muster.schedulers.docker.container_body import ImageFacts, build_body
from muster.schedulers.docker.engine.client import Engine
from muster.schedulers.docker.engine.errors import CannotStart, DockerError, EngineUnavailable
from muster.schedulers.docker.spec import AppRequest, ContainerRequest

_LIMIT_S: Final = 60.0
_NOT_PROBED: Final = frozenset({"Memory", "MemorySwap", "ShmSize", "LogConfig", "PortBindings"})
"""A probe needs no memory, its output must be readable, and its ports free."""

MARK: Final = "muster-probe:"
"""Begins what a probe's own program prints: the image's entrypoint, which runs it, may print a banner before."""


def find_words(output: str) -> list[str] | None:
    """Return the words after the last mark, of that line. None: the program has not run."""
    _, mark, rest = output.rpartition(MARK)
    return rest.partition("\n")[0].split() if mark else None


def build_probe_body(
    app: AppRequest,
    container: ContainerRequest,
    command: Sequence[str],
    *,
    image: ImageFacts,
    cpus: int,
    network: str = "none",
) -> dict[str, Any]:
    """Return the body of `POST /containers/create` for a container like a replica's, which runs once and is removed."""
    config = {**select_probed(container), "LogConfig": {"Type": "json-file"}}
    # Its volume is empty, and devices take time.
    like = replace(container, command=tuple(command), read_only=False, gpu_ids=(), host_config=config)
    body = build_body(replace(app, network=network), like, incarnation=0, image=image, cpus=cpus)
    body.pop("NetworkingConfig", None)
    body["Labels"] = dict(app.labels)  # without a replica's
    return body


def select_probed(container: ContainerRequest) -> dict[str, Any]:
    """Return what a probe shares of the `HostConfig` of a replica."""
    return {name: value for name, value in container.host_config.items() if name not in _NOT_PROBED}


def run_probe(engine: Engine, name: str, body: Mapping[str, Any]) -> tuple[int, str]:
    """Run a container to its end, for at most a minute, and remove it.

    Returns:
        Its exit code and its output.

    Raises:
        CannotStart: the engine could not run the command.
        DockerError: another error of the engine.
    """
    created = engine.create_container(name, body)
    try:
        try:
            engine.start_container(created)
        except EngineUnavailable:
            raise
        except DockerError as error:
            raise CannotStart(str(error)) from error
        exit_code = engine.wait_container(created, _LIMIT_S)
        output = b"".join(record for _, record in engine.logs(created))
        return exit_code, output.decode(errors="replace")
    finally:
        engine.remove_container(created)
