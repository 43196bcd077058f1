"""`muster` from another shell, on jobs of the Docker engine."""

import json
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from control_jobs import COMMANDS, list_answers, unknown_line
from harness import wait_until
from torchx.specs import AppDef

from muster.components import dist

pytestmark = pytest.mark.docker

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
IMAGE = "muster-test:torch"


def muster(*words):
    command = [sys.executable, "-m", "muster", *words]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=170)


def start(apps, *words, **more):
    app: AppDef = dist.ddp(
        *("/tmp", "100000", *words),
        script="control_steps.py",
        j="2x2",
        image=IMAGE,
        name="job",
        start="cold",
        rdzv_conf="keep_alive_max_attempt=60",  # on a busy machine agents of containers get no CPU time for seconds
        **{"env": {"PET_SHUTDOWN_TIMEOUT": "4"}, **more},
    )
    app_id = apps.run(app, workspace=str(PROGRAMS))
    role = apps.containers(app_id)[0].labels["io.muster.role"]

    wait_counting(apps, app_id, role, 4)
    return app_id, f"docker://test/{app_id}", role


def read_lines(apps, app_id, role):
    return [line for replica in range(2) for line in apps.logs(app_id, role=role, replica=replica)]


def wait_counting(apps, app_id, role, starts):
    wait_until(
        lambda: sum("counts" in line for line in read_lines(apps, app_id, role)) >= starts,
        timeout_s=120,
        what=f"{starts} ranks to count steps",
    )


def test_the_status_tells_of_a_hang_with_which_the_job_goes_on(apps):
    limits = {"hang_timeout": "5", "hang_action": "report", "start": "cold"}
    app = dist.ddp("sleeps", "1", script="hang.py", j="1x2", image=IMAGE, name="job", **limits)
    app_id = apps.run(app, workspace=str(PROGRAMS / "hangs"))
    role = apps.containers(app_id)[0].labels["io.muster.role"]
    named = "did not enter all_reduce #6 of default_pg (4 x float32); rank 0 has waited in it for "
    wait_until(
        lambda: "".join(apps.logs(app_id, role=role)).count(named), timeout_s=120, what="the page on the console"
    )
    status = apps.status(app_id)
    assert (status.state.name, named in status.msg) == ("RUNNING", True), f"{status}\n{apps.logs(app_id, role=role)}"


def test_the_line_and_the_output_of_a_rank(apps):
    """The files, also of a container that has ended; once it is gone, nothing is known of it."""
    app_id, handle, role = start(apps)
    listed = muster("list", "-s", "docker")
    assert re.search(
        rf"^docker://torchx/{app_id} .* RUNNING: attempt 0, no restarts allowed; 2 of 2 nodes run; ",
        listed.stdout,
        re.MULTILINE,
    )
    shown = muster("status", handle, "--json")
    assert shown.returncode == 10, shown
    assert json.loads(shown.stdout)["jobs"][role]["restarts_left"] == 0
    rank = muster("log", handle, "--rank", "3", "--grep", "counts")
    assert (rank.returncode, rank.stdout.count("counts"), rank.stderr) == (0, 1, ""), rank
    assert "]:" not in rank.stdout, "it is the file"
    assert muster("stop", handle).returncode == 0
    assert muster("status", handle).returncode == 7
    ended = muster("log", handle, "--rank", "3", "--grep", "counts")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, rank.stdout, ""), ended


def start_elastic(apps, j="1:2x1", max_retries=2, rdzv_conf="", **cfg):
    env = {"PET_SHUTDOWN_TIMEOUT": "4"}
    told = {"image": IMAGE, "name": "job", "start": "cold", "max_retries": max_retries, "rdzv_conf": rdzv_conf}
    app = dist.ddp("/tmp", script="resize_steps.py", j=j, env=env, **told)
    app_id = apps.run(app, workspace=str(PROGRAMS), **cfg)
    return app_id, f"docker://test/{app_id}", apps.containers(app_id)[0].labels["io.muster.role"]


def show(apps, app_id, role, *done):
    logs = ["".join(apps.logs(app_id, role=role, replica=replica))[-3000:] for replica in range(2)]
    return "\n".join([*(f"exit {each.returncode}: {each.stdout}{each.stderr}" for each in done), *logs])


