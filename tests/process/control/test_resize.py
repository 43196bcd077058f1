"""`muster resize` on an elastic job of local_cwd: the number of nodes changes while it runs, and the state survives."""

import re

import control_jobs
from control_jobs import END_S, PATIENT, muster, start_job
from harness import wait_until


def start_elastic(tmp_path, monkeypatch, *words, nodes=3, last_call_s=60, flags=PATIENT):
    """Start a job whose first world has all nodes."""
    monkeypatch.setattr(control_jobs, "PROGRAM", control_jobs.PROGRAM.with_name("resize_steps.py"))
    flags = ("--last-call-timeout", str(last_call_s), *flags)
    return start_job(tmp_path, *words, nodes=nodes, nproc=1, least=1, flags=flags)


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
        assert f"{job.app_id} has 2 nodes " in fewer.stdout, job.explain(fewer)
        wait_for_world(job, 2, 2)
        assert (job.describe(), list_states(job)) == ("RUNNING", ["RUNNING", "RUNNING", "CANCELLED"])
        assert "from 3 to 2 nodes" in job.scheduler.describe(job.app_id).msg
        again = muster("resize", job.handle, "2", "--json")
        assert (again.code, again.answer["line"]) == (0, f"{job.app_id} has 2 nodes already"), job.explain(again)

        refused = muster("resize", job.handle, "4")
        assert (refused.code, "1 to 3 nodes, not 4" in refused.stderr) == (1, True), job.explain(refused)
        assert job.state.read_record().app.sizes == {"r": 2}

        more = muster("resize", job.handle, "3")
        assert (more.code, "r/2 was started" in more.stdout) == (0, True)
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


def test_the_one_node_that_is_left_survives_the_loss_of_its_agent(tmp_path, monkeypatch):
    """It waited for other nodes that remember the last round; there are none.

    The time for a last call passes, because other nodes might come: so it is short, and the job may begin with one.
    """
    with start_elastic(tmp_path, monkeypatch, nodes=2, last_call_s=2, flags=()) as job:
        wait_until(lambda: read_begins(job) and read_begins(job)[-1][0] == 2, timeout_s=END_S, what=job.explain())
        assert muster("resize", job.handle, "1").code == 0, job.explain()
        wait_until(lambda: read_begins(job)[-1][0] == 1, timeout_s=END_S, what=job.explain())
        begins = len(read_begins(job))
        job.signal_agent(0)
        wait_for_world(job, 1, begins + 1)
        (job.folder / "finish").touch()
        assert (job.wait_ended(), job.count_starts()) == ("SUCCEEDED", [2, 1])
