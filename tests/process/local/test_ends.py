"""Every way in which the command line, a pipeline or a supervisor can end: what then happens to the replicas.

Each runs below a subreaper, so that a grandchild that called setsid with an empty environment is found too.
"""

import json
import os
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import PROGRAMS, Tree, run_tree, wait_until

from muster.schedulers.supervision.app_folder import ProcessId
from muster.schedulers.supervision.registry import AppRegistry
from muster.schedulers.wording.reasons import Code, has_code

TORCHX = str(Path(sys.executable).with_name("torchx"))
TREE_UP = "tree is up"


@pytest.fixture
def env(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "LOGLEVEL"):
        monkeypatch.delenv(name, raising=False)
    return dict(os.environ)


def cli(*words, scheduler="local_cwd", cfg=None):
    """`torchx run` of a program that makes a tree of processes."""
    options = ["-cfg", cfg] if cfg else []
    command = [sys.executable, str(PROGRAMS / "local_tree.py"), *words]
    return [TORCHX, "run", "-s", scheduler, *options, "utils.sh", "--num_replicas", "2", "--", *command]


def pipeline(scheduler="local_cwd", cfg=None, *words):
    role = {"entrypoint": sys.executable, "args": [str(PROGRAMS / "local_tree.py"), *words], "num_replicas": 2}
    return [sys.executable, str(PROGRAMS / "local_job.py"), scheduler, json.dumps(cfg or {}), json.dumps(role)]


def only_app(tmp_path, scheduler="local_cwd"):
    """The folder of the one app that was submitted."""
    registry = AppRegistry(tmp_path / "state" / "muster", scheduler)
    wait_until(lambda: list(registry), what="the app")
    (app_id,) = registry
    return registry.open(app_id)


def wait_for_trees(tmp_path, scheduler="local_cwd"):
    folder = only_app(tmp_path, scheduler)
    (role,) = folder.read_spec().roles
    logs = [folder.path / role.name / str(k) / "stdout.log" for k in range(2)]
    # `torchx` alone takes many seconds to start when all cores are busy.
    wait_until(lambda: all(log.exists() and TREE_UP in log.read_text() for log in logs), what="both trees")
    return folder


def outcome_of(folder):
    app = folder.read_record().app
    return (app.app_state, app.reasons)


def test_ctrl_c_at_the_end_of_a_submission_ends_the_app(tmp_path, env):
    """The app was nobody's then: the command ended at once, and its supervisor ended it later."""
    program = str(PROGRAMS / "torchx_interrupted_after.py")
    moment = "muster.schedulers.supervision.client:submit"
    with Tree([sys.executable, program, moment, *cli()[1:]], env=env, cwd=tmp_path) as tree:
        outcome = tree.wait()
    assert outcome.leftovers == (), outcome.explain()
    assert outcome.exit_code == -signal.SIGINT
    state, reasons = outcome_of(only_app(tmp_path))
    assert state == "CANCELLED"
    assert not has_code(reasons, Code.SUBMITTER_ENDED)


@pytest.mark.torchx
@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long), signal.SIGINT]
)
def test_nothing_outlives_the_command_line(tmp_path, env, signum):
    with Tree(cli(), env=env, cwd=tmp_path) as tree:
        folder = wait_for_trees(tmp_path)
        tree.send(signum)
        outcome = tree.wait()
    assert outcome.leftovers == (), outcome.explain()
    state, reasons = outcome_of(folder)
    assert state == "CANCELLED"
    assert has_code(reasons, Code.CANCELLED, Code.SUBMITTER_ENDED)
    assert outcome.exit_code == -signum
    assert "goes on" not in outcome.stderr, outcome.explain()
    assert "Traceback" not in outcome.stderr, outcome.explain()


def test_second_ctrl_c_kills(tmp_path, env):
    with Tree(cli("ignore-term", cfg="grace_s=600"), env=env, cwd=tmp_path) as tree:
        folder = wait_for_trees(tmp_path)
        tree.send(signal.SIGINT)
        wait_until(lambda: folder.read_request() == "interrupt", what="the first Ctrl-C")
        assert outcome_of(folder)[0] == "RUNNING"
        tree.send(signal.SIGINT)
        outcome = tree.wait()
    assert "Traceback" not in outcome.stderr, outcome.explain()
    assert outcome.leftovers == (), outcome.explain()
    # The shell above the program heeds SIGTERM: it may have gone (143) by the time of the kill.
    assert {known.exit_code for known in folder.read_record().app.replicas.values()} <= {137, 143}


