"""Lost nodes, a controller that restarts, steps that are cancelled. Each test that breaks a cluster has its own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter

import pytest
from harness import LIMIT_S, read_command
from slurm_world import PATIENT, Job, build_app, compute_weight, wait_until
from ssh_jobs import read_shell
from torchx.specs import is_terminal

from muster._shared import processes
from muster._shared.control import ControlError
from muster.schedulers.adapter import AskKind, AskOutcome
from muster.schedulers.slurm import running_apps
from muster.schedulers.supervision.state import ReplicaId
from muster.schedulers.wording.reasons import Code

pytestmark = pytest.mark.slurm


def test_the_line_the_output_of_a_rank_and_a_cancel(slurm, tmp_path, capsys):
    """`scancel` would end the workers before they save; nothing is queued again."""
    (tmp_path / "job").mkdir()
    app = build_app(tmp_path / "job", conf=PATIENT)
    app.roles[0].args[2:2] = ["--tee", "3"]
    job = Job(slurm, tmp_path / "job", app=app, grace_s=12)
    handle = f"slurm://test/{job.app_id}"
    told = f"RUNNING: Slurm job {job.find_job()[0]}; attempt 0, no restarts allowed; 2 of 2 nodes run; step "
    wait_until(lambda: told in read_shell(capsys, "status", handle), job.explain)
    (listed,) = (each for each in read_shell(capsys, "list", "-s", "slurm").splitlines() if job.app_id in each)
    assert f" {told}" in listed
    rank = read_shell(capsys, "log", handle, "--rank", "1", "--grep", "begins")
    assert rank.startswith("rank 1 of 2 begins at 0 on n"), rank
    job.scheduler.cancel(job.app_id)
    assert job.wait_state("CANCELLED").msg == "cancelled"
    last = job.trace()[-1][0]
    for index in range(2):
        assert f"rank {index} stops at {last}" in job.read(index)
    assert job.find_job()[1] != "PENDING"


SILENT_S = 8
"""Longer than agents wait for a message."""


@pytest.mark.long
@pytest.mark.parametrize(("lost", "nodes"), [("used", 2), ("first", 3)])
def test_a_spare_replaces_a_lost_node(own_slurm, tmp_path, lost, nodes):
    """A node with a rank; and the first one, with the job's script: Slurm 22.05 ends that, and the job goes on."""
    total = 500
    app = build_app(tmp_path / "job", nodes=nodes, total=total)
    job = Job(own_slurm, tmp_path / "job", app=app, spares=4 - nodes, grace_s=12)
    job.wait_steps(50)
    wait_until(lambda: find_confirmed(job) >= 0, "a checkpoint of all ranks")
    used = set(job.find_nodes(4))
    confirmed = find_confirmed(job)
    victim = "n1" if lost == "first" else (used - {"n1"}).pop()
    own_slurm.kill_node(int(victim[1]), SILENT_S)
    if victim in used:
        wait_until(lambda: len(job.find_nodes(4)) >= 2 * nodes, "a spare has taken over")
    job.wait_steps(20)
    wait_until(
        lambda: (
            (found := job.scheduler.read_facts(job.app_id)).state.name != "RUNNING"
            or any(each.code is Code.NODES_LOST and each.hosts == (victim,) for each in found.reasons)
        ),
        "Slurm's own notice of the loss",
    )
    with contextlib.suppress(ControlError):  # it has ended
        asked = job.scheduler.ask_app(job.app_id, AskKind.STACKS, 30.0)
        assert asked.outcome is AskOutcome.DONE or "has ended" in asked.line, asked.line
    described = job.wait_state("SUCCEEDED")
    states = [each.state.name for each in described.roles_statuses[0].replicas]
    assert states.pop(int(victim[1]) - 1) == "FAILED"
    assert states == ["SUCCEEDED"] * 3
    check_trace(job, total, confirmed)
    assert len({run for _, run in job.trace()}) == 1  # the job was not queued again
    wait_until(lambda: is_ended(own_slurm, job), "the job without a script ends, too")


@pytest.mark.long
@pytest.mark.parametrize(
    ("lost", "nodes", "spares", "total"),
    [
        # Slurm ends it.
        ("first", 2, 0, 400),
        # The other of two nodes, which hears nothing of the leader, cannot know that it does not go on elsewhere.
        ("first", 2, 1, 400),
        # It cannot grow: the nodes that are left would wait until `join_timeout` for one that does not come.
        ("more than it has spares", 3, 1, 1200),
        # An administrator takes it away. Its slurmd lives and ends the job's script, which ends the job.
        ("first in service", 2, 1, 300),
    ],
)
def test_a_job_that_cannot_go_on_without_what_it_lost_is_queued_again(own_slurm, tmp_path, lost, nodes, spares, total):
    app = build_app(tmp_path / "job", nodes=nodes, total=total)
    if lost == "first":
        app.roles[0].args[2:2] = ["--rdzv-conf", "join_timeout=40"]
    job = Job(own_slurm, tmp_path / "job", app=app, spares=spares, grace_s=12)
    job.wait_steps(30)
    wait_until(lambda: find_confirmed(job) >= 0, "a checkpoint of all ranks")
    confirmed = find_confirmed(job)
    if lost == "more than it has spares":
        for name in ("n3", "n4"):
            own_slurm.run("scontrol", "update", f"NodeName={name}", "State=down", "Reason=test")
    else:
        assert "n1" in job.find_nodes(2 + spares)
    if lost == "first":
        own_slurm.kill_node(1, SILENT_S)
    elif lost == "first in service":
        for state in ("down", "drain"):  # one that is down returns to service by itself
            own_slurm.run("scontrol", "update", "NodeName=n1", f"State={state}", "Reason=test")
        job.wait_line("the previous incarnation ended: Slurm has lost node n1")
    wait_until(lambda: len({run for _, run in job.trace()}) == 2, "the next run of the job", 240)
    job.wait_state("SUCCEEDED", 240)
    check_trace(job, total, confirmed)


