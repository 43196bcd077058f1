"""What a worker gets when it starts: environment, arguments, interpreter."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Outcome
from launchers import MUSTER, PROGRAMS, SCALED, TORCHRUN, Launcher, read_facts

RunOnce = Callable[..., tuple[Outcome, Path]]
FLAGS = ("--standalone", "--nproc-per-node", "2", "--role", "trainer", "--max-restarts", "3")
PROGRAM = ("conf_facts.py", "--rank=${local_rank}", "$$x", "--nnodes", "7", "a b")


def facts_of(run_once: RunOnce, launcher: Launcher, *flags: str, **env: str) -> list[dict[str, Any]]:
    outcome, _ = run_once(launcher.name, flags or FLAGS, PROGRAM, **env)
    assert outcome.exit_code == 0, outcome.explain()
    return read_facts(outcome.stdout)


def test_ranks_and_sizes(run_once: RunOnce, launcher: Launcher) -> None:
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")  # fmt: skip
    found = ["/".join(facts["env"][name] for name in names) for facts in facts_of(run_once, launcher)]
    assert found == ["0/0/0/0/2/2/1/2/trainer/0/3", "1/1/0/1/2/2/1/2/trainer/0/3"]


def test_the_workers_agree_on_an_address_and_an_id(run_once: RunOnce, launcher: Launcher) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        first, second = (facts["env"][name] for facts in facts_of(run_once, launcher))
        assert first == second
        assert first


def test_each_worker_has_its_own_error_file(run_once: RunOnce, launcher: Launcher) -> None:
    for rank, facts in enumerate(facts_of(run_once, launcher)):
        path = Path(facts["env"]["TORCHELASTIC_ERROR_FILE"])
        assert path.parts[-3:] == ("attempt_0", str(rank), "error.json")


@pytest.mark.long  # torchrun itself runs
def test_no_variable_of_torchruns_is_missing_and_seven_are_added(run_once: RunOnce) -> None:
    names = {}
    for name in (TORCHRUN, MUSTER):
        outcome, _ = run_once(name, FLAGS, PROGRAM)
        names[name] = set(read_facts(outcome.stdout)[0]["env"])
    # The first comes from the import of torch in torchrun itself.
    assert names[TORCHRUN] - names[MUSTER] <= {"TORCHINDUCTOR_CACHE_DIR"}
    # Where `muster.worker` finds its slot, what `breakpoint()` calls, that the agent watches for hangs, and the
    # ids of the job and of the attempt.
    ours = {"MUSTER_FEATURES", "MUSTER_STATUS_PAGE", "MUSTER_WATCHED", "PYTHONBREAKPOINT"}
    ours |= {"MUSTER_JOB_ID", "MUSTER_ATTEMPT_ID"}
    # Of global rank 0 alone: where a Trainer tells its progress.
    trainer = {"KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN"}
    assert names[MUSTER] - names[TORCHRUN] == ours | trainer | {*SCALED}


def test_macros_and_arguments(run_once: RunOnce, launcher: Launcher) -> None:
    for rank, facts in enumerate(facts_of(run_once, launcher)):
        assert facts["argv"] == [str(PROGRAMS / "conf_facts.py"), f"--rank={rank}", "$x", "--nnodes", "7", "a b"]


def test_a_script_runs_as_python_runs_it(run_once: RunOnce, launcher: Launcher) -> None:
    for facts in facts_of(run_once, launcher):
        assert facts["name"] == "__main__"
        assert facts["file"] == str(PROGRAMS / "conf_facts.py")
        assert facts["path0"] == str(PROGRAMS)
        assert facts["unbuffered"]


@pytest.mark.fault("#22260", "OMP_NUM_THREADS is always 1, however many cores there are", recorded=True)
def test_threads_are_a_share_of_the_cores(run_once: RunOnce, launcher: Launcher) -> None:
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert {facts["env"]["OMP_NUM_THREADS"] for facts in facts_of(run_once, launcher)} == {str(share)}


def test_variables_replace_flags_and_flags_override_them(run_once: RunOnce, launcher: Launcher) -> None:
    env = {"PET_NPROC_PER_NODE": "2", "PET_ROLE": "a", "PET_STANDALONE": "1", "PET_MAX_RESTARTS": "2"}
    facts = facts_of(run_once, launcher, "--rol", "b", "--virtual_local_rank", OMP_NUM_THREADS="5",
        CUDA_VISIBLE_DEVICES="4,7", TORCH_NCCL_ASYNC_ERROR_HANDLING="2", **env)  # fmt: skip
    assert [f["env"]["ROLE_NAME"] for f in facts] == ["b", "b"]
    assert [f["env"]["TORCHELASTIC_MAX_RESTARTS"] for f in facts] == ["2", "2"]
    assert [f["env"]["OMP_NUM_THREADS"] for f in facts] == ["5", "5"]
    assert [f["env"]["TORCH_NCCL_ASYNC_ERROR_HANDLING"] for f in facts] == ["2", "2"]
    assert [f["env"]["PET_ROLE"] for f in facts] == ["a", "a"]
    # --virtual-local-rank
    assert [f["env"]["LOCAL_RANK"] for f in facts] == ["0", "0"]
    assert [f["env"]["RANK"] for f in facts] == ["0", "1"]
    assert [f["env"]["CUDA_VISIBLE_DEVICES"] for f in facts] == ["4", "7"]


def test_one_worker_per_core(launcher: Launcher) -> None:
    outcome = launcher.run(["--nproc-per-node", "cpu"], ["conf_facts.py"]).check()
    assert len(read_facts(outcome.stdout)) == len(os.sched_getaffinity(0))


def test_a_static_address_is_used_unchanged(launcher: Launcher, free_port: int) -> None:
    flags = ["--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port)]
    outcome = launcher.run([*flags, "--rdzv-id", "my-id", "--rdzv-conf", "timeout=30"], ["conf_facts.py"]).check()
    [facts] = read_facts(outcome.stdout)
    assert (facts["env"]["MASTER_ADDR"], facts["env"]["MASTER_PORT"]) == ("127.0.0.1", str(free_port))
    assert facts["env"]["TORCHELASTIC_RUN_ID"] == "my-id"


def test_c10d_with_an_endpoint_and_torchs_keys(launcher: Launcher, free_port: int) -> None:
    conf = "join_timeout=60,last_call_timeout=1,close_timeout=9,heartbeat_timeout=5,keep_alive_interval=2,"
    conf += "keep_alive_max_attempt=3,read_timeout=30,is_host=1,store_type=tcp"
    endpoint = ["--rdzv-backend=c10d", f"--rdzv_endpoint=localhost:{free_port}", "--rdzv-id", "job"]
    outcome = launcher.run([*endpoint, "--rdzv_conf", conf, "--local-addr", "127.0.0.1"], ["conf_facts.py"]).check()
    [facts] = read_facts(outcome.stdout)
    assert facts["env"]["MASTER_ADDR"] == "127.0.0.1"
    assert facts["env"]["TORCHELASTIC_RUN_ID"] == "job"
