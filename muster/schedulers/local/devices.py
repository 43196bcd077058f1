"""Divides the GPUs that the caller may use among the replicas."""

import subprocess
from collections.abc import Mapping, Sequence

from muster.schedulers.errors import SchedulerError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def list_devices(env: Mapping[str, str]) -> tuple[str, ...]:
    """The devices the caller may see: those of CUDA_VISIBLE_DEVICES if set, else all that nvidia-smi lists.

    Returns:
        Values for CUDA_VISIBLE_DEVICES: numbers, or UUIDs if the caller's are UUIDs. As with CUDA, the first entry that
        cannot be a device ends the list.
    """
    visible = env.get(VISIBLE)
    if visible is None:
        return tuple(str(index) for index in range(_count_devices()))
    devices: list[str] = []
    for word in visible.split(","):
        device = word.strip()
        if not device or device.startswith("-"):
            break
        devices.append(device)
    return tuple(devices)


def _count_devices() -> int:
    try:
        run = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return 0  # no driver, no devices
    return sum(1 for line in run.stdout.splitlines() if line.startswith("GPU "))


def assign_devices(wanted: Sequence[tuple[str, int, int]], devices: Sequence[str]) -> dict[str, list[str]]:
    """Disjoint slices of the devices, in order.

    Args:
        wanted: (role, replicas, GPUs per replica), in order.
        devices: as `list_devices` returns them.

    Returns:
        For each role that wants GPUs, one value of CUDA_VISIBLE_DEVICES per replica.

    Raises:
        SchedulerError: there are too few; the message names both numbers.
    """
    total = sum(replicas * each for _, replicas, each in wanted)
    if total > len(devices):
        parts = ", ".join(f"{role}: {replicas} x {each}" for role, replicas, each in wanted if each)
        have = f"this process may use {len(devices)}" + (f" ({','.join(devices)})" if devices else "")
        raise SchedulerError(f"auto_set_cuda_visible_devices: the app needs {total} GPUs ({parts}), but {have}")
    rest = iter(devices)
    return {
        role: [",".join(next(rest) for _ in range(each)) for _ in range(replicas)]
        for role, replicas, each in wanted
        if each
    }