def check_trace(job, total, confirmed):
    """All steps are done; again only those since the last checkpoint."""
    assert (job.folder / "weight").read_text() == repr(compute_weight(total))
    done = Counter(step for step, _ in job.trace())
    assert sorted(done) == list(range(total))
    assert [step for step, times in done.items() if times > 1 and step <= confirmed] == []
    assert max(done.values()) <= 2


def test_a_job_that_cannot_do_without_an_agent_ends_at_once(slurm, tmp_path):
    """No retry is left. The other node would wait for it until `join_timeout`, and its end would hide the cause."""
    job = Job(slurm, tmp_path / "job", app=build_app(tmp_path / "job", total=2000), grace_s=12)
    job.wait_steps(20)
    kill_agent(job, 1)
    found = job.wait_state("FAILED")
    assert found.msg.startswith("the agent of w/1 "), found
    assert "--max_retries 1 starts it" in found.msg, found
    job.wait_line("[muster] the job ends: the agent of w/1 was ended by SIGKILL (on n", 0)
    assert not re.search("usually|Slurm sent", job.read()), job.read()


def test_all_ranks_save_when_srun_is_killed(slurm, tmp_path):
    """A child of srun had Slurm kill all tasks, at once and by SIGKILL."""
    job = Job(slurm, tmp_path / "job", app=build_app(tmp_path / "job", total=2000), grace_s=12)
    job.wait_steps(20)
    parents = processes.list_parents()
    commands = {pid: read_command(pid) for pid in parents}
    ours = [pid for pid, command in commands.items() if "/srun " in command and f"/{job.app_id} " in command]
    [srun] = [parents[pid] for pid in ours if parents[pid] in ours]
    os.kill(srun, signal.SIGKILL)
    assert job.wait_state("FAILED").msg.startswith("Slurm sent SIGTERM")
    last = re.findall(r"rank \d stops at (\d+)", job.read(0) + job.read(1))
    assert len(last) == 2, job.explain()
    assert last == [str(find_confirmed(job))] * 2


def find_task(job, index):
    """The process that supervises a node."""
    app = running_apps.read_app(job.scheduler._find_registry().open(job.app_id))
    return app.nodes[ReplicaId("w", index)].record.supervisor.pid


def kill_agent(job, index):
    """Kill all that the task of a node has started, but not the task."""
    task = find_task(job, index)
    for pid, parent in processes.list_parents().items():
        if parent == task:
            os.kill(pid, signal.SIGKILL)


def find_confirmed(job):
    """The step of the newest checkpoint that all ranks are known to have saved; -1: of none."""
    path = job.scheduler.find_run_dir(job.app_id, "w") / "events.jsonl"
    events = map(json.loads, path.read_text().splitlines())
    return max((each["detail"]["step"] for each in events if each["what"] == "checkpoint_completed"), default=-1)


@pytest.mark.long
@pytest.mark.parametrize("continues", ["requeue", "follow-up"])
def test_the_next_run_leaves_out_a_node_that_is_suspected(slurm, tmp_path, continues):
    """A rank has said that its node is at fault; then all ranks are told to stop, and the job goes on elsewhere."""
    app = build_app(tmp_path / "job", total=400, retries=1)
    app.roles[0].args[2:2] = ["--max-restarts", "1"]
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "leave-1").touch()
    job = Job(slurm, tmp_path / "job", app=app, grace_s=12, continues=continues)
    wait_until(lambda: len(job.find_nodes(2)) == 4, "the node has left, and was started again")
    bad = find_last_node(job, 1)
    status = job.scheduler.find_run_dir(job.app_id, "w") / "status.json"
    wait_until(lambda: any(each.get("suspicion") for each in json.loads(status.read_text())["nodes"]), "a suspicion")
    job.wait_steps(10)
    slurm.run("scancel", "--signal=USR1", job.find_job()[0])
    job.wait_state("SUCCEEDED")
    jobs = slurm.run("squeue", "-h", "-t", "all", "--name", job.app_id, "-o", "%i").split()
    assert f" ExcNodeList={bad} " in slurm.run("scontrol", "-o", "show", "job", max(jobs, key=int))
    assert bad not in (find_last_node(job, 0), find_last_node(job, 1)), job.read() + job.read(1)
    assert (job.folder / "weight").read_text() == repr(compute_weight(400))


