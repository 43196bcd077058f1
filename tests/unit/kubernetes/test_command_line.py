"""`torchx` and `muster`, called in this process, on the model of the API server."""

import _thread
import importlib.util
import logging
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from doubles.kubernetes_memory import start_again
from doubles.samples import write_report
from harness import wait_until

from muster.cli.commands import main as run_muster

HAS_DELETE = importlib.util.find_spec("torchx.cli.cmd_delete") is not None
"""The nightly has it."""
JOB = ("dist.ddp", "--script", "main.py", "-j")


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def call(cluster, tmp_path, monkeypatch, capsys, caplog):
    """Runs `torchx` or `muster` as its process would; returns a `Done`."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "main.py").write_text("print('hello')\n")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(
        "torchx.runner.api.time", SimpleNamespace(sleep=lambda _seconds: time.sleep(0.01), time=time.time)
    )
    monkeypatch.setattr("muster.schedulers.adapter.waiting_line._SPACING_S", 0.0)
    monkeypatch.setattr("muster.schedulers.adapter.scheduler._LOOK_S", 0.01)
    for name in ("excepthook", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    caplog.set_level(logging.INFO)
    kept = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)}

    def run(program, *args, code=0):
        capsys.readouterr()
        caplog.clear()
        ended = run_torchx(args) if program == "torchx" else run_muster(args)
        told = capsys.readouterr()
        records = caplog.records if program == "torchx" else ()
        logged = [f"{each.getMessage()}\n" for each in records if not each.name.startswith("torchx-event")]
        done = Done(ended, told.out, told.err + "".join(logged))
        assert "Traceback" not in done.stdout + done.stderr
        assert code is None or done.code == code, done
        return done

    yield run
    for signum, handler in kept.items():
        signal.signal(signum, handler)


def run_torchx(args):
    from torchx.cli import argparse_util
    from torchx.cli.main import main

    for each in (argparse_util.ArgOnceAction, argparse_util.torchxconfig):
        getattr(each, "called_args", set()).clear()  # 0.7's know of the commands before
    try:
        main(list(args))
    except SystemExit as end:
        return end.code or 0
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def start(call, *words, nodes="1x1"):
    """Returns the handle, and the name."""
    shown = call("torchx", "run", "-s", "kubernetes", *words, *JOB, nodes).stdout
    handle = next(word for word in shown.split() if word.startswith("kubernetes://"))
    return handle, handle.rpartition(":")[2]


@pytest.fixture
def later():
    """Does something in a thread, beside a command that waits."""
    threads = []

    def begin(act):
        def run():
            try:
                act()
            except BaseException:
                _thread.interrupt_main()  # the command would wait for ever
                raise

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield begin
    for each in threads:
        each.join(60)


def find_job(cluster):
    wait_until(lambda: cluster.find("pods"), what="the job has pods")
    wait_for_looks(cluster)
    [job] = cluster.find("jobs")
    return job["metadata"]["name"]


@pytest.mark.parametrize("words", [("torchx", "run"), ("muster", "run")])
def test_a_job_that_is_awaited_says_why_its_pods_wait(cluster, call, later, words):
    """Nothing was printed until the pods ran, however long that took."""

    def act():
        find_job(cluster)
        [pod] = cluster.find("pods")
        message = "0/2 nodes are available: 2 Insufficient cpu."
        unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        for changes in ({"phase": "Pending", "conditions": [unscheduled]}, {"phase": "Running"}):
            cluster.change_pod(pod, **changes)
            wait_for_looks(cluster)
        cluster.end_pod(pod, 0)

    later(act)
    said = call(*words, "-s", "kubernetes", "--wait", *JOB, "1x1").stderr
    said = said[said.index("Insufficient cpu") - 80 :]
    waits = re.search(r"team:main-\w+ PENDING: 1 of 1 pod waits: Insufficient cpu \(2 of 2 nodes\)", said)
    runs = re.search(r"team:main-\w+ RUNNING: 1 of 1 node runs", said)
    assert waits.start() < runs.start() < said.index("SUCCEEDED")


def wait_for_looks(cluster):
    """The command has seen what there is now."""
    seen = cluster.count("GET", "/jobs")
    wait_until(lambda: cluster.count("GET", "/jobs") > seen + 2)


def test_a_job_that_is_deleted_while_it_is_awaited_is_no_traceback(cluster, call, later):
    """It ended with "RuntimeError: unknown status, wait returned None"."""

    def act():
        cluster.delete_object(("/apis/batch/v1", "team", "jobs", find_job(cluster)))

    later(act)
    done = call("torchx", "run", "-s", "kubernetes", "--wait", *JOB, "1x1", code=1)
    said = " ".join((done.stdout + done.stderr).split())
    assert re.search("'team:main-[a-z0-9]+ no longer .* ttl_s'", said)


def test_a_wait_lasts_through_a_restart_of_the_server(cluster, call, later, monkeypatch):
    monkeypatch.setattr("muster.schedulers.kubernetes.api.client._TELL_AFTER_S", 0.0)

    def act():
        find_job(cluster)
        cluster.server.stop()
        wait_until(lambda: cluster.server.refused >= 2)
        [pod] = cluster.find("pods")
        cluster.start_pod(pod)
        cluster.end_pod(pod, 0)
        start_again(cluster, forbids=3, fails=3)

    later(act)
    said = call("torchx", "run", "-s", "kubernetes", "--wait", *JOB, "1x1").stderr
    assert said.count(f"server {cluster.url} does not") == 1
    assert "again for 150 s" in said
    assert "SUCCEEDED" in said


def test_a_job_that_muster_run_waits_for(cluster, call, later):
    def act():
        find_job(cluster)
        [pod] = cluster.find("pods")
        cluster.start_pod(pod)
        wait_until(lambda: cluster.count("GET", "/log?"), what="its log is followed")
        cluster.write_log(pod, "[main0]:trained\n", 1)
        cluster.end_pod(pod, 0)

    later(act)
    done = call("muster", "run", "-s", "kubernetes", "--log", *JOB, "1x1")
    assert done.stdout.count("\n") == 1, "the handle alone"
    assert "main/0 [main0]:trained\n" in done.stderr
    assert " SUCCEEDED: ended at " in done.stderr.splitlines()[-1]


PAGE = f"{'=' * 70}\nJOB FAILED  x: rank 0 failed\nRoot cause\n{'=' * 70}\n[muster] failed after 3 s\n"


@pytest.mark.parametrize("failed", [0, 1])
def test_a_job_that_fails_while_muster_run_waits_without_its_lines(cluster, call, later, failed):
    """It ended with one line. The pod of node 0, whose output has the report, may be deleted with the job's end."""

    def act():
        name = find_job(cluster)
        for index in range(2):
            cluster.start_pod(cluster.find_pod(name, index))
        cluster.write_log(cluster.find_pod(name, 0), f"[main0|n0.r0]:trains\n{PAGE}", 1)
        failure = {"global_rank": 0, "exception": "KeyError: 'lr'", "stderr_tail": ["loads", "KeyError: 'lr'"]}
        report = write_report("rank 0 on node 0 (h) exited with code 1", failure)
        cluster.end_pod(cluster.find_pod(name, failed), 1, report)  # FailJob: the controller deletes the other pod

    later(act)
    errors = call("muster", "run", "-s", "kubernetes", "--wait", *JOB, "2x1", code=1).stderr
    assert "main/0" not in errors, "the lines are not asked for"
    assert re.search("log team:main-.*--failed team:main-", errors)
    if failed == 0:
        assert PAGE in errors
        return
    *_, why, first, second, last = errors.splitlines()
    assert "lines of rank 0" in why, errors
    assert (first, second) == ("loads", "KeyError: 'lr'")
    assert "node 0 (h) exited" in last


