"""`muster` on jobs of local_cwd with real agents: what is done, late and lost. What is decided is in `tests/unit`."""

import os
import re
import signal
import time

import pytest
from control_jobs import COMMANDS, begin, continue_process, finish, list_answers, muster, start_job, unknown_line
from harness import wait_until

from muster._shared.contract import AskKind
from muster.schedulers.supervision import agent_requests


@pytest.mark.torchx
def test_what_is_asked_is_done_at_one_step(tmp_path, capsys):
    with start_job(tmp_path) as job:
        saved = muster("checkpoint", job.handle, "--json")
        assert (saved.code, saved.answer["outcome"], saved.answer["ranks"]) == (0, "done", 4), job.explain(saved)
        assert job.read_console().count(f"saves at step {saved.answer['step']}\n") == 4, job.explain(saved)

        paused = muster("pause", job.handle, "--json")
        assert (paused.code, paused.answer["ranks"]) == (0, 4), job.explain(paused)
        told = f"at step {paused.answer['step']} since "
        wait_until(lambda: told in job.scheduler.describe(job.app_id).msg, what=job.explain(paused))
        shown = muster("status", job.handle)
        assert (shown.code, told in shown.stdout) == (10, True), job.explain(shown)
        assert job.describe() == "RUNNING", job.explain(paused)
        assert muster("checkpoint", job.handle).code == 1
        stacks = muster("stacks", job.handle, "--json")
        assert "wait_while_paused" in stacks.answer["stacks"][0]["text"], job.explain(stacks)
        steps = {each["step"] for each in stacks.answer["progress"]}
        assert steps == {stacks.answer["step"]}, job.explain(stacks)
        resumed = muster("resume", job.handle)
        assert (resumed.code, "all 4 ranks" in resumed.stdout) == (0, True), job.explain(resumed)
        assert muster("resume", job.handle).code == 1

        stopped = muster("stop", job.handle)
        assert stopped.code == 0, job.explain(stopped)
        [step] = set(re.findall(r"stops at step (\d+)", job.read_console()))
        assert f"stopped at step {step} " in stopped.stdout, job.explain(stopped)
        assert f"checkpoint: {job.folder}\n" in stopped.stdout
        assert (job.describe(), job.count_starts()) == ("CANCELLED", [1, 1])

        ended = (4, f"muster: {job.app_id} has ended already (CANCELLED): nothing was changed\n")
        assert list_answers(job.handle, capsys) == dict.fromkeys(COMMANDS, ended)
        assert job.state.path.exists()
        assert muster("delete", job.handle, "--json").code == 0
        assert not job.state.path.exists()


def test_scripts_that_never_ask(tmp_path):
    with start_job(tmp_path, "quiet", nodes=1) as job:
        for command, function in (("checkpoint", "should_checkpoint"), ("pause", "wait_while_paused")):
            refused = muster(command, job.handle)
            assert (refused.code, f"never called {function}" in refused.stderr) == (1, True), job.explain(refused)
        assert job.describe() == "RUNNING"
        stopped = muster("stop", job.handle)
        assert stopped.code == 0, job.explain(stopped)
        assert "never called should_stop" in stopped.stdout, job.explain(stopped)
        assert "replicas got SIGTERM" in stopped.stdout, job.explain(stopped)
        assert (job.describe(), job.count_starts()) == ("CANCELLED", [1])


def test_a_rank_that_hangs_is_named(tmp_path):
    with start_job(tmp_path, nproc=1) as job:
        os.kill(job.pid_of(1), signal.SIGSTOP)
        late = muster("pause", job.handle, "--limit", "2", "--json")
        assert (late.code, late.answer["outcome"]) == (5, "late"), job.explain(late)
        [rank] = [each for each in late.answer["late"] if each["global_rank"] == 1]  # another one may only be slow
        assert f"at step {rank['step']} since " in late.answer["line"], job.explain(late)
        assert "pause is withdrawn" in late.answer["line"], job.explain(late)
        stacks = muster("stacks", job.handle)
        assert (stacks.code, "1 of 2 ranks" in stacks.stderr) == (5, True), job.explain(stacks)
        stopped = muster("stop", job.handle, "--limit", "2")
        assert stopped.code == 0, job.explain(stopped)
        assert "rank 1 is at" in stopped.stdout, job.explain(stopped)
        assert "replicas got SIGTERM" in stopped.stdout, job.explain(stopped)
        assert (job.describe(), job.count_starts()) == ("CANCELLED", [1, 1])


