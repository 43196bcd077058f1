"""Assigns GPUs by their ids, and reserves them and ports of the host's network: apps must not share them.

A reservation is an empty volume that no container mounts. Its name is that of the object, and its labels name the app.
The engine creates one volume per name, and returns the first caller's labels to every later one. So of two apps that
reserve an object at the same time one gets it. A reservation outlives a restart of the supervisor and of the engine,
and the time between the loss of a container and its replacement. It is released when the app has ended. To list, create
and list again was rejected: two apps then see each other, or neither does.
"""

import logging
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit

from muster.schedulers.docker.engine import Engine
from muster.schedulers.docker.running_apps.image_check import build_probe_body, find_words, run_probe
from muster.schedulers.docker.sdk import Conflict, DockerError
from muster.schedulers.docker.spec import HOST_NETWORK, HOST_PORTS, AppRequest, ContainerRequest, Label, set_host_port

logger = logging.getLogger(__name__)

_HOOK: Final = "nvidia-container-runtime-hook"


def limit_visible(gpus: Mapping[str, str], visible: str | None) -> list[str]:
    """Return the devices the caller may see, in its order: CUDA_VISIBLE_DEVICES as indices or (prefixes of) UUIDs."""
    if visible is None:
        return list(gpus)
    chosen: list[str] = []
    for word in filter(None, (part.strip() for part in visible.split(","))):
        found = [
            uuid
            for uuid, index in gpus.items()
            if word in (index, uuid) or (not word.isdigit() and uuid.startswith(word))
        ]
        if not found:
            break  # as CUDA does
        chosen += [uuid for uuid in found if uuid not in chosen]
    return chosen


def assign_gpus(wanted: Sequence[int], free: Sequence[str], in_use: Collection[str] = ()) -> list[tuple[str, ...]]:
    """Assign each replica its own devices.

    Args:
        wanted: devices per replica, in the order of the request.
        free: ids of the devices the caller may use.
        in_use: ids that other containers on this engine use.

    Returns:
        One tuple of ids per replica, disjoint.

    Raises:
        DockerError: there are too few.
    """
    pool = [device for device in free if device not in in_use]
    if sum(wanted) > len(pool):
        used = len(free) - len(pool)
        raise DockerError(
            f"the app needs {sum(wanted)} GPUs ({'+'.join(str(n) for n in wanted if n)}), this host has {len(free)}"
            + (f", {used} of them in use by other containers" if used else "")
        )
    devices = iter(pool)
    return [tuple(next(devices) for _ in range(count)) for count in wanted]


def needs_sharing(app: AppRequest, address: str) -> bool:
    """Return whether several agents run on the engine of this machine and none of the app's containers requests GPUs.

    Args:
        app: what will run.
        address: the engine's, in the form of DOCKER_HOST.
    """
    agents = sum(container.runs_agent for container in app.containers)
    return agents > 1 and not any(container.gpus for container in app.containers) and _is_here(address)


def shows_all_gpus(info: Mapping[str, object]) -> bool:
    """Return whether the engine shows all GPUs to containers that request none: NVIDIA's runtime is its default.

    Args:
        info: the engine's answer to `GET /info`.
    """
    return "nvidia" in str(info.get("DefaultRuntime"))


def share_gpus(app: AppRequest, free: int) -> AppRequest:
    """Return the same app with the same number of GPUs for each agent: on one device NCCL refuses a second rank.

    Args:
        app: requests no GPUs.
        free: GPUs that no other container uses.
    """
    agents = sum(container.runs_agent for container in app.containers)
    share = free // agents
    if not share:
        text = "%d nodes cannot share %d GPUs: every node sees all of them, and NCCL refuses two ranks on one GPU"
        logger.warning(text, agents, free)
        return app
    containers = tuple(replace(each, gpus=share) if each.runs_agent else each for each in app.containers)
    return replace(app, containers=containers)


def _is_here(address: str) -> bool:
    url = urlsplit(address)
    return url.scheme in ("unix", "fd") or url.hostname in ("localhost", "127.0.0.1", "::1")


