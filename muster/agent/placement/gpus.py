"""The machine's GPUs: their ids and addresses, and which of them are visible to a process."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=pci.bus_id,uuid", "--format=csv,noheader")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU of this machine."""

    address: str
    """PCI address as in /sys: 0000:dc:00.0."""
    uuid: str
    """GPU-..., "" when unknown."""


def list_gpus(
    *, proc_root: str | os.PathLike[str] = "/proc", query: Callable[[], str | None] | None = None
) -> tuple[Gpu, ...]:
    """List NVIDIA's GPUs in the order of their PCI addresses.

    Args:
        proc_root: where /proc is; tests use a folder.
        query: returns what nvidia-smi prints, None without it; called only when the driver's folder is missing.
    """
    folder = f"{os.fspath(proc_root)}/driver/nvidia/gpus"
    try:
        addresses = sorted(os.listdir(folder))
    except OSError:
        return _parse_query((query or _query_nvidia_smi)() or "")
    return tuple(
        Gpu(address=_normalise(address), uuid=_read_uuid(f"{folder}/{address}/information")) for address in addresses
    )


def _read_uuid(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    for line in lines:
        label, _, value = line.partition(":")
        if label.strip() == "GPU UUID":
            return value.strip()
    return ""


def _query_nvidia_smi() -> str | None:
    import subprocess  # 5 ms: only where the driver's folder is missing

    try:
        done = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _parse_query(text: str) -> tuple[Gpu, ...]:
    rows = [line.split(",") for line in text.splitlines() if line.count(",") == 1]
    gpus = [Gpu(address=_normalise(address.strip()), uuid=uuid.strip()) for address, uuid in rows]
    return tuple(sorted(gpus, key=lambda gpu: gpu.address))


def _normalise(address: str) -> str:
    """nvidia-smi writes 00000000:DC:00.0, /sys 0000:dc:00.0."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def choose_visible(gpus: tuple[Gpu, ...], env: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Choose the GPUs that CUDA_VISIBLE_DEVICES names, in its order: indices or (prefixes of) UUIDs.

    As in CUDA, the first name without a GPU ends the list.
    """
    text = env.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return gpus
    visible = []
    for name in (word.strip() for word in text.split(",")):
        if name.isdecimal() and int(name) < len(gpus):
            visible.append(gpus[int(name)])
            continue
        found = [gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
        if not found:
            break
        visible.append(found[0])
    return tuple(visible)
