"""A worker's environment: a pure function of configuration, round and local rank."""

from typing import Any

import pytest
from doubles.samples import make_round

from muster._shared import records
from muster._shared.records import replace
from muster.agent.cli.arguments import parse_args
from muster.agent.config import AgentConfig
from muster.agent.errors import UsageError
from muster.agent.workers.environment import build_worker_env, substitute_macros
from muster.agent.workers.spec import Program, ProgramKind

ROUND = make_round(
    number=4,
    attempt=2,
    restarts_left=1,
    group_rank=1,
    group_world_size=3,
    rank_offset=2,
    world_size=7,
    master_addr="10.0.0.1",
    master_port=4711,
)


def config(flags: str = "--nproc-per-node 2", **environ: str) -> AgentConfig:
    return parse_args([*flags.split(), "--nnodes", "3", "--rdzv-backend", "c10d", "--rdzv-id", "job", "x.py"], environ)


def build(flags: str = "--nproc-per-node 2", local_rank: int = 1, **environ: str) -> dict[str, str]:
    return build_worker_env(config(flags, **environ), ROUND, local_rank, error_file="/e/error.json")


def test_the_whole_environment() -> None:
    env = build("--nproc-per-node 2 --role trainer --max-restarts 3", HOME="/h", OMP_NUM_THREADS="5")
    assert env == {
        "HOME": "/h",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "trainer",
        "WORLD_SIZE": "7",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "7",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_ERROR_FILE": "/e/error.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "PYTHONBREAKPOINT": "muster.worker.breakpoint",
        "MUSTER_WATCHED": "1",
        "MUSTER_JOB_ID": "job",
        "MUSTER_ATTEMPT_ID": "job-2",
        "OMP_NUM_THREADS": "5",
    }


def test_the_agents_own_ranks_do_not_leak() -> None:
    env = build(RANK="99", TORCHELASTIC_ERROR_FILE="/agent.json", TORCH_NCCL_ASYNC_ERROR_HANDLING="2")
    assert (env["RANK"], env["TORCHELASTIC_ERROR_FILE"]) == ("3", "/e/error.json")
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"


def test_no_error_file_is_an_empty_variable() -> None:
    assert build_worker_env(config(), ROUND, 0, error_file=None)["TORCHELASTIC_ERROR_FILE"] == ""


def test_threads() -> None:
    several = replace(config(), omp_num_threads=6)
    assert build_worker_env(several, ROUND, 0, error_file=None)["OMP_NUM_THREADS"] == "6"
    assert "OMP_NUM_THREADS" not in build("--nproc-per-node 1", 0)


def test_an_agents_store() -> None:
    env = build_worker_env(config(), records.replace(ROUND, use_agent_store=True), 0, error_file=None)
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"


@pytest.mark.parametrize(
    ("environ", "device", "hip"),
    [
        ({}, "1", None),
        ({"CUDA_VISIBLE_DEVICES": "4, 7"}, "7", None),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, "GPU-b", None),
        ({"CUDA_VISIBLE_DEVICES": "4,7", "HIP_VISIBLE_DEVICES": "2,3"}, "3", "3"),
        ({"CUDA_VISIBLE_DEVICES": "4,7", "HIP_VISIBLE_DEVICES": ""}, "7", ""),
    ],
)
def test_a_virtual_local_rank(environ: dict[str, str], device: str, hip: str | None) -> None:
    env = build("--nproc-per-node 2 --virtual-local-rank", **environ)
    assert (env["LOCAL_RANK"], env["RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", "3", device)
    assert env.get("HIP_VISIBLE_DEVICES") == hip


def test_without_it_devices_are_inherited() -> None:
    assert build(CUDA_VISIBLE_DEVICES="4,7")["CUDA_VISIBLE_DEVICES"] == "4,7"
    assert "CUDA_VISIBLE_DEVICES" not in build()


def test_a_virtual_local_rank_without_a_device() -> None:
    lacking = replace(config(), virtual_local_rank=True, base_env={"CUDA_VISIBLE_DEVICES": "4"})
    with pytest.raises(UsageError, match="local rank 1"):
        build_worker_env(lacking, ROUND, 1, error_file=None)


@pytest.mark.parametrize(
    ("kind", "target", "args", "expected"),
    [
        (ProgramKind.SCRIPT, "t${local_rank}.py", ("--r=${local_rank}", "$local_rank"), ("t7.py", "--r=7", "7")),
        (ProgramKind.MODULE, "m", ("$$HOME", "${other}", "$"), ("m", "$HOME", "${other}", "$")),
        (ProgramKind.COMMAND, "c${local_rank}", ("${local_rank}",), ("c${local_rank}", "7")),
    ],
)
def test_macros(kind: ProgramKind, target: str, args: tuple[str, ...], expected: tuple[str, ...]) -> None:
    program = substitute_macros(Program(kind=kind, target=target, args=args), 7)
    assert (program.kind, program.target, *program.args) == (kind, *expected)


@pytest.mark.torch
@pytest.mark.parametrize("text", ["${local_rank}", "a$local_rank.b", "$$", "${x}", "$", "${local_rank", "$localrank"])
def test_macros_match_torchrun(text: str) -> None:
    api: Any = pytest.importorskip("torch.distributed.elastic.utils")
    program = substitute_macros(Program(kind=ProgramKind.SCRIPT, target=text, args=(text,)), 3)
    assert [program.target, *program.args] == api.macros.substitute([text, text], "3")
