"""The status of a job of several agents: of all nodes, in the folder of whichever leads."""

import os
import signal
from pathlib import Path

from harness import AGENT, PROGRAMS, Tree, find_free_port, wait_until

from muster._shared.job_view import DeviceStatus, JobState, JobStatus
from muster.schedulers.failure_report import parse_status

PROGRAM = PROGRAMS / "agent/stepping.py"


def start_node(folder: Path, rank: int | None, port: int) -> Tree:
    """Start an agent with this `--node-rank` and its own log folder, or without one and with the others' log folder."""
    flags = ["--nnodes", "2:3", "--nproc-per-node", "2", "--rdzv-id", "job", "--tee", "3", "--rdzv-backend", "c10d"]
    flags += ["--last-call-timeout", "60"]  # the third one belongs to the first round
    flags += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--log-dir", str(folder / str(rank or 0))]
    flags += [] if rank is None else ["--node-rank", str(rank)]
    return Tree([*AGENT, *flags, str(PROGRAM), str(folder / "go")], cwd=folder)


def read_status(folder: Path, rank: int) -> JobStatus:
    path = folder / str(rank) / "job/status.json"
    found = parse_status(path.read_bytes()) if path.exists() else None
    return JobStatus() if found is None else found


def is_complete(status: JobStatus, world_size: int) -> bool:
    """Whether every rank has told all that it can."""
    told = [rank.step and rank.rate and rank.cpu is not None and rank.memory_bytes for rank in status.ranks]
    return len(told) == world_size and all(told) and status.state is JobState.RUNNING


def test_nodes_without_a_node_rank_have_the_numbers_of_the_report_in_all_places(tmp_path: Path) -> None:
    """All were node 0 in `muster top`, and of a shared log folder all had `node_0`."""
    port = find_free_port()
    with start_node(tmp_path, None, port) as first, start_node(tmp_path, None, port), start_node(tmp_path, None, port):
        wait_until(lambda: is_complete(read_status(tmp_path, 0), 6), what="a status with all six ranks")
        (tmp_path / "go").touch()
        first.wait()
    numbers = [(node.node_index, node.node) for node in read_status(tmp_path, 0).nodes]
    assert numbers == [(0, 0), (1, 1), (2, 2)]
    assert sorted(path.parent.name for path in tmp_path.glob("0/job/**/attempt_0")) == ["node_0", "node_1", "node_2"]


def test_all_nodes_are_in_the_file_of_the_leader_and_of_the_next_one(tmp_path: Path) -> None:
    port = find_free_port()
    with start_node(tmp_path, 0, port) as first, start_node(tmp_path, 1, port) as second, start_node(tmp_path, 2, port):
        wait_until(lambda: is_complete(read_status(tmp_path, 0), 6), what="a status with all six ranks")
        status = read_status(tmp_path, 0)
        assert [node.node_index for node in status.nodes] == [0, 1, 2]
        assert all(rank.last_line.startswith("step ") for rank in status.ranks)
        assert status.eta_s is not None
        assert not (tmp_path / "1/job/status.json").exists()
        first.send(signal.SIGKILL)
        wait_until(lambda: is_complete(read_status(tmp_path, 1), 4), what="a status of the next leader")
        status = read_status(tmp_path, 1)
        assert [node.node_index for node in status.nodes] == [1, 2]
        assert (status.recovery_count, status.round) == (1, 2)
        assert any(event.text.startswith("round 1: 6 ranks") for event in status.events)
        (tmp_path / "go").touch()
        second.wait().check()
    status = read_status(tmp_path, 1)
    assert (status.state, status.exit_code) == (JobState.ENDED, 0)


def test_gpus_are_read_where_their_library_is(nvml: str, tmp_path: Path) -> None:
    gpus = {"MUSTER_NVML": nvml, "STAND_IN_GPUS": "7:1:9,93:4096:8192,5:1024:8192"}
    gpus |= {"STAND_IN_STATUS": ",".join(["71:642300:700000:1980:4:0:0:18"] * 3), "STAND_IN_XID": "2:79"}
    flags = ["--standalone", "--nproc-per-node", "2", "--rdzv-id", "job", "--log-dir", str(tmp_path / "0")]
    words = [*AGENT, *flags, str(PROGRAM), str(tmp_path / "go")]
    gpus["STAND_IN_SLOW_MS"] = "300"
    with Tree(words, env={**os.environ, **gpus, "CUDA_VISIBLE_DEVICES": "1,2"}, cwd=tmp_path) as agent:
        wait_until(lambda: [rank for rank in read_status(tmp_path, 0).ranks if rank.gpu], what="the use of GPUs")
        ranks = read_status(tmp_path, 0).ranks
        assert [(rank.gpu, rank.gpu_memory_bytes) for rank in ranks] == [(0.93, 4096), (0.05, 1024)]
        told = [rank.device or DeviceStatus() for rank in ranks]
        assert {(each.temperature_c, each.power_w, each.slowed_by) for each in told} == {(71, 642, "power cap")}
        assert [each.last_xid for each in told] == [None, 79]
        (tmp_path / "go").touch()
        agent.wait().check()
