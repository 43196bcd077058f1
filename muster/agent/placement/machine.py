"""The machine's CPUs, NUMA nodes and GPUs, read from /sys and /proc.

Source: Documentation/ABI/stable/sysfs-devices-node and sysfs-devices-system-cpu of Linux; for the GPUs,
/proc/driver/nvidia/gpus of NVIDIA's driver, and nvidia-smi where that folder is missing.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from muster.agent.errors import EnvironmentFault

_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=pci.bus_id,uuid", "--format=csv,noheader")


class CpuTopology:
    """Knows which CPUs belong together. It reads the files at each call and keeps nothing."""

    def __init__(self, *, sys_root: str | os.PathLike[str] = "/sys", allowed: Iterable[int] | None = None) -> None:
        """Choose the machine.

        Args:
            sys_root: where /sys is; tests use a folder.
            allowed: CPUs the workers may use; None means this process's.
        """
        self._sys_root = os.fspath(sys_root)
        self.allowed = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)

    def nodes(self) -> list[int]:
        """Return the NUMA nodes with CPUs in `allowed`, ascending."""
        online = parse_ranges(self._read("devices/system/node/online"))
        return [node for node in sorted(online) if self.cpus_of_node(node)]

    def cpus_of_node(self, node: int) -> frozenset[int]:
        """Return CPUs of a NUMA node that are in `allowed`."""
        return parse_ranges(self._read(f"devices/system/node/node{node}/cpulist")) & self.allowed

    def socket_of(self, cpu: int) -> int:
        """Return the number of the socket a CPU is in."""
        return int(self._read(f"devices/system/cpu/cpu{cpu}/topology/physical_package_id"))

    def core_of(self, cpu: int) -> int:
        """Return the physical core of a CPU, identified by its lowest hardware thread."""
        return min(parse_ranges(self._read(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")))

    def complex_of(self, cpu: int) -> int:
        """Return the core complex of a CPU (the CPUs that share its last-level cache), named by its lowest CPU."""
        folder = f"devices/system/cpu/cpu{cpu}/cache"
        shared = {}
        for index in self._list(folder):
            if index.startswith("index") and self._read(f"{folder}/{index}/type") != "Instruction":
                shared[int(self._read(f"{folder}/{index}/level"))] = f"{folder}/{index}/shared_cpu_list"
        if not shared:
            raise EnvironmentFault(f"--numa-binding core-complex: {self._sys_root}/{folder} lists no cache")
        return min(parse_ranges(self._read(shared[max(shared)])))

    def node_of_device(self, address: str) -> int:
        """Return the NUMA node of a PCI device.

        The kernel reports -1 on a machine with one node, which is node 0.
        """
        return max(0, int(self._read(f"bus/pci/devices/{address}/numa_node")))

    def _read(self, name: str) -> str:
        path = f"{self._sys_root}/{name}"
        try:
            with open(path, encoding="ascii") as file:
                return file.read().strip()
        except OSError as error:
            raise _unreadable(path, error) from error

    def _list(self, name: str) -> list[str]:
        path = f"{self._sys_root}/{name}"
        try:
            return sorted(os.listdir(path))
        except OSError as error:
            raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(f"--numa-binding: cannot read this machine's topology: {path}: {error.strerror}")


def parse_ranges(text: str) -> frozenset[int]:
    """Parse `0-2,4` as a set."""
    numbers: set[int] = set()
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        if low:
            numbers.update(range(int(low), int(high or low) + 1))
    return frozenset(numbers)


def format_ranges(numbers: Iterable[int]) -> str:
    """Return a set as `0-2,4`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU of this machine."""

    address: str
    """PCI address as in /sys: 0000:dc:00.0."""
    uuid: str
    """GPU-...; "" if unknown."""


def list_gpus(
    *, proc_root: str | os.PathLike[str] = "/proc", query: Callable[[], str | None] | None = None
) -> tuple[Gpu, ...]:
    """List NVIDIA's GPUs in the order of their PCI addresses.

    Args:
        proc_root: where /proc is; tests use a folder.
        query: returns what nvidia-smi prints, or None without it. It is called only if the driver's folder is missing.
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
    import subprocess  # 5 ms

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
    """Normalise a PCI address: nvidia-smi writes 00000000:DC:00.0, /sys 0000:dc:00.0."""
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
