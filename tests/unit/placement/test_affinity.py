"""`--numa-binding` on machines made of files: two sockets, four NUMA nodes, hardware threads, caches, GPUs."""

from pathlib import Path
from typing import Any

import pytest

from muster.agent.errors import EnvironmentFault, UsageError
from muster.agent.placement.affinity import (
    CpuTopology,
    Gpu,
    choose_visible,
    find_numactl,
    format_ranges,
    list_gpus,
    parse_ranges,
    plan_affinity,
)

CORES_PER_NODE, NODES, NODES_PER_SOCKET, CORES_PER_COMPLEX = 4, 4, 2, 2
CORES = CORES_PER_NODE * NODES
CPUS = 2 * CORES  # cpu n and n + CORES are threads of one core


@pytest.fixture
def sys_root(tmp_path: Path) -> Path:
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    write("devices/system/node/online", f"0-{NODES - 1}")
    for node in range(NODES):
        first = node * CORES_PER_NODE
        last = first + CORES_PER_NODE - 1
        write(f"devices/system/node/node{node}/cpulist", f"{first}-{last},{first + CORES}-{last + CORES}")
    for cpu in range(CPUS):
        core = cpu % CORES
        topology, cache = f"devices/system/cpu/cpu{cpu}/topology", f"devices/system/cpu/cpu{cpu}/cache"
        write(f"{topology}/physical_package_id", str(core // (CORES_PER_NODE * NODES_PER_SOCKET)))
        write(f"{topology}/thread_siblings_list", f"{core},{core + CORES}")
        first = core - core % CORES_PER_COMPLEX
        shared = f"{first}-{first + CORES_PER_COMPLEX - 1},{first + CORES}-{first + CORES + CORES_PER_COMPLEX - 1}"
        for index, (kind, level, cpus) in enumerate(
            [("Data", 1, str(cpu)), ("Instruction", 1, str(cpu)), ("Unified", 2, str(cpu)), ("Unified", 3, shared)]
        ):
            write(f"{cache}/index{index}/type", kind)
            write(f"{cache}/index{index}/level", str(level))
            write(f"{cache}/index{index}/shared_cpu_list", cpus)
    for index, node in enumerate((0, 0, 3, -1)):
        write(f"bus/pci/devices/0000:{index:02x}:00.0/numa_node", str(node))
    return tmp_path


GPUS = tuple(Gpu(address=f"0000:{index:02x}:00.0", uuid=f"GPU-{index}") for index in range(4))


def plan(
    root: Path, kind: str, nproc: int, *, gpus: tuple[Gpu, ...] = GPUS[:3], allowed: range = range(CPUS), **env: str
) -> list[str]:
    topology = CpuTopology(sys_root=root, allowed=allowed)
    placements = plan_affinity(kind, nproc, env=env, topology=topology, gpus=gpus, numactl=lambda: None)
    assert all(placement.command_prefix == () for placement in placements)
    return [format_ranges(placement.cpus) for placement in placements]


def test_node(sys_root: Path) -> None:
    assert plan(sys_root, "node", 3) == ["0-3,16-19", "0-3,16-19", "12-15,28-31"]


def test_socket(sys_root: Path) -> None:
    assert plan(sys_root, "socket", 3) == ["0-7,16-23", "0-7,16-23", "8-15,24-31"]


def test_exclusive_shares_physical_cores_also_with_gpus_that_have_no_worker(sys_root: Path) -> None:
    assert plan(sys_root, "exclusive", 3) == ["0-1,16-17", "2-3,18-19", "12-15,28-31"]
    assert plan(sys_root, "exclusive", 1) == ["0-1,16-17"]


def test_exclusive_gives_the_odd_core_to_the_first(sys_root: Path) -> None:
    assert plan(sys_root, "exclusive", 2, allowed=range(3)) == ["0-1", "2"]


def test_core_complex_takes_the_fullest_first_and_shares_when_there_are_too_few(sys_root: Path) -> None:
    assert plan(sys_root, "core-complex", 3) == ["0-1,16-17", "2-3,18-19", "12-13,28-29"]
    assert plan(sys_root, "core-complex", 2, allowed=range(1, 4)) == ["2-3", "1"]
    on_one_node = tuple(Gpu(address="0000:00:00.0", uuid="") for _ in range(3))
    assert plan(sys_root, "core-complex", 3, gpus=on_one_node)[2] == "0-1,16-17"


def test_a_device_without_a_node_is_on_node_0(sys_root: Path) -> None:
    assert plan(sys_root, "node", 1, gpus=GPUS[3:]) == ["0-3,16-19"]


def test_visible_devices_decide_which_gpu_is_whose(sys_root: Path) -> None:
    assert plan(sys_root, "node", 2, CUDA_VISIBLE_DEVICES="2,0") == ["12-15,28-31", "0-3,16-19"]


def test_without_gpus_workers_are_spread_over_the_nodes(sys_root: Path) -> None:
    assert plan(sys_root, "node", 4, gpus=()) == ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]
    assert plan(sys_root, "node", 2, gpus=()) == ["0-3,16-19", "8-11,24-27"]
    assert plan(sys_root, "exclusive", 8, gpus=())[:2] == ["0-1,16-17", "2-3,18-19"]
    assert plan(sys_root, "node", 2, gpus=(), allowed=range(4, 8)) == ["4-7", "4-7"]


@pytest.mark.parametrize(
    ("kind", "nproc", "more", "error", "facts"),
    [
        ("exclusive", 2, {"allowed": range(1)}, UsageError, ["1 physical", "2 workers"]),
        ("node", 4, {}, UsageError, ["4 workers", "3 GPUs"]),
        ("node", 2, {"gpus": GPUS[:1]}, UsageError, ["2 workers", "1 GPU"]),
        ("node", 3, {"allowed": range(4)}, EnvironmentFault, ["NUMA node 3"]),
    ],
    ids=["too few cores", "too few GPUs", "one GPU", "its CPUs are not allowed"],
)
def test_what_cannot_be_bound(sys_root: Path, kind, nproc, more, error, facts) -> None:
    with pytest.raises(error) as caught:
        plan(sys_root, kind, nproc, **more)
    assert [fact for fact in facts if fact not in str(caught.value)] == []


@pytest.mark.parametrize("kind", ["node", "socket", "exclusive", "core-complex"])
def test_a_topology_that_cannot_be_read(tmp_path: Path, kind: str) -> None:
    with pytest.raises(EnvironmentFault, match=r"topology: .*/online: No such file"):
        plan(tmp_path, kind, 1, gpus=())


def test_numactl_is_put_before_the_command(sys_root: Path) -> None:
    topology = CpuTopology(sys_root=sys_root, allowed=range(CPUS))
    [placement] = plan_affinity("node", 1, env={}, topology=topology, gpus=GPUS, numactl=lambda: "/usr/bin/numactl")
    assert placement.command_prefix == ("/usr/bin/numactl", "--physcpubind=0-3,16-19")
    assert placement.cpus == parse_ranges("0-3,16-19")


def test_no_numactl_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_numactl() is None


def test_gpus_of_the_driver(tmp_path: Path) -> None:
    for address, uuid in (("0000:dc:00.0", "GPU-b"), ("0000:18:00.0", "GPU-a")):
        folder = tmp_path / "driver/nvidia/gpus" / address
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n")
    assert list_gpus(proc_root=tmp_path) == (
        Gpu(address="0000:18:00.0", uuid="GPU-a"),
        Gpu(address="0000:dc:00.0", uuid="GPU-b"),
    )


def test_gpus_of_nvidia_smi(tmp_path: Path) -> None:
    text = "00000000:DC:00.0, GPU-b\n00000000:18:00.0, GPU-a\n"
    assert [gpu.address for gpu in list_gpus(proc_root=tmp_path, query=lambda: text)] == [
        "0000:18:00.0",
        "0000:dc:00.0",
    ]
    assert list_gpus(proc_root=tmp_path, query=lambda: None) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, "0123"), ("", ""), ("3,1", "31"), ("GPU-2,0", "20"), ("1,9,0", "1"), ("1,-1,0", "1"), (" 2 , 3", "23")],
)
def test_visible_devices(text: str | None, expected: str) -> None:
    env: dict[str, Any] = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert "".join(gpu.uuid[-1] for gpu in choose_visible(GPUS, env)) == expected


@pytest.mark.parametrize("text", ["0", "0-3", "0-3,8,10-11", ""])
def test_ranges_there_and_back(text: str) -> None:
    assert format_ranges(parse_ranges(text)) == text
