"""Decides which CPUs each worker runs on, for `--numa-binding`.

Source: torch/numa/binding.py of torch 2.13 defines the four values for a machine with GPUs. Without GPUs torch ends
with an error; here the workers are spread over the NUMA nodes, neighbours together. Only NVIDIA GPUs are considered.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from muster.agent.errors import EnvironmentFault, UsageError
from muster.agent.placement.machine import CpuTopology, Gpu, choose_visible, format_ranges, list_gpus


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
    place = neighbours.index(index)
    share, extra = divmod(len(cores), len(neighbours))
    begin = place * share + min(place, extra)
    names = sorted(cores)[begin : begin + share + (place < extra)]
    return frozenset().union(*(cores[name] for name in names))


def _choose_core_complex(topology: CpuTopology, homes: Sequence[int], index: int) -> frozenset[int]:
    """Return one core complex each, those with most usable CPUs first; workers share if there are too few."""
    complexes = _group_cpus(topology.cpus_of_node(homes[index]), topology.complex_of)
    if not complexes:
        return frozenset()
    place = [other for other, home in enumerate(homes) if home == homes[index]].index(index)
    names = sorted(complexes, key=lambda name: (-len(complexes[name]), name))
    return frozenset(complexes[names[place % len(names)]])


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
