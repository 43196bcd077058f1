"""Warm workers on a machine with an NVIDIA GPU: CUDA and NCCL work as in cold ones; device counts; binding."""

import json
import os
import re
from pathlib import Path

import pytest
from fidelity import PROBES, Probe, build_env, run_plainly, run_started
from harness import AGENT, Outcome, run_tree

from muster.agent.placement.affinity import parse_ranges

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.usefixtures("gpus")]
BOTH = pytest.mark.parametrize("how", ["cold", "warm"])

ENV = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def run_agent(how: str, script: str, log_dir: Path, *flags: str, **env: str) -> Outcome:
    """A whole agent on one node."""
    command = [*AGENT, "--standalone", "--start", how, "--log-dir", str(log_dir)]
    words = [*command, "--tee", "3", *flags, str(PROBES / script)]
    return run_tree(words, env=build_env({**ENV, **env}), timeout_s=280)


def read_ways(log_dir: Path) -> list[str]:
    """ "warm" or "cold" of each worker that was started."""
    (path,) = log_dir.glob("*/events.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record["detail"]["how"] for record in records if record["what"] == "worker_released"]


def test_cuda_in_a_worker(tmp_path: Path) -> None:
    probe = Probe(target="cuda_state.py")
    plain = run_plainly(probe)
    assert plain.code == 0, plain.stderr
    assert plain.stdout.startswith("before False [] []\n")
    for how in ("cold", "warm"):
        started = run_started(probe, how, tmp_path / how)
        assert set(started.ways) <= {how}, (started.notices, started.records)
        shown = started.shown[0][0]
        assert (shown.code, shown.stdout) == (plain.code, plain.stdout), shown.stderr


def test_no_cuda_context_in_the_template(tmp_path: Path) -> None:
    """Neither when the first workers are forked nor when it forks their successors."""
    started = run_started(Probe(target="cuda_state.py", args=("template",)), "warm", tmp_path, rounds=2)
    assert set(started.ways) == {"warm"}, (started.notices, started.records)
    for workers in started.shown:
        assert workers[0].code == 0, workers[0].stderr
        assert "templates 1 [[]]\n" in workers[0].stdout


def test_torchs_compiler_in_the_template_leaves_cuda_alone(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import torch\n"
        "layer = torch.nn.Linear(4, 1, device='cuda')\n"
        "optimizer = torch.optim.AdamW(layer.parameters())\n"
        "layer(torch.ones(2, 4, device='cuda')).sum().backward()\n"
        "optimizer.step()\n"
        "print('stepped')\n"
    )
    started = run_started(Probe(target=str(script)), "warm", tmp_path / "out")
    assert set(started.ways) == {"warm"}, (started.notices, started.records)
    ready = next(record for record in started.records if record["what"] == "template_ready")
    assert "torch._dynamo" in ready["modules"]
    assert (started.shown[0][0].code, started.shown[0][0].stdout) == (0, "stepped\n"), started.shown[0][0].stderr


@pytest.mark.parametrize("line", ["torch.cuda.is_available()", "torch.ones(1, device='cuda')"])
def test_an_import_that_uses_cuda_starts_workers_cold(line: str, tmp_path: Path) -> None:
    """torch detects only its own context; the first of these makes none, but still breaks CUDA in a fork."""
    (tmp_path / "touches.py").write_text(f"import torch\n{line}\n")
    script = tmp_path / "main.py"
    script.write_text("import touches, torch\nprint(torch.ones(3, device='cuda').sum().item())\n")
    started = run_started(Probe(target=str(script), preload="touches"), "warm", tmp_path / "out", nproc=2)
    assert set(started.ways) == {"cold"}, (started.notices, started.records)
    assert [(shown.code, shown.stdout) for shown in started.shown[0]] == [(0, "3.0\n")] * 2


@BOTH
def test_the_allocator_a_script_chooses(how: str, tmp_path: Path) -> None:
    shown = run_started(Probe(target="cuda_allocator.py"), how, tmp_path).shown[0][0]
    assert (shown.code, shown.stdout) == (0, "cudaMallocAsync 4.0\n"), shown.stderr


def test_random_states_of_the_device(tmp_path: Path) -> None:
    started = run_started(Probe(target="states.py", args=("torch", "cuda")), "warm", tmp_path, nproc=2, rounds=2)
    assert set(started.ways) == {"warm"}, (started.notices, started.records)
    found = [json.loads(shown.stdout) for workers in started.shown for shown in workers]
    for name in ("cuda_seed", "cuda"):
        assert len({state[name] for state in found}) == 4, (name, found)


@BOTH
def test_nccl_before_and_after_a_restart(how: str, gpus: list[str], tmp_path: Path) -> None:
    """Also: there are as many workers as GPUs, and neither agent nor guard has a CUDA context."""
    outcome = run_agent(how, "nccl_sum.py", tmp_path, "--nproc-per-node", "gpu", "--max-restarts", "1").check()
    count = len(gpus)
    for attempt in (0, 1):
        line = f"attempt {attempt} sum {float(count)} of {count} contexts ['worker'] files []"
        assert outcome.stdout.count(line) == count, outcome.explain()
    assert read_ways(tmp_path) == [how] * 2 * count


@pytest.mark.parametrize("kind", ["gpu", "auto"])
def test_visible_devices_count(kind: str, gpus: list[str], tmp_path: Path) -> None:
    flags = ("--nproc-per-node", kind)
    for number, (visible, count) in enumerate(((",".join(map(str, range(len(gpus)))), len(gpus)), ("0", 1))):
        outcome = run_agent("cold", "affinity.py", tmp_path / str(number), *flags, CUDA_VISIBLE_DEVICES=visible).check()
        assert len(re.findall(r"cpus \d+ ", outcome.stdout)) == count, outcome.explain()


def test_no_visible_device_is_a_usage_error(tmp_path: Path) -> None:
    outcome = run_agent("warm", "affinity.py", tmp_path, "--nproc-per-node", "gpu", CUDA_VISIBLE_DEVICES="").check(2)
    assert "finds no GPU" in outcome.stderr


def list_near_cpus(address: str) -> frozenset[int]:
    """The CPUs of a GPU's NUMA node that this process may use."""
    try:
        node = max(0, int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text()))
        near = parse_ranges(Path(f"/sys/devices/system/node/node{node}/cpulist").read_text().strip())
    except OSError as error:
        pytest.skip(f"this machine does not show where its GPUs are: {error}")
    if not near & os.sched_getaffinity(0):
        pytest.skip(f"this process may use no CPU near the GPU {address}")
    return near & os.sched_getaffinity(0)


def test_workers_are_bound_to_the_cpus_near_their_gpu(gpus: list[str], tmp_path: Path) -> None:
    expected = [sorted(list_near_cpus(address)) for address in gpus]
    seen = []
    for how in ("cold", "warm"):
        flags = ("--nproc-per-node", "gpu", "--numa-binding", "node")
        outcome = run_agent(how, "affinity.py", tmp_path / how, *flags).check()
        assert read_ways(tmp_path / how) == [how] * len(gpus)
        rows = sorted(re.findall(r"cpus (\d+) ([\d ]+) threads (\d+)", outcome.stdout), key=lambda row: int(row[0]))
        assert [[int(cpu) for cpu in cpus.split()] for _, cpus, _ in rows] == expected, outcome.explain()
        seen.append(rows)
    assert seen[0] == seen[1]
