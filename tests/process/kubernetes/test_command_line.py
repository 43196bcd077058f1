"""`torchx` and `muster` as processes: one whole job of each, and signals. All else is in `tests/unit/kubernetes`."""

import os
import re
import signal
import subprocess
import sys

import pytest
from doubles.kubernetes_kubelet import run_kubelet
from harness import LIMIT_S, wait_until

RUN = ("run", "-s", "kubernetes")
JOB = ("dist.ddp", "--script", "main.py", "-j")


@pytest.fixture
def begin(cluster, tmp_path):
    """Starts `torchx` or `muster` in a folder that has `main.py`."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "main.py").write_text("print('hello')\n")

    def start(program, *args):
        module = "torchx.cli.main" if program == "torchx" else "muster"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = {**os.environ, "HOME": str(tmp_path)}
        return subprocess.Popen([sys.executable, "-m", module, *args], cwd=tmp_path / "work", env=environment, **pipes)

    return start


@pytest.fixture
def call(begin):
    """Runs one until its end; returns its standard output, of a failed one the error, too."""

    def run(*words, code=0):
        with begin(*words) as process:
            output, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == code, output + errors
        assert "Traceback" not in errors
        return output if code == 0 else output + errors

    return run


@pytest.mark.torchx
def test_a_job_by_torchx(cluster, call):
    assert "kind: Job" in call("torchx", *RUN, "--dryrun", *JOB, "2x1")
    assert cluster.find("jobs") == []
    handle = next(word for word in call("torchx", *RUN, *JOB, "2x1").split() if word.startswith("kubernetes://"))
    name = handle.rpartition(":")[2]
    assert len(cluster.find("configmaps")) == 1, "the agent"
    assert len(cluster.find("secrets")) == 2, "tokens and the workspace"
    for index in range(2):
        cluster.start_pod(cluster.find_pod(name, index))
    assert "RUNNING" in call("torchx", "status", handle)
    call("torchx", "cancel", handle)
    [job] = cluster.find("jobs")
    assert job["spec"]["activeDeadlineSeconds"] == 1
    assert cluster.find("pods") == []


BOOM = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("about to raise", file=sys.stderr)
    raise ValueError("boom")
time.sleep(60)
"""


def test_a_job_by_muster(cluster, begin, call, tmp_path):
    """The first pod that ends fails the Job, and the controller deletes the other one with its output."""
    (tmp_path / "work" / "main.py").write_text(BOOM)
    with run_kubelet(cluster, tmp_path / "pods"), begin("muster", *RUN, "--wait", *JOB, "2x1") as waiting:
        name = waiting.stdout.readline().strip().rpartition(":")[2]
        _, errors = waiting.communicate(timeout=LIMIT_S)
    assert waiting.returncode == 1, errors
    assert "JOB FAILED  " in errors, errors
    found = call("muster", "log", "--failed")
    assert "about to raise\n" in found
    assert "ValueError: boom" in found
    call("muster", "delete", name)
    assert [key for key in cluster.objects if key[2] != "events"] == []


@pytest.mark.torchx
def test_ctrl_c_prints_no_traceback_and_that_the_job_goes_on(begin):
    with begin("torchx", *RUN, "--wait", *JOB, "1x1") as waiting:
        said = [next(line for line in waiting.stderr if "Waiting for the app to finish" in line)]
        waiting.send_signal(signal.SIGINT)
        said.append(waiting.communicate(timeout=LIMIT_S)[1])
    assert waiting.returncode == -signal.SIGINT, "as shells expect it"
    assert "Traceback" not in "".join(said)
    line = next(line for line in "".join(said).splitlines() if "the job goes on" in line)
    assert re.search(r"`muster log -f (\S+:\S+)` .*, `torchx cancel kubernetes://torchx/\1` ", line), line


@pytest.mark.torchx
def test_a_submission_that_sigterm_ends_leaves_nothing(cluster, double, begin):
    """Only Ctrl-C took back what was created before."""
    often = 10**6
    refused = double.Fault("POST", r"/jobs\?(?!.*dryRun)", 503, times=often)
    cluster.faults.append(refused)
    with begin("torchx", *RUN, *JOB, "1x1") as submitting:
        try:
            wait_until(lambda: refused.times < often)  # on a busy machine TorchX alone takes a while
            assert {"secrets", "configmaps", "services"} <= {plural for _, _, plural, _ in cluster.objects}
            submitting.send_signal(signal.SIGTERM)
            _, said = submitting.communicate(timeout=LIMIT_S)
        finally:
            submitting.kill()
    assert submitting.returncode == -signal.SIGTERM, said
    assert "Traceback" not in said
    assert [plural for _, _, plural, _ in cluster.objects if plural != "events"] == []
