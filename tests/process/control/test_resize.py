"""`muster resize` on an elastic job of local_cwd: the number of nodes changes while it runs, and the state survives."""

import os
import re
import signal
import sys

import control_jobs
import pytest
from control_jobs import END_S, PATIENT, begin, continue_process, finish, muster, start_job, unknown_line
from harness import wait_until

from muster._shared import processes

pytestmark = [
    pytest.mark.torchx,
    pytest.mark.skipif(sys.platform != "linux", reason="the status page is for Linux"),
]


def start_elastic(tmp_path, monkeypatch, *words, flags=PATIENT):
    """Start a job whose first world has all three nodes."""
    monkeypatch.setattr(control_jobs, "PROGRAM", control_jobs.PROGRAM.with_name("resize_steps.py"))
    return start_job(tmp_path, *words, nodes=3, nproc=1, least=1, flags=("--last-call-timeout", "60", *flags))


def read_begins(job):
    path = job.folder / "begins"
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_world(job, size, count):
    """Wait for the start number `count` of the job's workers, which must have `size` ranks."""
    wait_until(lambda: len(read_begins(job)) >= count, timeout_s=END_S, what=f"world {size}\n{job.read_console()}")
    assert read_begins(job)[count - 1][0] == size, job.explain()


def list_states(job):
    [role] = job.scheduler.describe(job.app_id).roles_statuses
    return [replica.state.name for replica in role.replicas]


def test_an_elastic_job_shrinks_and_grows_and_its_state_survives(tmp_path, monkeypatch):
    with start_elastic(tmp_path, monkeypatch) as job:
        wait_for_world(job, 3, 1)
        fewer = muster("resize", job.handle, "2")
        assert fewer.code == 0, job.explain(fewer)
        text = rf"{job.app_id} has 2 nodes from now on: r/2 was ended, after \d+\.\d s\n"
        assert re.fullmatch(text, fewer.stdout), job.explain(fewer)
        wait_for_world(job, 2, 2)
        assert (job.describe(), list_states(job)) == ("RUNNING", ["RUNNING", "RUNNING", "CANCELLED"])
        assert "r was resized from 3 to 2 nodes; attempt 0, " in job.scheduler.describe(job.app_id).msg
        again = muster("resize", job.handle, "2", "--json")
        assert (again.code, again.answer["line"]) == (0, f"{job.app_id} has 2 nodes already"), job.explain(again)

        for words, line in {
            ("4",): f"role 'r' of {job.app_id!r} can have 1 to 3 nodes, not 4",
            ("1", "--role", "x"): f"app {job.app_id!r} has no role 'x'; it has: r",
        }.items():
            refused = muster("resize", job.handle, *words)
            assert (refused.code, refused.stderr) == (1, f"muster: {line}\n"), job.explain(refused)
        assert job.state.read_record().app.sizes == {"r": 2}

        more = muster("resize", job.handle, "3")
        assert (more.code, more.stdout) == (0, f"{job.app_id} has 3 nodes from now on: r/2 was started\n")
        wait_for_world(job, 3, 3)
        assert job.count_starts() == [1, 1, 2], job.explain()
        assert job.scheduler.describe(job.app_id).num_restarts == 0, job.explain()
        first, second, *_ = [step for _, step in read_begins(job)]
        [saved] = set(re.findall(r"of 3 stops at step (\d+)", job.read_console()))
        assert (first, second) == (0, int(saved) + 1), job.explain()

        assert muster("resize", job.handle, "1").code == 0
        wait_for_world(job, 1, 4)
        (job.folder / "finish").touch()
        assert (job.wait_ended(), list_states(job)) == ("SUCCEEDED", ["SUCCEEDED", "CANCELLED", "CANCELLED"])
        ended = muster("resize", job.handle, "3", "--json")
        assert (ended.code, ended.answer["outcome"]) == (4, "ended"), job.explain(ended)
        assert job.count_starts() == [1, 1, 2], job.explain()


def test_of_two_resizes_at_once_the_second_is_carried_out_after_the_first(tmp_path, monkeypatch):
    with start_elastic(tmp_path, monkeypatch, "quiet") as job:
        wait_for_world(job, 3, 1)
        shells = [begin("resize", job.handle, nodes) for nodes in ("1", "2")]
        one, two = map(finish, shells)
        assert (one.code, two.code) == (0, 0), job.explain(one, two)
        assert f"{job.app_id} has 1 node from now on" in one.stdout, job.explain(one, two)
        assert f"{job.app_id} has 2 nodes from now on" in two.stdout, job.explain(one, two)
        wait_until(lambda: not job.state.read_record().app.leaving, timeout_s=END_S, what=job.explain(one, two))
        app = job.state.read_record().app
        wanted = [status == "RUNNING" for status in list_states(job)]
        assert app.sizes == {"r": sum(wanted)}, job.explain(one, two)
        assert app.resizes == 2, job.explain(one, two)
        assert wanted[0], job.explain(one, two)