def test_the_leader_is_lost_during_a_stop(tmp_path):
    """What was recorded stays: nothing is started again, and the person gets one answer."""
    with start_job(tmp_path, nproc=1, flags=()) as job:
        os.kill(job.pid_of(1), signal.SIGSTOP)
        stopping = begin("stop", job.handle, "--limit", "100")
        job.wait_for_line("muster stop: all ranks stop at step")
        job.signal_agent(0)
        stopped = finish(stopping)
        assert stopped.code == 0, job.explain(stopped)
        assert "replicas got SIGTERM" in stopped.stdout, job.explain(stopped)
        assert re.match(r"the (agent|round) ", stopped.stdout), job.explain(stopped)
        assert (job.wait_ended(), job.count_starts()) == ("CANCELLED", [1, 1]), job.read_console()


@pytest.mark.parametrize("command", ["checkpoint", pytest.param("pause", marks=pytest.mark.long)])
def test_the_leader_is_lost_while_a_checkpoint_or_a_pause_is_under_way(tmp_path, command):
    """The person is told, nothing of it stays, and the job heals and saves the next checkpoint."""
    with start_job(tmp_path, nproc=1, flags=()) as job:
        hanging = job.pid_of(1)
        os.kill(hanging, signal.SIGSTOP)
        try:
            asking = begin(command, job.handle, "--limit", "100")
            job.wait_for_line(f"muster {command}: all ranks")
            job.signal_agent(0)
        finally:
            continue_process(hanging)
        lost = finish(asking)
        assert (lost.code, lost.stdout) == (6, ""), job.explain(lost)
        assert re.match(r"the (agent|round|leader)", lost.stderr), job.explain(lost)
        job.wait_healed(lost)


@pytest.mark.long
def test_hang_limits_stand_still_during_a_pause(tmp_path):
    with start_job(tmp_path, nodes=1, flags=("--hang-timeout", "3")) as job:
        assert muster("pause", job.handle).code == 0, job.explain()
        time.sleep(7)
        resumed = muster("resume", job.handle)
        assert resumed.code == 0, job.explain(resumed)
        stopped = muster("stop", job.handle)
        assert "have stopped at " in stopped.stdout, job.explain(stopped)
        assert "hang-timeout" not in job.read_console(), job.explain(stopped)
        assert job.count_starts() == [1]


def test_a_stop_whose_way_to_the_agents_breaks_is_withdrawn(tmp_path, monkeypatch):
    """All ranks got SIGTERM, and what they had not saved was lost."""
    ask_roles = agent_requests._ask_roles
    with start_job(tmp_path, nodes=1) as job:
        assert muster("checkpoint", job.handle).code == 0, job.explain()

        def break_the_way(spec, record, kind, *words):
            if kind is AskKind.STOP:
                job.signal_agent(0, signal.SIGSTOP)
            return ask_roles(spec, record, kind, *words)

        with monkeypatch.context() as patch:
            patch.setattr(agent_requests, "_ask_roles", break_the_way)
            refused = muster("stop", job.handle, "--limit", "1")
        job.signal_agent(0, signal.SIGCONT)
        hint = "`muster stop --now` ends"
        assert (refused.code, hint in refused.stderr) == (6, True), job.explain(refused)
        stopped = muster("stop", job.handle)
        assert "all 2 ranks" in stopped.stdout, job.explain(stopped)
        assert (job.describe(), job.count_starts()) == ("CANCELLED", [1])


# TorchX's nightly line has no schedulers of its own any more


def test_an_unknown_app(capsys):
    unknown = (3, unknown_line("detached", "nosuchapp"))
    assert list_answers("detached://torchx/nosuchapp", capsys) == dict.fromkeys(COMMANDS, unknown)
