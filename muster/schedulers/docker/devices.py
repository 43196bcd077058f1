"""Assigns GPUs to replicas by explicit, disjoint device ids. A count would give every replica devices 0..n-1."""

import logging
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit

from muster.schedulers.docker.engine.errors import DockerError
from muster.schedulers.docker.spec import AppRequest

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
