"""Reserves GPUs and ports of the host's network: the engine would let apps share them, but they must not.

A reservation is an empty volume that no container mounts. Its name is that of the object, and its labels name the app.
The engine creates one volume per name, and returns the first caller's labels to every later one. So of two apps that
reserve an object at the same time one gets it. A reservation outlives a restart of the supervisor and of the engine,
and the time between the loss of a container and its replacement. It is released when the app has ended. To list, create
and list again was rejected: two apps then see each other, or neither does.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from muster.schedulers.docker import devices
from muster.schedulers.docker.engine.client import Engine
from muster.schedulers.docker.engine.errors import Conflict, DockerError
from muster.schedulers.docker.engine.probe import build_probe_body, find_words, run_probe
from muster.schedulers.docker.spec import HOST_NETWORK, HOST_PORTS, AppRequest, ContainerRequest, Label, set_host_port

_GPU: Final = "gpu"
_PORT: Final = "port"
_PORTS_TRIED: Final = 64
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_.-]")

# As the leader: IPv6 and IPv4 at once.
_FREE_PORTS: Final = r"""
import socket, sys
both, free = socket.has_dualstack_ipv6(), []
for port in sys.argv[1:]:
    try:
        family = socket.AF_INET6 if both else socket.AF_INET
        socket.create_server(("", int(port)), family=family, dualstack_ipv6=both).close()
    except OSError:
        continue
    free.append(port)
print('\nmuster-probe:', *free)
"""


def check_gpus(engine: Engine, app: AppRequest, visible: Sequence[str]) -> list[str]:
    """Check that there are enough GPUs, before anything is created.

    Args:
        engine: the one that will run the app.
        app: what will run.
        visible: ids of the devices that the app may use.

    Returns:
        Those of them that are not in use.

    Raises:
        DockerError: there are too few.
    """
    running = engine.list_containers({}, running_only=True)
    reserved = _reserved_gpus(engine)
    in_use = {gpu for facts in running for gpu in facts.gpu_ids} | reserved.keys()
    try:
        devices.assign_gpus([container.gpus for container in app.containers], visible, in_use)
    except DockerError as error:
        # A dead supervisor's app may hold them; any command restarts it.
        holders = ", ".join(sorted({reserved[gpu] for gpu in visible if gpu in reserved}))
        raise DockerError(f"{error}; apps that have reserved some: {holders}" if holders else str(error)) from error
    return [gpu for gpu in visible if gpu not in in_use]


def reserve_gpus(engine: Engine, app: AppRequest, free: Sequence[str], undo: ExitStack) -> AppRequest:
    """Assign each replica GPUs of its own.

    Args:
        engine: the one that will run the app.
        app: what will run.
        free: what `check_gpus` returned. Another app may have reserved some since.
        undo: releases the reservations.

    Raises:
        DockerError: there are too few.
    """
    wanted = [container.gpus for container in app.containers]
    got: list[str] = []
    for gpu in free:
        if len(got) < sum(wanted) and _reserve(engine, app, _GPU, gpu, undo):
            got.append(gpu)
    assigned = devices.assign_gpus(wanted, free, set(free) - set(got))
    pairs = zip(app.containers, assigned, strict=True)
    return replace(app, containers=tuple(replace(container, gpu_ids=ids) for container, ids in pairs))


def reserve_ports(engine: Engine, app: AppRequest, undo: ExitStack) -> AppRequest:
    """Reserve a rendezvous port for each agent role on the host's network.

    Args:
        engine: the one that will run the app. It has the images.
        app: what will run.
        undo: releases the reservations.

    Raises:
        DockerError: none of the ports after a role's preferred one is free.
    """
    used: set[int] = set()
    for first_node in {container.role: container for container in reversed(app.containers)}.values():
        if first_node.host_port is None:
            continue
        wanted = [port for port in _list_ports_from(first_node.host_port) if port not in used]
        free = _find_free_ports(engine, app, first_node, wanted)
        port = next((each for each in free if _reserve(engine, app, _PORT, str(each), undo)), None)
        if port is None:
            raise DockerError(
                f"role {first_node.role!r}: no free port on the network of the engine's host "
                f"({len(wanted)} tried from {first_node.host_port} on); leave out -cfg network=host"
            )
        used.add(port)
        app = set_host_port(app, first_node.role, port)
    return app


def release_reservations(engine: Engine, labels: Mapping[str, str]) -> None:
    """Release all reservations of an app that has ended."""
    for volume in engine.list_volumes({**labels, Label.CLAIM: None}):
        engine.remove_volume(volume)


def _reserve(engine: Engine, app: AppRequest, kind: str, thing: str, undo: ExitStack) -> bool:
    name = f"muster-{kind}-{_NOT_IN_NAMES.sub('-', thing)}"
    try:
        labels = engine.create_volume(name, {**app.labels, Label.CLAIM: f"{kind}:{thing}"})
    except Conflict:  # an engine without idempotent creation
        return False
    if any(labels.get(key) != value for key, value in app.labels.items()):
        return False
    undo.callback(engine.remove_volume, name)
    return True


def _reserved_gpus(engine: Engine) -> dict[str, str]:
    """Return the id of a GPU -> the app that reserved it."""
    reserved = {}
    for labels in engine.list_volumes({Label.CLAIM: None}).values():
        kind, _, thing = labels[Label.CLAIM].partition(":")
        if kind == _GPU:
            reserved[thing] = labels[Label.APP]
    return reserved


def _list_ports_from(first: int) -> Iterable[int]:
    begin = HOST_PORTS.index(first)
    return (HOST_PORTS[(begin + step) % len(HOST_PORTS)] for step in range(_PORTS_TRIED))


def _find_free_ports(engine: Engine, app: AppRequest, first_node: ContainerRequest, ports: Sequence[int]) -> list[int]:
    """Find the ports that can be bound on the engine's host, which may be another machine: a container there tries."""
    image, cpus = engine.inspect_image(first_node.image), engine.count_cpus()
    command = (first_node.command[0], "-c", _FREE_PORTS, *map(str, ports))
    body = build_probe_body(app, first_node, command, image=image, cpus=cpus, network=HOST_NETWORK)
    exit_code, output = run_probe(engine, f"{first_node.name}-ports", body)
    words = find_words(output)
    if exit_code != 0 or words is None:
        raise DockerError(f"cannot find a free port on the engine's host: {output.strip() or exit_code}")
    return [int(word) for word in words]