def test_what_is_asked_is_done_at_one_step(apps, capsys):
    app_id, handle, role = start(apps)
    saved = muster("checkpoint", handle, "--json")
    assert saved.returncode == 0, show(apps, app_id, role, saved)
    answer = json.loads(saved.stdout)
    assert answer["ranks"] == 4
    assert re.fullmatch(rf"all 4 ranks saved at step {answer['step']} in \d+\.\d s: /tmp", answer["line"])
    paused = muster("pause", handle)
    assert paused.returncode == 0, show(apps, app_id, role, paused)
    stacks = muster("stacks", handle)
    assert "wait_while_paused" in stacks.stdout, show(apps, app_id, role, stacks)
    resumed = muster("resume", handle)
    assert resumed.returncode == 0, show(apps, app_id, role, resumed)
    stopped = muster("stop", handle)
    assert stopped.returncode == 0, show(apps, app_id, role, stopped)
    text = r"all 4 ranks have stopped at step \d+ and ended, after \d+\.\d s; checkpoint: /tmp\n"
    assert re.fullmatch(text, stopped.stdout), show(apps, app_id, role, stopped)
    assert apps.status(app_id).state.name == "CANCELLED"
    ended = (4, f"muster: {app_id} has ended already (CANCELLED): nothing was changed\n")
    assert list_answers(handle, capsys) == dict.fromkeys(COMMANDS, ended)
    unknown = (3, unknown_line("docker", "nosuchapp"))
    assert list_answers("docker://test/nosuchapp", capsys) == dict.fromkeys(COMMANDS, unknown)


def test_scripts_that_never_ask(apps):
    app_id, handle, role = start(apps, "quiet")
    refused = muster("checkpoint", handle)
    assert refused.returncode == 1, show(apps, app_id, role, refused)
    assert "never called should_checkpoint" in refused.stderr, show(apps, app_id, role, refused)
    for command, reason in (("pause", "never called wait_while_paused"), ("resume", "the job is not paused")):
        refused = muster(command, handle)
        assert refused.returncode == 1, show(apps, app_id, role, refused)
        assert reason in refused.stderr, show(apps, app_id, role, refused)
    stopped = muster("stop", handle)
    assert stopped.returncode == 0, show(apps, app_id, role, stopped)
    assert "all replicas got SIGTERM and have ended" in stopped.stdout, show(apps, app_id, role, stopped)
    assert apps.status(app_id).state.name == "CANCELLED"
    assert len(apps.containers(app_id)) in (0, 2)  # none was started again


def test_an_elastic_job_shrinks_and_grows(apps):
    app_id, handle, role = start_elastic(apps, keep="failed")

    def wait_for_world(size, count):
        text = f"rank 0 of {size} begins"
        wait_until(
            lambda: sum(text in line for line in apps.logs(app_id, role=role)) >= count, timeout_s=120, what=text
        )

    wait_for_world(2, 1)
    refused = muster("resize", handle, "3")
    assert (refused.returncode, refused.stderr) == (
        1,
        f"muster: role {role!r} of {app_id!r} can have 1 to 2 nodes, not 3\n",
    ), show(apps, app_id, role, refused)
    fewer = muster("resize", handle, "1")
    assert fewer.returncode == 0, show(apps, app_id, role, fewer)
    assert fewer.stdout.startswith(f"{app_id} has 1 node from now on: {role}/1 was ended"), fewer.stdout
    wait_for_world(1, 1)
    assert apps.status(app_id).state.name == "RUNNING"
    more = muster("resize", handle, "2")
    assert (more.returncode, more.stdout) == (0, f"{app_id} has 2 nodes from now on: {role}/1 was started\n")
    wait_for_world(2, 2)
    assert "rank 1 of 2 stops at step" in "".join(apps.logs(app_id, role=role, replica=1))
    assert muster("resize", handle, "1").returncode == 0
    wait_for_world(1, 2)
    [first] = apps.containers(app_id, role=role, replica=0)
    first.kill()  # no other node remembers the last round
    wait_for_world(1, 3)
    apps.inside(app_id, "touch /tmp/finish && echo finish", role=role)
    assert apps.wait(app_id).state.name == "SUCCEEDED"  # although a node was taken away
    assert apps.containers(app_id) == []
    assert muster("resize", handle, "2").returncode == 4


