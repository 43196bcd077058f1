"""Decides which CPUs each worker runs on, for `--numa-binding`.

Source: torch/numa/binding.py of torch 2.13 defines the four values for a machine with GPUs. Without GPUs torch ends
with an error; here the workers are spread over the NUMA nodes, neighbours together. Only NVIDIA GPUs are considered.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from muster.agent.errors import EnvironmentFault, UsageError

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


@dataclass(frozen=True, kw_only=True)
class WorkerPlacement:
    """Where one worker runs. Either field is enough; a warm worker has only the first."""

    cpus: frozenset[int]
    """The CPUs, for `os.sched_setaffinity`."""
    command_prefix: tuple[str, ...] = ()
    """`numactl --physcpubind=...`; empty if numactl is missing or does not work here."""


def plan_affinity(
    kind: str,
    nproc: int,
    *,
    env: Mapping[str, str],
    topology: CpuTopology | None = None,
    gpus: Sequence[Gpu] | None = None,
    numactl: Callable[[], str | None] | None = None,
) -> tuple[WorkerPlacement, ...]:
    """Plan the placement of each worker, indexed by local rank; length nproc.

    Args:
        kind: node, socket, exclusive or core-complex.
        nproc: workers on this node.
        env: for CUDA_VISIBLE_DEVICES.
        topology: None means this machine's.
        gpus: all of the machine's, in CUDA's order; None means that they are searched.
        numactl: finds the command; None means `find_numactl`.

    Raises:
        UsageError: there are more workers than GPUs, or with `exclusive` more than cores.
        EnvironmentFault: the topology cannot be read.
    """
    topology = topology or _read_machine()
    visible = choose_visible(tuple(list_gpus() if gpus is None else gpus), env)
    homes = _find_homes(nproc, visible, topology)
    if nproc > len(homes):
        raise UsageError(
            f"--numa-binding {kind} puts each worker near its own GPU, but there are {nproc} workers and "
            f"{len(homes)} GPU{'' if len(homes) == 1 else 's'}"
        )
    choose = _CHOICES[kind]
    command = (numactl or find_numactl)()
    placements = []
    for local_rank in range(nproc):
        cpus = choose(topology, homes, local_rank)
        if not cpus:
            raise EnvironmentFault(
                f"--numa-binding {kind}: this process may not use any CPU of NUMA node {homes[local_rank]}, which has "
                f"the GPU of local rank {local_rank}"
            )
        prefix = (command, f"--physcpubind={format_ranges(cpus)}") if command else ()
        placements.append(WorkerPlacement(cpus=cpus, command_prefix=prefix))
    return tuple(placements)


def _read_machine() -> CpuTopology:
    try:
        return CpuTopology()
    except AttributeError as error:  # os.sched_getaffinity: Linux only
        raise EnvironmentFault("--numa-binding needs Linux: this system cannot bind processes to CPUs") from error


def _find_homes(nproc: int, gpus: Sequence[Gpu], topology: CpuTopology) -> list[int]:
    """Return the NUMA node of each GPU, or of each worker if there are no GPUs."""
    if gpus:
        return [topology.node_of_device(gpu.address) for gpu in gpus]
    nodes = topology.nodes()
    if not nodes:
        raise EnvironmentFault("--numa-binding: no NUMA node has a CPU this process may use")
    return [nodes[local_rank * len(nodes) // nproc] for local_rank in range(nproc)]


def _choose_node(topology: CpuTopology, homes: Sequence[int], index: int) -> frozenset[int]:
    return topology.cpus_of_node(homes[index])


def _choose_socket(topology: CpuTopology, homes: Sequence[int], index: int) -> frozenset[int]:
    own = topology.cpus_of_node(homes[index])
    if not own:
        return own
    socket = topology.socket_of(min(own))
    nodes = [topology.cpus_of_node(node) for node in topology.nodes()]
    return frozenset().union(*(cpus for cpus in nodes if topology.socket_of(min(cpus)) == socket))


def _choose_exclusive(topology: CpuTopology, homes: Sequence[int], index: int) -> frozenset[int]:
    """Return an even share of the node's physical cores. The first workers get one more if there is a remainder."""
    cores = _group_cpus(topology.cpus_of_node(homes[index]), topology.core_of)
    neighbours = [other for other, home in enumerate(homes) if home == homes[index]]
    if len(cores) < len(neighbours):
        raise UsageError(
            f"--numa-binding exclusive: NUMA node {homes[index]} has {len(cores)} physical cores for "
            f"{len(neighbours)} workers or GPUs"
        )
    position = neighbours.index(index)
    share, extra = divmod(len(cores), len(neighbours))
    begin = position * share + min(position, extra)
    names = sorted(cores)[begin : begin + share + (position < extra)]
    return frozenset().union(*(cores[name] for name in names))


def _choose_core_complex(topology: CpuTopology, homes: Sequence[int], index: int) -> frozenset[int]:
    """Return one core complex each, those with most usable CPUs first; workers share if there are too few."""
    complexes = _group_cpus(topology.cpus_of_node(homes[index]), topology.complex_of)
    if not complexes:
        return frozenset()
    position = [other for other, home in enumerate(homes) if home == homes[index]].index(index)
    names = sorted(complexes, key=lambda name: (-len(complexes[name]), name))
    return frozenset(complexes[names[position % len(names)]])


def _group_cpus(cpus: frozenset[int], name_of: Callable[[int], int]) -> dict[int, set[int]]:
    groups: dict[int, set[int]] = defaultdict(set)
    for cpu in cpus:
        groups[name_of(cpu)].add(cpu)
    return groups


_CHOICES: Mapping[str, Callable[[CpuTopology, Sequence[int], int], frozenset[int]]] = {
    "node": _choose_node,
    "socket": _choose_socket,
    "exclusive": _choose_exclusive,
    "core-complex": _choose_core_complex,
}


def find_numactl() -> str | None:
    """Find a numactl that works here; a container's seccomp profile often blocks its system calls."""
    import shutil  # 10 ms
    import subprocess

    path = shutil.which("numactl")
    if path is None:
        return None
    try:
        done = subprocess.run([path, "--show"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return path if done.returncode == 0 else None