def test_a_job_by_muster_alone(cluster, call):
    """Without --wait or --log `muster run` returns, as `torchx run` does; the handle alone is on standard output."""
    done = call("muster", "run", "-s", "kubernetes", *JOB, "2x1")
    handle = done.stdout.strip()
    assert (handle.startswith("kubernetes://"), done.stdout.count("\n")) == (True, 1), done
    assert "muster: PENDING" in done.stderr
    name = handle.rpartition(":")[2]
    for index in range(2):
        cluster.start_pod(cluster.find_pod(name, index))
        cluster.write_log(cluster.find_pod(name, index), f"[main0|n{index}.r{index}]:node {index}\n", 1)
    assert call("muster", "status", code=10).stdout.startswith(f"{handle}  RUNNING: 2 of 2 nodes ")
    assert [line.split()[0] for line in call("muster", "list", "-s", "kubernetes").stdout.splitlines()] == [handle]
    assert call("muster", "log").stdout == "main/0 [main0|n0.r0]:node 0\nmain/1 [main0|n1.r1]:node 1\n"
    one = call("muster", "log", handle, "--rank", "1")
    assert one.stdout == "node 1\n"
    assert "files of rank 1" in one.stderr, "no command runs in pods of the model"
    for command in ("events", "timeline"):
        assert "no node has records of " in call("muster", command, code=1).stderr
    cluster.delete_object(("/apis/batch/v1", "team", "jobs", f"{name}-main"))
    assert f"team:{name}, the last job" in call("muster", "status", name, code=3).stderr


