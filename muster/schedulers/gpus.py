"""Lists the NVIDIA GPUs of this machine by its driver's own command, and divides them among the replicas of an app.

It also names the caches of the compilers that write programs for GPUs.
"""

import logging
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from muster.schedulers.errors import SchedulerError

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""The variable that names the GPUs that a process may use."""

_LIMIT_S: Final = 30.0
_GPU_LINE: Final = re.compile(r"GPU (\d+): .*\(UUID: (GPU-[^)]+)\)", re.ASCII)
_MIG_LINE: Final = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", re.ASCII)

logger = logging.getLogger(__name__)


class GpuError(RuntimeError):
    """There is no driver, or it does not answer. `str()` is one line."""


def list_gpus() -> dict[str, str]:
    """Return the GPUs of this machine, see `parse_gpus`.

    Raises:
        GpuError: there is no driver here, or it does not answer within 30 s.
    """
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise GpuError(f"nvidia-smi -L failed on this machine: {error}") from error
    return parse_gpus(listed.stdout)


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


@dataclass(frozen=True, kw_only=True)
class DeviceRequest:
    """What one role needs of the GPUs."""

    role: str
    replicas: int
    each: int
    """GPUs that one replica requests. 0: none."""
    runs_agent: bool
    chosen: bool = False
    """The role sets CUDA_VISIBLE_DEVICES itself."""


def list_devices(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the devices the caller may see: those of CUDA_VISIBLE_DEVICES if set, else all that nvidia-smi lists.

    Returns:
        Values for CUDA_VISIBLE_DEVICES: numbers, or UUIDs if the caller's are UUIDs or a GPU is divided (MIG). As with
        CUDA, the first entry that cannot be a device ends the list.
    """
    visible = env.get(VISIBLE)
    if visible is None:
        try:
            gpus = list_gpus()
        except GpuError:
            return ()  # no driver, no devices
        # A slice has no number.
        return tuple(uuid if uuid.startswith("MIG-") else index for uuid, index in gpus.items())
    devices: list[str] = []
    for word in visible.split(","):
        device = word.strip()
        if not device or device.startswith("-"):
            break
        devices.append(device)
    return tuple(devices)


def needs_sharing(wanted: Sequence[DeviceRequest]) -> bool:
    """Return whether several nodes would see the same GPUs."""
    return sum(each.replicas for each in _list_sharers(wanted)) > 1


def share_devices(wanted: Sequence[DeviceRequest], devices: Sequence[str]) -> dict[str, list[str]]:
    """Divide the devices among the nodes of an app that does not say how to divide them.

    Each node gets what its role requests if there are enough devices for all, else each gets the same number. Nodes of
    the agent's roles take part, and so do replicas of other roles that request GPUs. A role that sets
    CUDA_VISIBLE_DEVICES does not. Without this all nodes would use device 0, 1, ..., and NCCL refuses two ranks on one
    device.

    Args:
        wanted: all roles of the app, in order.
        devices: as `list_devices` returns them.

    Returns:
        For each role that takes part, one value of CUDA_VISIBLE_DEVICES per replica. It is empty if nothing is divided.
    """
    sharers = _list_sharers(wanted)
    nodes = sum(each.replicas for each in sharers)
    if nodes < 2 or not devices:
        return {}
    requested = sum(each.replicas * each.each for each in sharers)
    if all(each.each for each in sharers) and requested <= len(devices):
        return _slice([(each.role, each.replicas, each.each) for each in sharers], devices)
    share = len(devices) // nodes
    if not share:
        text = "%d nodes cannot share %d GPUs: every node sees all of them, and NCCL refuses two ranks on one GPU"
        logger.warning(text, nodes, len(devices))
        return {}
    if requested > len(devices):
        text = "the app requests %d GPUs, but this process may use %d: each of the app's %d nodes gets %d"
        logger.warning(text, requested, len(devices), nodes, share)
    return _slice([(each.role, each.replicas, share) for each in sharers], devices)


def _list_sharers(wanted: Sequence[DeviceRequest]) -> list[DeviceRequest]:
    return [each for each in wanted if (each.runs_agent or each.each) and not each.chosen]


def assign_devices(wanted: Sequence[DeviceRequest], devices: Sequence[str]) -> dict[str, list[str]]:
    """Divide the devices in order: each replica gets as many as it requests.

    Args:
        wanted: all roles of the app, in order.
        devices: as `list_devices` returns them.

    Returns:
        For each role that requests GPUs, one value of CUDA_VISIBLE_DEVICES per replica.

    Raises:
        SchedulerError: there are too few. The message names both numbers.
    """
    total = sum(each.replicas * each.each for each in wanted)
    if total > len(devices):
        parts = ", ".join(f"{each.role}: {each.replicas} x {each.each}" for each in wanted if each.each)
        have = f"this process may use {len(devices)}" + (f" ({','.join(devices)})" if devices else "")
        raise SchedulerError(f"auto_set_cuda_visible_devices: the app needs {total} GPUs ({parts}), but {have}")
    return _slice([(each.role, each.replicas, each.each) for each in wanted if each.each], devices)


def _slice(counts: Sequence[tuple[str, int, int]], devices: Sequence[str]) -> dict[str, list[str]]:
    """Map (role, replicas, devices per replica) to values of CUDA_VISIBLE_DEVICES."""
    rest = iter(devices)
    return {
        role: [",".join(next(rest) for _ in range(each)) for _ in range(replicas)] for role, replicas, each in counts
    }


_CACHE_VARIABLES: Final = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
}
CACHE_FOLDERS: Final = tuple(_CACHE_VARIABLES.values())
"""Folders of `-cfg compile_cache`, one for each cache that a container or pod would take along.

Code is loaded from them.
"""


def build_cache_env(folder: str) -> Mapping[str, str]:
    """Return the variables by which TorchInductor, Triton and CUDA find their caches in this folder."""
    return {name: f"{folder}/{cache}" for name, cache in _CACHE_VARIABLES.items()}
