"""Lists the NVIDIA GPUs of this machine by its driver's own command. Adapters divide them among replicas."""

import re
import subprocess
from typing import Final

_LIMIT_S: Final = 30.0
_GPU_LINE: Final = re.compile(r"GPU (\d+): .*\(UUID: (GPU-[^)]+)\)", re.ASCII)
_MIG_LINE: Final = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", re.ASCII)


class GpuError(RuntimeError):
    """There is no driver, or it does not answer; one line."""


def list_gpus() -> dict[str, str]:
    """The GPUs of this machine, see `parse_gpus`.

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