def find_last_node(job, index):
    """The node on which a rank has begun last."""
    return [line for line in job.read(index).splitlines() if "begins at" in line][-1].split()[-1]


def is_ended(cluster, job):
    return job.find_job()[1] in ("COMPLETED", "CANCELLED", "FAILED", "NODE_FAIL")


@pytest.mark.long
def test_the_controller_restarts_during_a_job_and_its_log(own_slurm, tmp_path):
    """The job, its status and a command that follows its log outlive slurmctld."""
    total = 600
    job = Job(own_slurm, tmp_path / "job", app=build_app(tmp_path / "job", total=total), grace_s=12)
    job.wait_steps(1)
    program = "import sys; from torchx.cli.main import main; main(sys.argv[1:])"
    words = [sys.executable, "-c", program, "log", "--tail", f"slurm://test/{job.app_id}/w/0"]
    followed = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    own_slurm.restart_controller(job.find_job()[0])
    assert len(job.trace()) < total
    job.wait_state("SUCCEEDED")
    output, errors = followed.communicate(timeout=LIMIT_S)
    assert followed.returncode == 0, errors
    assert "begins at 0" in output
    assert "succeeded after" in output
    assert [step for step, _ in job.trace()] == list(range(total))


@pytest.mark.long
def test_a_cancel_of_the_step_by_hand_ends_the_app(slurm, tmp_path):
    """`scancel JOB.0`: Slurm ends all tasks, and the job with them; a step of another command does not matter."""
    job = Job(slurm, tmp_path / "job", app=build_app(tmp_path / "job"), grace_s=12, continues="no")
    job.wait_steps(10)
    job_id, _ = job.find_job()
    node = wait_until(lambda: job.find_nodes(2), "the names of its nodes")[0]
    helper = subprocess.Popen(["srun", "--overlap", f"--jobid={job_id}", "-n1", "-N1", f"-w{node}", "sleep", "60"])
    wait_until(lambda: f"{job_id}.1" in slurm.run("squeue", "-h", "-s", "-j", job_id, "-o", "%i"), "a second step")
    slurm.run("scancel", f"{job_id}.1")
    helper.wait(timeout=LIMIT_S)
    job.wait_steps(20)
    slurm.run("scancel", f"{job_id}.0")
    described = wait_until(lambda: is_terminal((found := job.describe()).state) and found, "its end")
    assert described.state.name == "FAILED"
    assert f"STEP {job_id}.0" in described.msg
    assert "CANCELLED" in described.msg


def test_a_job_that_never_starts_says_why(slurm, tmp_path, capsys):
    """Words of Slurm's for why it waits; for why it has ended those of srun, which are its log, once."""
    waiting = Job(slurm, tmp_path / "a", sbatch="--begin=now+1hour")
    broken = Job(slurm, tmp_path / "b", python="/no/such/python3")
    wait_until(lambda: "its time to begin has not come (BeginTime)" in waiting.describe().msg, "the reason")
    waiting.scheduler.cancel(waiting.app_id)
    assert waiting.wait_state("CANCELLED").msg == "cancelled"
    assert "/no/such/python3" in broken.wait_state("FAILED").msg
    lines = read_shell(capsys, "log", f"slurm://test/{broken.app_id}").splitlines()
    assert any("w/0 slurm.log: slurmstepd" in line and "execve(): /no/such/python3" in line for line in lines)
    assert not any(line.startswith("w/1") for line in lines), "once"


@pytest.mark.long
def test_without_a_shared_folder(own_slurm, tmp_path):
    """What the nodes need travels in the script and by sbcast; status, log and questions by steps of the job."""
    node_dir = own_slurm.home / "local"
    app = build_app(tmp_path / "job", nodes=3, least=2, total=100000, delay_s=0.02)
    job = Job(own_slurm, tmp_path / "job", app=app, shared=False, node_dir=str(node_dir), grace_s=12)
    job.wait_line("begins at 0")
    own_slurm.run("scancel", "--signal=USR1", job.find_job()[0])
    job.wait_line("begins at", times=2)
    job.wait_steps(60)
    steps = [step for step, _ in job.trace()]
    assert steps == list(range(len(steps)))
    wait_until(lambda: "step" in job.describe().msg, "how far it is")
    assert job.scheduler.ask_app(job.app_id, AskKind.STACKS, 30.0).outcome.value == "done"
    own_slurm.kill_node(1, SILENT_S)
    wait_until(lambda: job.cluster.run("squeue", "-h", "--name", job.app_id, "-o", "%N") == "n[2-3]", "Slurm's notice")
    for index, rank in ((1, 0), (2, 1)):
        job.wait_line(f"rank {rank} of 2 begins at", index)
    assert job.scheduler.stop_app(job.app_id, 30.0).outcome.value == "done"
    assert job.wait_state("CANCELLED").msg == "stopped (muster stop)"
    assert len(list(own_slurm.home.glob("local-n1/muster-*.zip"))) == 1
