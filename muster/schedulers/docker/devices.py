"""Assigns GPUs to replicas: explicit, disjoint device ids. A count would give every replica devices 0..n-1."""

import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from muster.schedulers.docker.engine.errors import DockerError

_GPU_LINE: Final = re.compile(r"GPU (\d+): .*\(UUID: (GPU-[^)]+)\)", re.ASCII)
_HOOK: Final = "nvidia-container-runtime-hook"
_MIG_LINE: Final = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", re.ASCII)


def parse_gpus(listing: str) -> dict[str, str]:
    """Parse `nvidia-smi -L`: UUID of every usable device -> the index of its GPU.

    A GPU with MIG slices counts as its slices.
    """
    gpus: dict[str, str] = {}
    index, uuid = "", ""
    for line in listing.splitlines():
        gpu, mig = _GPU_LINE.match(line), _MIG_LINE.match(line)
        if gpu:
            index, uuid = gpu[1], gpu[2]
            gpus[uuid] = index
        elif mig:
            gpus.pop(uuid, None)
            gpus[mig[1]] = index
    return gpus


def limit_visible(gpus: Mapping[str, str], visible: str | None) -> list[str]:
    """The devices the caller may see, in its order: CUDA_VISIBLE_DEVICES as indices or (prefixes of) UUIDs."""
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
            break  # as CUDA does: the first unknown device ends the list
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


def check_host(address: str) -> None:
    """Refuse an engine on another machine: its GPUs cannot be listed from here, and this machine's have other ids.

    Args:
        address: in the form of DOCKER_HOST.

    Raises:
        DockerError: it is on another machine.
    """
    url = urlsplit(address)
    if url.scheme not in ("unix", "fd") and url.hostname not in ("localhost", "127.0.0.1", "::1"):
        raise DockerError(
            f"the app needs GPUs, but those of the engine at {address} cannot be listed from this machine; "
            "submit the app on the engine's host"
        )


def list_gpus() -> dict[str, str]:
    """The GPUs of this machine, see `parse_gpus`.

    Raises:
        DockerError: there is no driver here, or it does not answer within 30 s.
    """
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise DockerError(f"the app needs GPUs, but nvidia-smi -L failed on this machine: {error}") from error
    return parse_gpus(listed.stdout)


def check_runtime(info: Mapping[str, object]) -> None:
    """Refuse an engine that cannot give GPUs to containers.

    Args:
        info: the engine's answer to `GET /info`.

    Raises:
        DockerError: NVIDIA's runtime, its hook and a CDI description of devices are all missing.

    Source: moby, daemon/nvidia_linux.go: with the hook on its PATH the engine serves DeviceRequests, even when its
    configuration does not name the runtime.
    """
    runtimes = info.get("Runtimes")
    names: Collection[str] = runtimes if isinstance(runtimes, Mapping) else ()
    discovered = info.get("DiscoveredDevices")
    cdi = isinstance(discovered, list) and any("nvidia" in str(device) for device in discovered)
    if not cdi and not any("nvidia" in name for name in names) and shutil.which(_HOOK) is None:
        raise DockerError(
            f"the app needs GPUs, but the engine has no NVIDIA runtime (it has {', '.join(sorted(names)) or 'none'}); "
            "install the NVIDIA Container Toolkit on its host"
        )