def test_list_and_delete(cluster, call):
    (first, name), (second, _), (third, _) = start(call), start(call), start(call, "-cfg", "namespace=blue")
    cluster.start_pod(cluster.find_pod(name, 0))
    call("torchx", "cancel", second)
    rows = [line.split() for line in call("torchx", "list", "-s", "kubernetes").stdout.splitlines() if "://" in line]
    assert {row[0]: row[-1] for row in rows} == {first: "RUNNING", second: "CANCELLED"}
    if HAS_DELETE:  # 0.7's `list` takes no options
        lines = call("torchx", "list", "-s", "kubernetes", "-cfg", "namespace=blue").stdout.splitlines()
        assert [line.split()[0] for line in lines if "://" in line] == [third]
        call("torchx", "delete", third)
    else:
        call("muster", "delete", third)
    assert call("muster", "delete", second).stderr == ""
    assert {key[3].startswith(name) for key in cluster.objects if key[2] != "events"} == {True}
    assert "RUNNING" in call("torchx", "status", first).stdout


COMMANDS = [("status", ""), ("log", "/main/0"), ("cancel", ""), ("describe", ""), *[("delete", "")] * HAS_DELETE]


@pytest.mark.parametrize(("command", "rest"), COMMANDS)
def test_an_unknown_app_is_one_line(call, command, rest):
    done = call("torchx", command, f"kubernetes://torchx/team:nope{rest}", code=None)
    assert "nope" in done.stdout + done.stderr
    if command not in ("status", "describe"):  # TorchX has its own line of these
        assert "'nope'" in done.stdout + done.stderr


@pytest.mark.parametrize(("command", "rest"), [*COMMANDS, ("list -s kubernetes", None)])
def test_a_server_that_does_not_allow_is_one_line(cluster, call, command, rest):
    """One that does not answer is another error of the same kind; see the next test."""
    cluster.allowed = {}
    words = [] if rest is None else [f"kubernetes://torchx/team:nope{rest}"]
    done = call("torchx", *command.split(), *words, code=None)
    assert "to list jobs" in done.stdout + done.stderr


def test_a_cluster_that_is_not_reachable_is_named(cluster, call):
    cluster.server.stop()
    done = call("muster", "list", "-s", "local_cwd", "-s", "kubernetes", code=6)
    assert done.stdout == "no jobs\n"
    assert done.stderr.startswith("muster: kubernetes: "), done
    assert "cannot be reached" in call("muster", "status", "kubernetes://torchx/team:nope", code=6).stderr
    shown = call("torchx", "list", "-s", "kubernetes", code=None)
    assert "cannot be reached" in shown.stdout + shown.stderr