def test_the_leader_is_lost_while_a_resize_is_under_way(tmp_path, monkeypatch):
    with start_elastic(tmp_path, monkeypatch, flags=()) as job:
        wait_for_world(job, 3, 1)
        asking = begin("resize", job.handle, "2")
        wait_until(lambda: job.state.read_record().app.sizes, timeout_s=END_S, what=job.explain())
        begins = len(read_begins(job))
        job.signal_agent(0)
        fewer = finish(asking)
        assert fewer.code == 0, job.explain(fewer)
        assert f"{job.app_id} has 2 nodes from now on: r/2 was ended" in fewer.stdout, job.explain(fewer)
        wait_until(
            lambda: len(read_begins(job)) > begins and read_begins(job)[-1][0] == 2,
            timeout_s=END_S,
            what=job.explain(fewer),
        )
        (job.folder / "finish").touch()
        assert (job.wait_ended(), list_states(job)) == ("SUCCEEDED", ["SUCCEEDED", "SUCCEEDED", "CANCELLED"])
        assert job.count_starts()[1:] == [1, 1], job.explain(fewer)


def test_the_one_node_that_is_left_survives_the_loss_of_its_agent(tmp_path, monkeypatch):
    """It waited for other nodes that remember the last round; there are none."""
    with start_elastic(tmp_path, monkeypatch, flags=()) as job:
        wait_for_world(job, 3, 1)
        assert muster("resize", job.handle, "1").code == 0, job.explain()
        wait_for_world(job, 1, 2)
        job.signal_agent(0)
        wait_for_world(job, 1, 3)
        (job.folder / "finish").touch()
        assert (job.wait_ended(), job.count_starts()) == ("SUCCEEDED", [2, 1, 1])


def test_a_rank_that_hangs_does_not_hold_up_a_resize(tmp_path, monkeypatch):
    """Its node is ended when the grace period is over."""
    with start_elastic(tmp_path, monkeypatch) as job:
        wait_for_world(job, 3, 1)
        wait_until(lambda: len(list(job.folder.glob("pid*"))) == 3, timeout_s=END_S, what=job.explain())
        os.kill(job.pid_of(2), signal.SIGSTOP)
        fewer = muster("resize", job.handle, "2")
        assert fewer.code == 0, job.explain(fewer)
        assert f"{job.app_id} has 2 nodes from now on: r/2 was ended" in fewer.stdout, job.explain(fewer)
        wait_until(lambda: read_begins(job)[-1][0] == 2, timeout_s=END_S, what=job.explain(fewer))
        (job.folder / "finish").touch()
        assert (job.wait_ended(), list_states(job)) == ("SUCCEEDED", ["SUCCEEDED", "SUCCEEDED", "CANCELLED"])


def test_a_node_that_is_added_when_the_job_is_about_to_end_does_not_wait_for_its_leader(tmp_path, monkeypatch):
    """It would for the join timeout of ten minutes, and then be started again, as often as the retries allow."""
    with start_elastic(tmp_path, monkeypatch, "quiet") as job:
        wait_for_world(job, 3, 1)
        assert muster("resize", job.handle, "2").code == 0, job.explain()
        wait_for_world(job, 2, 2)
        assert muster("resize", job.handle, "3").code == 0, job.explain()
        guard = list(job.state.read_record().handles.values())[2]["pid"]
        os.kill(guard, signal.SIGSTOP)  # then it starts no agent any more
        late = [guard, *processes.list_descendants(guard)]
        for pid in late[1:]:
            os.kill(pid, signal.SIGSTOP)
        (job.folder / "finish").touch()
        wait_until(lambda: list_states(job)[:2] == ["SUCCEEDED"] * 2, timeout_s=END_S, what=job.explain())
        for pid in late:
            continue_process(pid)
        assert (job.wait_ended(), list_states(job)) == ("SUCCEEDED", ["SUCCEEDED", "SUCCEEDED", "CANCELLED"])
        assert job.count_starts() == [1, 1, 2], job.explain()


def test_a_job_of_a_fixed_size_and_an_unknown_one_are_refused(tmp_path):
    with start_job(tmp_path, nodes=1, nproc=1) as job:
        refused = muster("resize", job.handle, "2")
        line = f"app {job.app_id!r} has a fixed number of nodes (role 'r': 1); only roles with -j MIN:MAX can resize"
        assert (refused.code, refused.stderr) == (1, f"muster: {line}\n"), job.explain(refused)
    unknown = muster("resize", job.handle, "1")
    assert (unknown.code, unknown.stderr) == (3, unknown_line("detached", job.app_id))
