"""The same commands with both versions of TorchX: run, status, log, cancel, each from a new shell."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torchx


@pytest.fixture
def torchx(cluster, tmp_path):
    def run(*args, code=0):
        done = subprocess.run(
            [sys.executable, "-m", "torchx.cli.main", *args],
            cwd=tmp_path / "work",
            env={**os.environ, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "main.py").write_text("print('hello')\n")
    return run


def test_a_job_by_the_command_line_alone(cluster, torchx):
    shown = torchx("run", "-s", "kubernetes", "dist.ddp", "-j", "2x1", "--script", "main.py").stdout
    handle = next(word for word in shown.split() if word.startswith("kubernetes://"))
    name = handle.rpartition(":")[2]
    assert len(cluster.find("configmaps")) == 1, "the agent"
    assert len(cluster.find("secrets")) == 2, "tokens and the workspace"
    for index in range(2):
        cluster.start_pod(cluster.find_pod(name, index))
        cluster.write_log(cluster.find_pod(name, index), f"node {index}\n", 1)
    assert "RUNNING" in torchx("status", handle).stdout
    assert "node 1" in torchx("log", f"{handle}/main/1").stdout
    reason = "rank 1 on node 1 (h) exited with code 1 (KeyError: 'lr'); no restarts are allowed"
    report = {"reason": reason, "failures": [{"host": "h", "global_rank": 1, "exception": "KeyError: 'lr'"}]}
    cluster.end_pod(cluster.find_pod(name, 0), 1, json.dumps(report))  # FailJob: the controller deletes the other pod
    status = torchx("status", handle).stdout
    assert "FAILED" in status
    assert "KeyError: 'lr'" in status


def test_a_job_that_is_cancelled(cluster, torchx):
    shown = torchx("run", "-s", "kubernetes", "dist.ddp", "-j", "1:2x1", "--script", "main.py").stdout
    handle = next(word for word in shown.split() if word.startswith("kubernetes://"))
    torchx("cancel", handle)
    assert "CANCELLED" in torchx("status", handle).stdout


def test_a_wrong_option_is_one_line(cluster, torchx):
    done = torchx("run", "-s", "kubernetes", "-cfg", "flavor=jobs", "dist.ddp", "--script", "main.py", code=1)
    assert "flavor='jobs' is not one of job, jobset, volcano" in done.stderr
    assert "Traceback" not in done.stderr
