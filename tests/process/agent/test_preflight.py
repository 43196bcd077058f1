"""`--preflight` of real agents: findings before the start, a site's own checks, nodes that differ, an all-reduce."""

import os
import re
import socket
import tarfile
from pathlib import Path

import pytest
from harness import AGENT, Outcome, check_all, run_tree, start_nodes
from launchers import MOSTLY_WARM

from muster.agent.features.preflight.reachability import find_obstacle

ALONE = [*AGENT, "--standalone", "--nproc-per-node", "2"]


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("import os\nprint('ran rank', os.environ['RANK'])\n")
    return str(path)


def make_env(**changes: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | changes


def one_line(outcome: Outcome) -> str:
    """The console's text without the breaks of a page."""
    return " ".join(outcome.stderr.split())


@pytest.mark.parametrize("start", MOSTLY_WARM)
def test_seven_of_eight_devices_end_the_job_before_a_worker_starts(
    start: str, program: str, nvml: str, tmp_path: Path
) -> None:
    env = make_env(MUSTER_NVML=nvml, STAND_IN_GPUS=",".join(["0:0:85899345920"] * 8), STAND_IN_LOST="3")
    flags = ["--start", start, "--devices", "8", "--max-restarts", "3", "--log-dir", str(tmp_path / "logs")]
    outcome = run_tree([*ALONE, *flags, program], env=env, cwd=tmp_path)
    assert (outcome.exit_code, outcome.leftovers, outcome.stdout) == (1, (), ""), outcome.explain()
    text = one_line(outcome)
    assert "expected 8 (--devices)" in text
    assert "--preflight off starts" in text, outcome.explain()
    assert "by the preflight)" in text
    assert "devices found : 7 devices" in text
    run_tree([*ALONE, *flags, "--preflight", "off", program], env=env, cwd=tmp_path).check()


# -- a site's own checks -----------------------------------------------------------------------------------------------


def write_check(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "preflight.d"
    folder.mkdir()
    return folder


def run_site(program: str, site: Path, *flags: str) -> Outcome:
    return run_tree([*ALONE, *flags, program], env=make_env(MUSTER_PREFLIGHT_DIR=str(site)), cwd=site.parent)


def test_a_sites_warning_is_printed_and_its_error_ends_the_job(program: str, site: Path) -> None:
    write_check(site, "10-scratch", 'echo "warning: /scratch is nearly full"; echo mode $MUSTER_PREFLIGHT')
    outcome = run_site(program, site).check()
    assert "10-scratch: /scratch is nearly full" in outcome.stderr, outcome.explain()
    assert "mode quick" not in outcome.stderr
    write_check(site, "20-fabric", "echo 'error: port 2 is down'; exit 3")
    outcome = run_site(program, site).check(1)
    assert "20-fabric: port 2 is down" in one_line(outcome), outcome.explain()
    assert not re.search(r"after \d+ of", outcome.stderr), outcome.explain()


def test_a_site_check_that_comes_late_ends_the_attempt(site: Path, tmp_path: Path) -> None:
    """It waits until the worker runs, and fails then: its last line is the reason."""
    write_check(site, "check", f"while ! [ -e {tmp_path}/runs ]; do sleep 0.05; done; echo what it saw; exit 4")
    program = tmp_path / "waits.py"
    program.write_text(f"import time; open({str(tmp_path / 'runs')!r}, 'w').close(); time.sleep(600)\n")
    outcome = run_site(str(program), site, "--start", "cold").check(1)
    assert "4: what it saw" in one_line(outcome), outcome.explain()


# -- several nodes -----------------------------------------------------------------------------------------------------


def test_nodes_with_other_workspaces_end_the_job_with_one_report(tmp_path: Path) -> None:
    envs = []
    for node in range(2):
        folder = tmp_path / str(node)
        folder.mkdir()
        (folder / "train.py").write_text(f"import time; time.sleep(600)  # {node}\n")
        packed = tmp_path / f"{node}.tar.gz"
        with tarfile.open(packed, "w:gz") as bundle:
            bundle.add(folder / "train.py", "train.py")
        envs.append(make_env(MUSTER_WORKSPACE=str(packed), MUSTER_WORKSPACE_DIR=str(folder), MUSTER_TOKEN="ab" * 32))
    with start_nodes(2, "train.py", envs=envs, cwd=tmp_path) as trees:
        outcomes = check_all(trees, 1)
    text = one_line(outcomes[0])
    assert "workspace of node 1 (" in text, outcomes[0].explain()
    assert "that of node 0 (" in text


# -- full --------------------------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("start", [pytest.param("cold", marks=pytest.mark.long), "warm"])
def test_full_measures_an_all_reduce_and_the_program_finds_its_process_untouched(start: str, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        "import os, torch\n"
        "from torch import distributed as dist\n"
        "assert not dist.is_initialized() and 'MUSTER_RUN_FIRST' not in os.environ\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1); dist.all_reduce(total)\n"
        "os.write(1, b'sum %d\\n' % int(total))\n"
        "dist.destroy_process_group()\n"
    )
    outcome = run_tree([*ALONE, "--start", start, "--preflight", "full", str(program)], cwd=tmp_path).check()
    assert outcome.stdout.count("sum 2") == 2
    assert "over gloo, 2 ranks: " in outcome.stderr, outcome.explain()
    assert "Exception" not in outcome.stderr, outcome.explain()


@pytest.mark.long
@pytest.mark.torch
def test_full_says_in_one_line_why_no_all_reduce_could_be_done(program: str, tmp_path: Path) -> None:
    env = make_env(GLOO_SOCKET_IFNAME="none0")
    outcome = run_tree([*ALONE, "--start", "cold", "--preflight", "full", program], env=env, cwd=tmp_path).check(1)
    assert "preflight: no all-reduce " in one_line(outcome), outcome.explain()


def test_the_programs_port_is_left_alone_where_the_host_answers() -> None:
    """A program of rank 0 that counts its peers took the look for one of them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        assert find_obstacle("127.0.0.1", server.getsockname()[1], 5.0) is None
        with pytest.raises(TimeoutError):
            server.accept()
