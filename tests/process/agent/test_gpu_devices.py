"""On a machine with NVIDIA GPUs: NCCL's own monitor, the devices' numbers, free memory before a restart, snapshots.

`make gpu` runs them. Two ranks share a GPU if there is only one. CONTRIBUTING says on what they have run, and what to
send back.
"""

import json
import os
import re
from pathlib import Path

import pytest
from harness import AGENT, PROGRAMS, Outcome, Tree, run_tree, wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.usefixtures("gpus")]
FOLDER = PROGRAMS / "gpu"
PROGRAM = FOLDER / "nccl.py"


def build_argv(how: str, nproc: int, log_dir: Path, *flags: str) -> list[str]:
    agent = [*AGENT, "--standalone", "--nproc-per-node", str(nproc), "--rdzv-id", "gpu"]
    return [*agent, "--log-dir", str(log_dir), *flags, str(PROGRAM), how]


def run(how: str, nproc: int, log_dir: Path, *flags: str) -> Outcome:
    return run_tree(build_argv(how, nproc, log_dir, *flags), timeout_s=280)


def test_nccls_monitor_answers_in_a_format_that_is_read(tmp_path: Path) -> None:
    outcome = run("asks", 2, tmp_path).check()
    told = re.findall(r"nccl (\S+) told (\S+) own (\d+)", outcome.stdout)
    assert len(told) == 2, outcome.explain()
    for version, found, own in told:
        assert found == version, outcome.explain()
        if tuple(map(int, version.split("."))) >= (2, 28, 7):  # a text lists no ranks that agree
            assert own == "1", outcome.explain()


def test_a_rank_that_misses_an_all_reduce_is_named(tmp_path: Path) -> None:
    run("sleeps", 2, tmp_path, "--hang-timeout", "20", "--shutdown-timeout", "2").check(1)
    reason = json.loads((tmp_path / "gpu" / "report.json").read_text())["reason"]
    assert re.match(r"rank 1 did \w+ \w+ \S+ #\d+ of ", reason), reason


def test_what_the_devices_do_is_in_the_status(tmp_path: Path) -> None:
    status = tmp_path / "gpu" / "status.json"

    def find() -> list[dict[str, object]]:
        try:
            ranks = json.loads(status.read_text()).get("ranks", [])
        except (OSError, ValueError):
            return []
        return [rank["device"] for rank in ranks if rank.get("device")]

    with Tree(build_argv("steps", 1, tmp_path)) as agent:
        wait_until(find, what="a device in the status")
        device = find()[0]
        agent.wait().check()
    assert 0 < int(str(device["temperature_c"])) < 120, device
    assert int(str(device["memory_total_bytes"])) > 1 << 30, device


def test_a_restart_finds_the_memory_of_a_killed_worker_free(tmp_path: Path) -> None:
    outcome = run("fills", 1, tmp_path, "--max-restarts", "1").check()
    (free,) = re.findall(r"free (\S+)", outcome.stdout)
    assert float(free) > 0.9, outcome.explain()


@pytest.mark.parametrize("way", ["plain", "foreach", "fused", "graph", "compiled", "average", "outside"])
def test_a_snapshot_of_a_device_is_what_the_step_left(way: str, tmp_path: Path) -> None:
    """Whatever changes the tensors while they are copied: an optimizer, a CUDA graph, the script itself."""
    flags = ["--standalone", "--max-restarts", "2", "--restart-backoff", "0", "--log-dir", str(tmp_path)]
    argv = [*AGENT, *flags, str(FOLDER / "snapshots.py"), way]
    outcome = run_tree(argv, env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, timeout_s=280).check()
    loaded = re.findall(r"loaded step (\d+): (\d+) tensors, differ (.*)", outcome.stdout)
    assert [(int(step) > 0, int(tensors) >= 16, differ) for step, tensors, differ in loaded] == [
        (True, True, "[]")
    ] * 2, outcome.explain()
