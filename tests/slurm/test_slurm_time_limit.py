"""A job goes on over its time limit, preemptions, requeues and holds: no step is lost, and none is done twice."""

import re
import shlex
import shutil
import sys

import pytest
from slurm_world import PATIENT, PROGRAM, Job, build_app, compute_weight, wait_until

from muster._shared.control import ControlError
from muster.schedulers.adapter import AskKind
from muster.schedulers.slurm import client

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
    assert len({run.partition(".")[0] for run in runs}) == 1


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


def test_a_preemption_and_a_requeue_by_an_operator(slurm, tmp_path):
    """Both stop all ranks at one step. Without cgroups a requeue sends SIGTERM to every process of the job.

    While the job waits, it is neither asked nor told to save.
    """
    job = Job(slurm, tmp_path / "job", app=build_app(tmp_path / "job", conf=PATIENT), grace_s=12)
    job.wait_steps(20)
    job_id, _ = job.find_job()
    submitted_s = job.scheduler.read_facts(job.app_id).submitted_s
    slurm.run("scancel", "--signal=USR1", job_id)
    job.wait_line("begins at", times=2)
    steps = [step for step, _ in job.trace()]
    assert steps == list(range(len(steps)))
    job.wait_steps(20)
    slurm.run("scontrol", "requeuehold", job_id)
    described = wait_until(
        lambda: (found := job.describe()).state.name == "PENDING" and "held" in found.msg and found, job.explain
    )
    assert "scontrol release" in described.msg
    assert "incarnation 3" in described.msg
    assert job.scheduler.read_facts(job.app_id).submitted_s == submitted_s
    with pytest.raises(ControlError, match=rf"PENDING: job {job_id} waits: "):
        job.scheduler.ask_app(job.app_id, AskKind.CHECKPOINT, 10.0)
    marks = re.findall(
        r"\[muster\] incarnation (\d) of this job starts, 20.* UTC \(Slurm job (\d+)\); (.*)\n", job.read()
    )
    [(number, marked, why)] = marks
    assert (number, marked, "Slurm sent SIGUSR1" in why) == ("2", job_id, True)
    sent = "[muster] Slurm sent SIGUSR1"
    assert job.read().count(sent) == 1
    assert "incarnation" not in job.read(1)
    stopped = job.scheduler.stop_app(job.app_id, 10.0).line
    words = re.escape(f"it was waiting in the queue and is cancelled; its last checkpoint is step STEP ({tmp_path}")
    found = re.match(words.replace("STEP", r"(\d+)"), stopped)
    assert found, stopped
    lost = job.trace()[-1][0] - int(found[1])
    assert 0 <= lost <= (0 if slurm.signals_only_tasks else 20)
    assert job.wait_state("CANCELLED").msg.startswith("stopped (muster stop)")


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


@pytest.fixture
def image(slurm, tmp_path, monkeypatch):
    """A folder with neither our Python nor Slurm's commands, and an srun that runs tasks in it."""
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin" / "srun"
    stand_in = [sys.executable, shutil.copy(PROGRAM.parent / "srun_with_images.py", tmp_path), shutil.which("srun")]
    srun.write_text(f'#!/bin/sh\nexec {shlex.join(stand_in)} "$@"\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(srun.parent), prepend=":")
    client.read_help.cache_clear()
    yield str(tmp_path / "image")
    client.read_help.cache_clear()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("total", "cfg"),
    [
        (30, {}),
        pytest.param(200, {"grace_s": 12, "shared": False}, marks=pytest.mark.long),
        pytest.param(500, {"grace_s": 40, "time": "1", "continues": "follow-up"}, marks=pytest.mark.long),
    ],
)
def test_a_job_in_an_image_without_slurm_finds_its_nodes_and_goes_on(slurm, tmp_path, monkeypatch, image, total, cfg):
    folder = tmp_path / "job"
    folder.mkdir()
    shutil.copy(PROGRAM, folder)
    monkeypatch.chdir(folder)
    app = build_app(folder, total=total, conf=PATIENT)
    if "shared" in cfg:
        cfg = {**cfg, "node_dir": str(slurm.home / "local"), "container_mounts": f"{folder}:{folder}"}
        app.roles[0].args[-4] = str(folder / PROGRAM.name)
    else:
        app.roles[0].args[-4] = PROGRAM.name
    job = Job(slurm, folder, app=app, container_image=image, **cfg)
    if total == 200:
        job.wait_steps(20)
        asked = job.scheduler.ask_app(job.app_id, AskKind.CHECKPOINT, 10.0)
        assert asked.line.endswith("never called should_checkpoint"), asked
        slurm.run("scancel", "--signal=USR1", job.find_job()[0])
    job.wait_state("SUCCEEDED")
    check_steps(job, total)
    assert len({run for _, run in job.trace()}) == (1 if total == 30 else 2)