@contextmanager
def begin(apps, app_id, role, command, times=1):
    """A command in another process, which all ranks have agreed to do."""
    words = [sys.executable, "-m", "muster", command, f"docker://test/{app_id}", "--limit", "100"]
    agreed = f"muster {command}: all ranks"
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as asking:
        try:
            wait_until(
                lambda: "".join(read_lines(apps, app_id, role)).count(agreed) >= times, timeout_s=120, what=agreed
            )
            yield asking
        finally:
            asking.kill()


@pytest.mark.timeout(400)
def test_a_rank_that_hangs_is_named_and_a_lost_leader_is_told(apps):
    # on a busy machine an agent may be silent for 5 s; the leader's end is seen at once
    app_id, handle, role = start(apps, max_retries=2)

    stop_rank(apps, app_id, role, 3, replica=1)
    late = muster("pause", handle, "--limit", "2", "--json")
    assert late.returncode == 5, show(apps, app_id, role, late)
    assert 3 in [rank["global_rank"] for rank in json.loads(late.stdout)["late"]], late.stdout

    stacks = muster("stacks", handle)
    assert stacks.returncode == 5, show(apps, app_id, role, stacks)
    assert "the stacks of 3 of 4 ranks" in stacks.stderr, show(apps, app_id, role, stacks)

    with begin(apps, app_id, role, "pause", times=2) as pausing:
        refused = muster("checkpoint", handle)
        assert refused.returncode == 1, show(apps, app_id, role, refused)
        line = r"muster pause of \d+\.\d s ago is not done yet: nothing was changed\n"
        assert re.fullmatch(line, refused.stderr), show(apps, app_id, role, refused)
        resumed = muster("resume", handle)
        assert resumed.returncode == 0, show(apps, app_id, role, resumed)
        said, _ = pausing.communicate(timeout=150)
        assert (pausing.returncode, said) == (1, "the job is resumed instead (muster resume)\n")

    with begin(apps, app_id, role, "checkpoint") as asking:
        [leader] = apps.containers(app_id, role=role, replica=0)
        leader.kill()  # the end of the round ends rank 3, too
        said, _ = asking.communicate(timeout=150)
    assert asking.returncode == 6, f"{said}\n{show(apps, app_id, role)}"
    wait_until(  # the leader is started again, and the round may be formed more than once
        lambda: muster("checkpoint", handle).returncode == 0, timeout_s=240, what=show(apps, app_id, role)
    )
    deleted = muster("delete", handle)
    assert (deleted.returncode, deleted.stdout) == (0, f"{app_id} is removed, with its logs\n"), deleted.stderr
    assert apps.containers(app_id) == []
    assert muster("delete", handle).returncode == 3


def stop_rank(apps, app_id, role, rank, replica):
    program = f"import os, signal; os.kill(int(open('/tmp/pid{rank}').read()), signal.SIGSTOP)"
    apps.inside(app_id, f'python3 -c "{program}"', role=role, replica=replica)


@pytest.mark.parametrize("is_leader_lost", [False, True], ids=["a rank hangs", "the leader is lost"])
def test_a_stop_that_fails_ends_the_app_at_once(apps, is_leader_lost):
    """Nothing is started again, and the person gets one answer."""
    app_id, handle, role = start(apps, max_retries=2)
    stop_rank(apps, app_id, role, 3, replica=1)
    if is_leader_lost:
        with begin(apps, app_id, role, "stop") as stopping:
            [leader] = apps.containers(app_id, role=role, replica=0)
            leader.kill()
            said, _ = stopping.communicate(timeout=150)
        code = stopping.returncode
    else:
        stopped = muster("stop", handle, "--limit", "2")
        code, said = stopped.returncode, stopped.stdout
        assert "rank 3 is at step" in said, show(apps, app_id, role, stopped)
    assert code == 0, f"{said}\n{show(apps, app_id, role)}"
    assert "all replicas got SIGTERM and have ended" in said, f"{said}\n{show(apps, app_id, role)}"
    assert apps.status(app_id).state.name == "CANCELLED"
    assert len(apps.containers(app_id)) in (0, 2)  # none was started again