def check_host(address: str) -> None:
    """Refuse an engine on another machine: its GPUs cannot be listed from here, and this machine's have other ids.

    Args:
        address: in the form of DOCKER_HOST.

    Raises:
        DockerError: it is on another machine.
    """
    if not _is_here(address):
        raise DockerError(
            f"the app needs GPUs, but those of the engine at {address} cannot be listed from this machine; "
            "submit the app on the engine's host"
        )


def check_runtime(info: Mapping[str, Any]) -> None:
    """Refuse an engine that cannot give GPUs to containers.

    Args:
        info: the engine's answer to `GET /info`.

    Raises:
        DockerError: NVIDIA's runtime, its hook and a CDI description of devices are all missing.

    Source: moby, daemon/nvidia_linux.go: with the hook on its PATH the engine serves DeviceRequests, even when its
    configuration does not name the runtime.
    """
    names = info.get("Runtimes") or {}
    known = [*names, *(info.get("DiscoveredDevices") or ())]
    if not any("nvidia" in str(each) for each in known) and shutil.which(_HOOK) is None:
        raise DockerError(
            f"the app needs GPUs, but the engine has no NVIDIA runtime (it has {', '.join(sorted(names)) or 'none'}); "
            "install the NVIDIA Container Toolkit on its host"
        )


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
        assign_gpus([container.gpus for container in app.containers], visible, in_use)
    except DockerError as error:
        # A dead supervisor's app may hold them; any command restarts it.
        holders = ", ".join(sorted({reserved[gpu] for gpu in visible if gpu in reserved}))
        raise DockerError(f"{error}; apps that have reserved some: {holders}" if holders else str(error)) from error
    return [gpu for gpu in visible if gpu not in in_use]


def reserve_gpus(engine: Engine, app: AppRequest, free: Sequence[str]) -> AppRequest:
    """Assign each replica GPUs of its own.

    Args:
        engine: the one that will run the app.
        app: what will run.
        free: what `check_gpus` returned. Another app may have reserved some since.

    Raises:
        DockerError: there are too few.
    """
    wanted = [container.gpus for container in app.containers]
    got: list[str] = []
    for gpu in free:
        if len(got) < sum(wanted) and _reserve(engine, app, _GPU, gpu):
            got.append(gpu)
    assigned = assign_gpus(wanted, free, set(free) - set(got))
    pairs = zip(app.containers, assigned, strict=True)
    return replace(app, containers=tuple(replace(container, gpu_ids=ids) for container, ids in pairs))


def reserve_ports(engine: Engine, app: AppRequest) -> AppRequest:
    """Reserve a rendezvous port for each agent role on the host's network.

    Args:
        engine: the one that will run the app. It has the images.
        app: what will run.

    Raises:
        DockerError: none of the ports after a role's preferred one is free.
    """
    used: set[int] = set()
    for first_node in {container.role: container for container in reversed(app.containers)}.values():
        if first_node.host_port is None:
            continue
        begin = HOST_PORTS.index(first_node.host_port)
        ports = (HOST_PORTS[(begin + step) % len(HOST_PORTS)] for step in range(_PORTS_TRIED))
        wanted = [port for port in ports if port not in used]
        free = _find_free_ports(engine, app, first_node, wanted)
        port = next((each for each in free if _reserve(engine, app, _PORT, str(each))), None)
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


def _reserve(engine: Engine, app: AppRequest, kind: str, thing: str) -> bool:
    name = f"muster-{kind}-{_NOT_IN_NAMES.sub('-', thing)}"
    try:
        labels = engine.create_volume(name, {**app.labels, Label.CLAIM: f"{kind}:{thing}"})
    except Conflict:  # an engine without idempotent creation
        return False
    return all(labels.get(key) == value for key, value in app.labels.items())


def _reserved_gpus(engine: Engine) -> dict[str, str]:
    """Return the id of a GPU -> the app that reserved it."""
    reserved = {}
    for labels in engine.list_volumes({Label.CLAIM: None}).values():
        kind, _, thing = labels[Label.CLAIM].partition(":")
        if kind == _GPU:
            reserved[thing] = labels[Label.APP]
    return reserved


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
