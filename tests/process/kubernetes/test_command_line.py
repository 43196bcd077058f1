"""The same commands with both versions of TorchX: run, status, log, cancel, each from a new shell."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from doubles.kubernetes_kubelet import run_kubelet
from doubles.samples import write_report
from harness import wait_until

pytestmark = pytest.mark.torchx

HAS_DELETE = importlib.util.find_spec("torchx.cli.cmd_delete") is not None
"""The nightly has it."""


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
        assert code is None or done.returncode == code, done.stdout + done.stderr
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
    report = write_report(reason, {"global_rank": 1, "exception": "KeyError: 'lr'"})
    cluster.end_pod(cluster.find_pod(name, 0), 1, report)  # FailJob: the controller deletes the other pod
    status = torchx("status", handle).stdout
    assert "FAILED" in status
    assert "KeyError: 'lr'" in status


def test_a_job_that_is_cancelled(cluster, torchx):
    shown = torchx("run", "-s", "kubernetes", "dist.ddp", "-j", "1:2x1", "--script", "main.py").stdout
    handle = next(word for word in shown.split() if word.startswith("kubernetes://"))
    torchx("cancel", handle)
    assert "CANCELLED" in torchx("status", handle).stdout


def test_ctrl_c_prints_no_traceback_and_that_the_job_goes_on(run_and_wait):
    with run_and_wait() as (waiting, said):
        waiting.send_signal(signal.SIGINT)
        said.append(waiting.communicate(timeout=90)[1])
    assert waiting.returncode == -signal.SIGINT, "as shells expect it"
    assert "Traceback" not in "".join(said)
    line = next(line for line in "".join(said).splitlines() if "the job goes on" in line)
    assert re.search(r"`muster log -f (\S+:\S+)` .*, `torchx cancel kubernetes://torchx/\1` ends it$", line), line


def wait_with_an_unscheduled_pod(cluster, process, prefix):
    """Check the lines of a command that waits for one pod, which nodes have no room for, and which then runs."""
    try:
        [pod] = cluster.find("pods")
        message = "0/2 nodes are available: 2 Insufficient cpu."
        unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        cluster.change_pod(pod, phase="Pending", conditions=[unscheduled])
        line = next(line for line in process.stderr if " PENDING: " in line)
        assert re.search(rf"{prefix}team:main-\w+ PENDING: 1 of 1 pod waits: Insufficient cpu \(2 of 2 nodes\)", line)
        cluster.start_pod(pod)
        line = process.stderr.readline()
        assert re.search(rf"{prefix}team:main-\w+ RUNNING: 1 of 1 node runs", line)
        cluster.end_pod(pod, 0)
        rest = process.stderr.read()
    finally:
        process.kill()
    assert "PENDING" not in rest
    assert "SUCCEEDED" in rest


def test_a_job_that_is_awaited_says_why_its_pods_wait(cluster, run_and_wait):
    """Nothing was printed until the pods ran, however long that took."""
    with run_and_wait() as (waiting, _):
        wait_with_an_unscheduled_pod(cluster, waiting, " INFO     ")


def test_muster_run_says_why_the_pods_of_a_job_wait(cluster, torchx, tmp_path):
    command = [sys.executable, "-m", "muster", "run", "-s", "kubernetes", "--wait"]
    command += ["dist.ddp", "-j", "1x1", "--script", "main.py"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=tmp_path / "work", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as waiting:
        assert waiting.stdout.readline().startswith("kubernetes://")
        wait_until(lambda: cluster.count("GET", "/pods"), timeout_s=30, what="it waits")
        wait_with_an_unscheduled_pod(cluster, waiting, "^muster: ")


def test_a_job_that_somebody_deletes_while_it_is_awaited_is_no_traceback(cluster, run_and_wait):
    """It ended with "RuntimeError: unknown status, wait returned None"."""
    with run_and_wait() as (waiting, said):
        [job] = cluster.find("jobs")
        with cluster.lock:
            cluster.delete_object(("/apis/batch/v1", "team", "jobs", job["metadata"]["name"]))
        said.append(waiting.communicate(timeout=90)[1])
    assert waiting.returncode == 1, said
    assert "Traceback" not in "".join(said)
    name = job["metadata"]["labels"]["app.kubernetes.io/instance"]
    told = f"msg: 'team:{name} no longer exists: its Job was deleted, or removed after its ttl_s' num_restarts: "
    assert told in " ".join("".join(said).split()), said


def test_a_submission_that_sigterm_ends_leaves_nothing(cluster, double, tmp_path):
    """Only Ctrl-C took back what was created before."""
    (tmp_path / "main.py").touch()
    often = 10**6
    refused = double.Fault("POST", r"/jobs\?(?!.*dryRun)", 503, times=often)
    cluster.faults.append(refused)
    command = [sys.executable, "-m", "torchx.cli.main", "run", "-s", "kubernetes", "dist.ddp", "-j", "1x1"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    with subprocess.Popen(
        [*command, "--script", "main.py"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as submitting:
        try:
            wait_until(lambda: refused.times < often, timeout_s=100)  # on a busy machine TorchX alone takes a while
            assert {"secrets", "configmaps", "services"} <= {plural for _, _, plural, _ in cluster.objects}
            submitting.send_signal(signal.SIGTERM)
            _, said = submitting.communicate(timeout=90)
        finally:
            submitting.kill()
    assert submitting.returncode == -signal.SIGTERM, said
    assert "Traceback" not in said
    assert [plural for _, _, plural, _ in cluster.objects if plural != "events"] == []


def test_a_wrong_option_is_one_line(cluster, torchx):
    done = torchx("run", "-s", "kubernetes", "-cfg", "flavor=jobs", "dist.ddp", "--script", "main.py", code=1)
    assert "flavor='jobs' is not one of job, jobset" in done.stderr
    assert "Traceback" not in done.stderr


def start(torchx, *words):
    shown = torchx("run", "-s", "kubernetes", *words, "dist.ddp", "-j", "1x1", "--script", "main.py").stdout
    return next(word for word in shown.split() if word.startswith("kubernetes://"))


def test_list_and_delete(cluster, torchx):
    handles = [start(torchx), start(torchx), start(torchx, "-cfg", "namespace=blue")]
    names = [handle.rpartition(":")[2] for handle in handles]
    cluster.start_pod(cluster.find_pod(names[0], 0))
    torchx("cancel", handles[1])
    lines = torchx("list", "-s", "kubernetes").stdout.splitlines()
    rows = [line.split() for line in lines if "kubernetes://" in line]
    assert {row[0]: row[-1] for row in rows} == {handles[0]: "RUNNING", handles[1]: "CANCELLED"}
    delete = [sys.executable, "-m", "muster", "delete"]
    if HAS_DELETE:  # 0.7's `list` takes no options
        lines = torchx("list", "-s", "kubernetes", "-cfg", "namespace=blue").stdout.splitlines()
        assert [line.split()[0] for line in lines if "kubernetes://" in line] == handles[2:]
        torchx("delete", handles[2])
    else:
        subprocess.run([*delete, handles[2]], timeout=90, check=True)
    done = subprocess.run([*delete, handles[1]], capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    left = {name for _, _, plural, name in cluster.objects if plural != "events"}
    assert [name for name in names if any(name in each for each in left)] == names[:1]
    assert "RUNNING" in torchx("status", handles[0]).stdout


def test_list_of_nothing(torchx):
    assert "kubernetes://" not in torchx("list", "-s", "kubernetes").stdout


OTHERS = [("log", "/main/0"), ("cancel", ""), ("describe", ""), *([("delete", "")] if HAS_DELETE else [])]
COMMANDS = [("status", ""), *(pytest.param(*each, marks=pytest.mark.long) for each in OTHERS)]
ALL_COMMANDS = [*COMMANDS, ("list -s kubernetes", None)]


def about_unknown(command, rest):
    return [*command.split(), *([] if rest is None else [f"kubernetes://torchx/team:nope{rest}"])]


@pytest.mark.parametrize(("command", "rest"), COMMANDS)
def test_an_unknown_app_is_one_line(torchx, command, rest):
    done = torchx(command, f"kubernetes://torchx/team:nope{rest}", code=None)
    assert "Traceback" not in done.stdout + done.stderr
    assert "nope" in done.stdout + done.stderr
    if command not in ("status", "describe"):  # TorchX has its own line of these
        assert "there is no job 'nope' in namespace 'team' of context 'double' of " in done.stdout + done.stderr


@pytest.mark.parametrize(("command", "rest"), ALL_COMMANDS)
def test_a_forbidden_server_is_one_line(cluster, torchx, command, rest):
    cluster.allowed = {}
    done = torchx(*about_unknown(command, rest), code=None)
    assert "Traceback" not in done.stdout + done.stderr
    assert "is not allowed to list jobs" in done.stdout + done.stderr


@pytest.mark.parametrize(("command", "rest"), ALL_COMMANDS)
def test_an_unreachable_server_is_one_line_and_not_for_ever(torchx, tmp_path, command, rest):
    config = json.loads((tmp_path / "kubeconfig").read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    done = torchx(*about_unknown(command, rest), code=None)
    assert "Traceback" not in done.stdout + done.stderr
    assert "cannot be reached" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("rest", "message"),
    [pytest.param("other/0", "has no role", marks=pytest.mark.long), ("main/7", "has replicas 0 to 1, not 7")],
)
def test_the_log_of_what_does_not_exist_is_one_line(cluster, torchx, rest, message):
    shown = torchx("run", "-s", "kubernetes", "dist.ddp", "-j", "2x1", "--script", "main.py").stdout
    handle = next(word for word in shown.split() if word.startswith("kubernetes://"))
    done = torchx("log", f"{handle}/{rest}", code=None)
    assert "Traceback" not in done.stdout + done.stderr
    assert message in done.stdout + done.stderr or "is not one of the roles" in done.stdout + done.stderr


@pytest.fixture
def muster(cluster, torchx, tmp_path):
    def run(*args, code=0):
        done = subprocess.run(
            [sys.executable, "-m", "muster", *args],
            cwd=tmp_path / "work",
            env={**os.environ, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")},
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == code, done
        assert "Traceback" not in done.stderr, done
        return done

    return run


def test_a_job_by_muster_alone(cluster, muster):
    """Without --wait or --log `muster run` returns, as `torchx run` does; the handle alone is on standard output."""
    done = muster("run", "-s", "kubernetes", "dist.ddp", "-j", "2x1", "--script", "main.py")
    handle = done.stdout.strip()
    assert (handle.startswith("kubernetes://"), done.stdout.count("\n")) == (True, 1), done
    assert "muster: PENDING" in done.stderr
    name = handle.rpartition(":")[2]
    for index in range(2):
        cluster.start_pod(cluster.find_pod(name, index))
        cluster.write_log(cluster.find_pod(name, index), f"[main0|n{index}.r{index}]:node {index}\n", 1)
    assert muster("status", code=10).stdout.startswith(f"kubernetes://torchx/team:{name}  RUNNING: 2 of 2 nodes run")
    lines = muster("list", "-s", "kubernetes").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [f"kubernetes://torchx/team:{name}"]
    assert muster("log").stdout == "main/0 [main0|n0.r0]:node 0\nmain/1 [main0|n1.r1]:node 1\n"
    one = muster("log", handle, "--rank", "1")
    assert one.stdout == "node 1\n"
    assert "the files of rank 1 are gone or out of reach" in one.stderr, "no command runs in pods of the model"
    report = write_report("rank 0 on node 0 (h) exited with code 1", {"global_rank": 0, "exception": "KeyError: 'lr'"})
    cluster.end_pod(cluster.find_pod(name, 0), 1, report)  # FailJob: the controller deletes the other pod
    assert "KeyError: 'lr'" in muster("status", code=1).stdout
    assert muster("log", "--failed").stdout == "node 0\n"


@pytest.fixture
def start_muster(cluster, torchx, tmp_path):
    """Starts `muster run` of a job; gives the process, and the job's name."""

    @contextmanager
    def start(*words):
        with subprocess.Popen(
            [sys.executable, "-m", "muster", "run", "-s", "kubernetes", *words, "--script", "main.py"],
            cwd=tmp_path / "work",
            env={**os.environ, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as waiting:
            yield waiting, waiting.stdout.readline().strip().rpartition(":")[2]

    return start


def test_a_job_that_muster_run_waits_for(cluster, start_muster):
    with start_muster("--log", "dist.ddp", "-j", "1x1") as (waiting, name):
        cluster.start_pod(cluster.find_pod(name, 0))
        cluster.write_log(cluster.find_pod(name, 0), "[main0]:trained\n", 1)
        cluster.end_pod(cluster.find_pod(name, 0), 0)
        _, errors = waiting.communicate(timeout=90)
    assert waiting.returncode == 0, errors
    assert "main/0 [main0]:trained\n" in errors
    assert errors.splitlines()[-1].startswith(f"muster: team:{name} SUCCEEDED: ended at "), errors


PAGE = f"{'=' * 70}\nJOB FAILED  x: rank 0 failed\nRoot cause\n{'=' * 70}\n[muster] failed after 3 s\n"


@pytest.mark.parametrize("failed", [0, 1])
def test_a_job_that_fails_while_muster_run_waits_without_its_lines(cluster, start_muster, failed):
    """It ended with one line. The pod of node 0, whose output has the report, may be deleted with the job's end."""
    with start_muster("--wait", "dist.ddp", "-j", "2x1") as (waiting, name):
        for index in range(2):
            cluster.start_pod(cluster.find_pod(name, index))
        cluster.write_log(cluster.find_pod(name, 0), f"[main0|n0.r0]:trains\n{PAGE}", 1)
        failure = {"global_rank": 0, "exception": "KeyError: 'lr'", "stderr_tail": ["loads", "KeyError: 'lr'"]}
        report = write_report("rank 0 on node 0 (h) exited with code 1", failure)
        cluster.end_pod(cluster.find_pod(name, failed), 1, report)  # FailJob: the controller deletes the other pod
        _, errors = waiting.communicate(timeout=90)
    assert waiting.returncode == 1, errors
    assert "main/0" not in errors, "the lines are not asked for"
    commands = f"`muster log team:{name}` prints them, `muster log --failed team:{name}` those of the root cause"
    assert f"muster: the job's lines were not shown: {commands}\n" in errors
    if failed == 0:
        assert errors.endswith(PAGE), errors
        return
    *_, why, first, second, last = errors.splitlines()
    assert why.endswith("not in the output of node 0; it has these lines of rank 0, the root cause"), errors
    assert (first, second) == ("loads", "KeyError: 'lr'")
    assert last.startswith(f"muster: team:{name} FAILED: rank 0 on node 0 (h) exited with code 1"), errors


BOOM = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("about to raise", file=sys.stderr)
    raise ValueError("boom")
time.sleep(60)
"""


def test_a_job_of_which_pods_are_gone(cluster, muster, start_muster, tmp_path):
    """The first pod that ends fails the Job, and the controller deletes the other one with its output."""
    (tmp_path / "work" / "main.py").write_text(BOOM)
    with run_kubelet(cluster, tmp_path / "pods"), start_muster("--wait", "dist.ddp", "-j", "2x1") as (waiting, name):
        _, errors = waiting.communicate(timeout=90)
    assert waiting.returncode == 1, errors
    assert "JOB FAILED  " in errors, errors
    found = muster("log", "--failed")
    assert "about to raise\n" in found.stdout, found
    assert "ValueError: boom" in found.stdout, found
    assert "--tee" not in found.stderr
    assert muster("log", "--rank", "7", code=1).stderr == "muster: there is no rank 7; there are ranks 0-1\n"
    assert "How it ended and what it printed" in muster("events", code=1).stderr
    with cluster.lock:
        for job in list(cluster.find("jobs")):
            cluster.delete_object(("/apis/batch/v1", "team", "jobs", job["metadata"]["name"]))
    assert f"team:{name}, the last job" in muster("status", name, code=3).stderr


def test_the_records_of_a_job_that_runs_and_that_cannot_be_read(cluster, muster):
    """It said where to see how it ended."""
    name = muster("run", "-s", "kubernetes", "dist.ddp", "-j", "1x1", "--script", "main.py").stdout.rpartition(":")[2]
    cluster.start_pod(cluster.find_pod(name.strip(), 0))
    for command in ("events", "timeline"):
        said = muster(command, code=1).stderr
        assert "How it is doing and what it prints is in `muster status` and `muster log`" in said


def test_a_cluster_that_is_not_reachable_is_named(torchx, muster, tmp_path):
    config = json.loads((tmp_path / "kubeconfig").read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    done = muster("list", "-s", "local_cwd", "-s", "kubernetes", code=6)
    assert done.stdout == "no jobs\n"
    assert done.stderr.startswith("muster: kubernetes is not reachable: "), done
    assert "cannot be reached" in muster("status", "kubernetes://torchx/team:nope", code=6).stderr