def pause(container):
    """On a busy machine the engine may not get it frozen at once."""
    import docker

    for _ in range(5):
        try:
            return container.pause()
        except docker.errors.APIError as error:
            if "unable to freeze" not in str(error):
                raise
            time.sleep(0.5)
    return container.pause()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("command", ["pause", "resume", "stacks"])
def test_the_leader_is_lost_while_it_is_asked(apps, command):
    """The person is told why nothing came of it, or what came when the job had healed meanwhile."""
    app_id, handle, role = start(apps, max_retries=2)
    if command == "resume":
        paused = muster("pause", handle)
        assert paused.returncode == 0, show(apps, app_id, role, paused)
    [leader] = apps.containers(app_id, role=role, replica=0)
    words = [sys.executable, "-m", "muster", command, handle, "--limit", "60"]
    pause(leader)  # so that it has not answered yet
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as asking:
        time.sleep(2)
        leader.kill()
        said, _ = asking.communicate(timeout=150)
    lines = {
        0: "the stacks of 4 of 4 ranks|all 4 ranks (wait|go on)",
        1: "nothing was changed|not paused",
        5: r"the stacks of \d of 4 ranks",
        6: "the (agent that was asked|round ended|leader|job)|has an agent that answers|cannot be asked",
    }
    assert re.search(lines[asking.returncode], said), f"{said}\n{show(apps, app_id, role)}"
    if command == "pause":
        muster("resume", handle)  # it may have been paused when it had healed, and a job that waits saves nothing
    wait_until(
        lambda: muster("checkpoint", handle).returncode == 0, timeout_s=240, what=f"{said}{show(apps, app_id, role)}"
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_leader_lost", [False, True], ids=["a rank hangs", "the leader is lost"])
def test_a_resize_is_carried_out_whatever_happens(apps, is_leader_lost):
    """Two nodes go on.

    Where the leader is lost without its end being seen while node 2 goes, node 1 cannot know that they do not go on
    without it: it waits for `join_timeout`, and both are started again.
    """
    patient = {"max_retries": 5, "rdzv_conf": "join_timeout=60"}
    app_id, handle, role = start_elastic(apps, j="1:3x1", keep="failed", **patient)
    look = "test -e /tmp/pid2 && echo yes || echo no"
    wait_until(lambda: "yes" in apps.inside(app_id, look, role=role, replica=2), timeout_s=120, what="rank 2")
    if not is_leader_lost:
        stop_rank(apps, app_id, role, 2, replica=2)
    words = [sys.executable, "-m", "muster", "resize", handle, "2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as asking:
        if is_leader_lost:
            [leader] = apps.containers(app_id, role=role, replica=0)
            leader.kill()
        said, _ = asking.communicate(timeout=150)
    assert asking.returncode == 0, f"{said}\n{show(apps, app_id, role)}"
    assert said.startswith(f"{app_id} has 2 nodes from now on: {role}/2 was ended"), said
    try:
        wait_until(lambda: "rank 0 of 2 begins" in "".join(read_lines(apps, app_id, role)), timeout_s=240)
    except AssertionError:
        raise AssertionError(f"two nodes: {said}{show(apps, app_id, role)}") from None


@pytest.mark.long
def test_a_rehearsal_kills_a_rank_and_stops_a_container_of_this_app_alone(apps):
    _, other, _ = start(apps, max_retries=5)
    told = muster("status", other, "--json")
    assert told.stdout, told
    before = json.loads(told.stdout)
    _, handle, _ = start(apps, max_retries=5)
    done = muster("rehearse", "--app", handle, "--faults", "rank-killed,preempted", "--yes", "--seed", "1", "--json")
    assert done.returncode == 0, done
    assert [row["verdict"] for row in json.loads(done.stdout)["rows"]] == ["survived", "survived"], done
    told = muster("status", other, "--json")
    assert told.stdout, told
    after = json.loads(told.stdout)
    assert [each["state"] for each in (before, after)] == ["RUNNING", "RUNNING"]
    assert "attempt 0, 5 restarts left" in after["line"], after
