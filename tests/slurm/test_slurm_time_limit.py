"""A job goes on over its time limit, preemptions, requeues and holds: no step is lost, and none is done twice."""

import re

import pytest
from slurm_world import PATIENT, Job, build_app, compute_weight, wait_until

pytestmark = pytest.mark.slurm


def check_steps(job, total):
    """Every step was done once, in order, and the weight is that of a job that nobody has disturbed."""
    assert [step for step, _ in job.trace()] == list(range(total))
    assert (job.folder / "weight").read_text() == repr(compute_weight(total))


@pytest.mark.long
@pytest.mark.timeout(450)
def test_a_time_limit_is_survived_twice(slurm, tmp_path):
    """By three incarnations, or more on a busy machine: the limit is a minute, the last 40 s are for saving."""
    job = Job(
        slurm,
        tmp_path / "job",
        app=build_app(tmp_path / "job", total=800, delay_s=0.05, conf=PATIENT),
        time="1",
        grace_s=40,
    )
    job.wait_state("RUNNING")
    job.wait_state("SUCCEEDED", 400)
    check_steps(job, 800)
    runs = list(dict.fromkeys(run for _, run in job.trace()))
    assert len(runs) >= 3, runs
    assert len({run.partition(".")[0] for run in runs}) == 1, "requeued: one job"
    job.close()


@pytest.mark.long
@pytest.mark.timeout(450)
def test_a_follow_up_goes_on(slurm, tmp_path):
    """Another job by dependency; the app's handle, its log and its resume path stay."""
    app = build_app(tmp_path / "job", total=500, delay_s=0.05, conf=PATIENT)
    job = Job(slurm, tmp_path / "job", app=app, time="1", grace_s=40, continues="follow-up")
    job.wait_state("SUCCEEDED", 400)
    check_steps(job, 500)
    runs = {run for _, run in job.trace()}
    assert len(runs) >= 2, runs
    assert job.read().count("begins at") == len(runs)
    for number in range(2, len(runs) + 1):
        line = rf"incarnation {number} of this job starts, .* \(Slurm job \d+\); "
        line += "the previous incarnation ended: it stopped before "
        assert len(re.findall(line, job.read())) == 1, job.read()
    job.close()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("signal", [None, "USR1@50"])
def test_a_script_that_saves_nothing_ends_with_its_time_limit(slurm, tmp_path, signal):
    """It would begin at step 0 again and again: agents are told to stop, by muster's clock or by Slurm's signal."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "train.py").write_text("import time\nfor step in range(600):\n    time.sleep(1)\n")
    app = build_app(folder, conf=PATIENT)
    app.roles[0].args[-4:] = [str(folder / "train.py")]
    cfg = {"grace_s": 45} if signal is None else {"grace_s": 5, "signal": signal}
    job = Job(slurm, folder, app=app, time="1", **cfg)
    found = job.wait_state("FAILED", 150)
    assert "time limit; the script has called muster.worker.saved for no new checkpoint" in found.msg, found
    assert "incarnation" not in found.msg, found
    job.close()


def test_a_preemption_and_a_requeue_by_an_operator(slurm, tmp_path):
    """Both stop all ranks at one step. Without cgroups a requeue sends SIGTERM to every process of the job."""
    job = Job(
        slurm, tmp_path / "job", app=build_app(tmp_path / "job", total=400, delay_s=0.05, conf=PATIENT), grace_s=12
    )
    job.wait_steps(40)
    job_id, _ = job.find_job()
    submitted_s = job.scheduler.read_facts(job.app_id).submitted_s
    slurm.run("scancel", "--signal=USR1", job_id)
    job.wait_line("begins at", times=2)
    steps = [step for step, _ in job.trace()]
    assert steps == list(range(len(steps))), "no step was done twice"
    job.wait_steps(40)
    slurm.run("scontrol", "requeuehold", job_id)
    described = wait_until(
        lambda: (found := job.describe()).state.name == "PENDING" and "held" in found.msg and found, "held"
    )
    assert "scontrol release" in described.msg
    assert "incarnation 3" in described.msg
    slurm.run("scontrol", "release", job_id)
    job.wait_state("SUCCEEDED")
    assert job.scheduler.read_facts(job.app_id).submitted_s == submitted_s, "of the app, not of its last incarnation"
    assert (job.folder / "weight").read_text() == repr(compute_weight(400))
    assert job.read().count("begins at") == 3
    marks = re.findall(
        r"\[muster\] incarnation (\d) of this job starts, 20.* UTC \(Slurm job (\d+)\); (.*)\n", job.read()
    )
    assert [mark[:2] for mark in marks] == [("2", job_id), ("3", job_id)]
    sent = "[muster] Slurm sent SIGUSR1 (usually for `scancel`, a preemption, a lost node or the time limit)\n"
    assert job.read().count(sent) == 1, "the agent knows only of SIGTERM"
    assert marks[0][2] == "the previous incarnation ended: Slurm sent SIGUSR1", marks
    assert "incarnation" not in job.read(1), "the first node tells it"
    twice = len(job.trace()) - 400
    assert 0 <= twice <= (0 if slurm.signals_only_tasks else 20), "those since the last checkpoint at most"
    job.close()


@pytest.mark.long
@pytest.mark.parametrize("partition", ["main", "patient"])
def test_a_job_that_is_preempted_loses_no_step(own_slurm, tmp_path, partition):
    """Queued again at once, with KillWait to save; and after a grace time, of which SIGTERM tells first."""
    if not own_slurm.signals_only_tasks:
        pytest.skip("SIGTERM reaches the workers here: there is no freezer of cgroup v1")
    app = build_app(tmp_path / "job", total=200, delay_s=0.05, conf=PATIENT)
    job = Job(own_slurm, tmp_path / "job", app=app, grace_s=12, partition=partition)
    job.wait_steps(50)
    own_slurm.run("sbatch", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")
    job.wait_line("begins at", times=2)
    job.wait_state("SUCCEEDED")
    check_steps(job, 200)
    assert len({run for _, run in job.trace()}) == 2
    job.close()


def test_a_cancel_lets_all_ranks_save(slurm, tmp_path):
    """`scancel` would end the workers; nothing is queued again."""
    job = Job(slurm, tmp_path / "job", app=build_app(tmp_path / "job", conf=PATIENT), grace_s=12)
    job.wait_steps(40)
    job.scheduler.cancel(job.app_id)
    assert job.wait_state("CANCELLED").msg == "cancelled"
    last = job.trace()[-1][0]
    assert f"rank 0 stops at {last}" in job.read()
    assert f"rank 1 stops at {last}" in job.read(1)
    assert job.find_job()[1] != "PENDING"
    job.close()