def test_nothing_outlives_the_supervisor(tmp_path, env):
    with Tree(pipeline(), env=env, cwd=tmp_path) as tree:
        folder = wait_for_trees(tmp_path)
        os.kill(folder.read_record().supervisor.pid, signal.SIGKILL)
        outcome = tree.wait()  # the pipeline's next look starts it again, and it finds both replicas gone
    assert outcome.leftovers == (), outcome.explain()
    assert outcome.stdout.split()[-1] == "FAILED"
    assert has_code(outcome_of(folder)[1], Code.SUPERVISOR_DIED)


def test_nothing_outlives_command_line_and_supervisor_together(tmp_path, env, torchx):
    with Tree(cli(), env=env, cwd=tmp_path) as tree:
        folder = wait_for_trees(tmp_path)
        tree.send(signal.SIGSTOP)
        os.kill(folder.read_record().supervisor.pid, signal.SIGKILL)
        tree.send(signal.SIGKILL)
        outcome = tree.wait()
    assert outcome.leftovers == (), outcome.explain()
    handle = f"local_cwd://torchx/{folder.path.name}"
    code, told, _ = torchx("status", handle)
    assert (code, "UNKNOWN" in told, "supervisor was lost" in told) == (0, True, True), told
    run_tree([TORCHX, "cancel", handle], env=env, cwd="/").check()
    assert outcome_of(folder)[0] == "CANCELLED"


@pytest.mark.torchx
def test_nothing_outlives_the_guards(tmp_path, env):
    with Tree(pipeline(), env=env, cwd=tmp_path) as tree:
        folder = wait_for_trees(tmp_path)
        for handle in folder.read_record().handles.values():
            os.kill(handle["pid"], signal.SIGKILL)
        outcome = tree.wait()
    assert outcome.leftovers == (), outcome.explain()
    assert outcome.stdout.split()[-1] == "FAILED"
    [reason] = outcome_of(folder)[1][:1]
    assert (reason.code, reason.exit_code) == (Code.REPLICA_ENDED, 137)


@pytest.mark.parametrize(
    "signum",
    [signal.SIGINT, *(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGHUP, signal.SIGKILL))],
)
def test_detach_only_leaves(tmp_path, env, signum):
    with Tree(cli(cfg="detach=True"), env=env, cwd=tmp_path, settle_s=0.5) as tree:
        folder = wait_for_trees(tmp_path)
        supervisor = folder.read_record().supervisor
        tree.send(signum)
        wait_until(lambda: not _runs(tree.pid), what="the command's end")
        assert supervisor.is_alive()
        assert outcome_of(folder)[0] == "RUNNING"
        outcome = tree.wait()
    assert ("`muster log -f" in outcome.stderr) == (signum != signal.SIGKILL), outcome.explain()
    assert len(outcome.leftovers) >= 7, outcome.explain()  # a supervisor, and per replica guard, parent and grandchild


def _runs(pid):
    process = ProcessId.of(pid)
    return process is not None and process.is_alive()


@pytest.mark.torchx
def test_cancel_from_another_shell(tmp_path, env, torchx):
    with Tree(cli(scheduler="detached"), env=env, cwd=tmp_path) as tree:
        tree.wait_for_line("detached://")
        folder = wait_for_trees(tmp_path, "detached")
        handle = tree.stdout.split()[0]
        assert torchx("cancel", handle)[0] == 0
        outcome = tree.wait()
    assert outcome.leftovers == (), outcome.explain()
    assert "CANCELLED" in torchx("status", handle)[1]
    listed = torchx("list", "-s", "detached")[1]
    assert re.search(rf"{handle}\s+CANCELLED", listed), listed
    assert torchx("log", handle)[1].count(TREE_UP) == 2
    assert "local_tree.py" in torchx("describe", handle)[1]
    assert folder.path.exists()
    if find_spec("torchx.cli.cmd_delete"):  # 0.7's command line has none
        assert torchx("delete", handle)[0] == 0
        assert not folder.path.exists()


@pytest.mark.torchx
def test_wrong_options_are_one_line(torchx):
    for options, message in (
        ("grace=1", "local_cwd has no option 'grace'; did you mean 'grace_s'?"),
        ("detach=perhaps", "option 'detach' of local_cwd must be one of true, 1, yes, on, false, 0, no, off"),
    ):
        code, _, errors = torchx("run", "-s", "local_cwd", "-cfg", options, "utils.echo", "--msg", "x")
        assert (code, message in errors, "Traceback" in errors) == (1, True, False), errors


@pytest.mark.torchx
def test_runopts_of_all_schedulers(torchx):
    code, told, _ = torchx("runopts")
    assert code == 0
    for scheduler in ("local_cwd", "detached", "local_docker", "docker", "kubernetes", "slurm", "ray", "lsf"):
        assert re.search(rf"^\W*(\[\d+m)?{scheduler}\b", told, re.MULTILINE), told
