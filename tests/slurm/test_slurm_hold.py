"""`muster hold -s slurm`: an allocation whose agents wait for runs."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import held_runs
import pytest
from held_runs import SLEEP, Commands, Held
from slurm_world import Cluster
from ssh_jobs import find_processes

NODE = ("--cpu", "1", "--memMB", "64")


@pytest.fixture(scope="module")
def held(shared: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """A hold of two nodes that share this machine's folders; the tests leave it usable."""
    commands = Commands(tmp_path_factory.mktemp("held"), shared.env)
    made = commands.hold("-s", "slurm", "dist.ddp", "-j", "2x1", *NODE)
    yield made
    done = commands.call("muster", "release", "--now")
    assert done.returncode == 0, done


@pytest.fixture
def commands(shared: Cluster, tmp_path: Path) -> Iterator[Commands]:
    """For holds of a test's own."""
    made = Commands(tmp_path, shared.env)
    yield made
    made.call("muster", "release", "--now")


def test_two_runs_after_one_another(held: Held) -> None:
    held_runs.check_two_runs(held)


@pytest.mark.long
def test_one_run_at_a_time(held: Held) -> None:
    held_runs.check_one_at_a_time(held)


@pytest.mark.long
def test_a_run_that_fails_has_its_report_and_what_does_not_fit_is_refused(held: Held) -> None:
    held_runs.check_failure(held)
    held_runs.check_no_fit(held)


@pytest.mark.long
def test_a_run_whose_link_is_killed_fails_and_the_hold_goes_on(held: Held) -> None:
    held_runs.check_killed_link(held)


@pytest.mark.long
def test_a_workspace_travels_where_the_nodes_share_no_folder(commands: Commands) -> None:
    """One node: those of this cluster share /tmp, where Slurm brings each node its copy."""
    held = commands.hold("-s", "slurm", "-cfg", "shared=false", "dist.ddp", "-j", "1x1", *NODE)
    held_runs.check_two_runs(held, nodes=1)


@pytest.mark.long
def test_a_run_whose_node_is_lost_names_it_and_what_is_left_can_be_used(commands: Commands) -> None:
    held = commands.hold("-s", "slurm", "dist.ddp", "-j", "2x1", *NODE)
    with commands.started(SLEEP, "main") as run:
        holders = [pid for pid in find_processes(held.app_id) if "\0001:" in read_command(pid)]
        for pid in holders:
            os.kill(pid, signal.SIGKILL)
        assert run.wait_end() == 1, run.text
    assert f"node 1 of {held.handle}" in commands.call("muster", "status", run.app_id).stdout
    held.wait_idle()
    done = commands.run(held_runs.REDUCE)
    assert (done.returncode, f"node 1 of {held.handle}" in done.stderr) == (1, True), done
    held.wait_idle()
    done = commands.run(held_runs.REDUCE, j="1x1")
    assert (done.returncode, done.stderr.count("sum 1.0")) == (0, 1), done


def read_command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.long
def test_release_during_a_run(commands: Commands) -> None:
    held_runs.check_release_during_a_run(commands.hold("-s", "slurm", "dist.ddp", "-j", "1x1", *NODE))


@pytest.mark.long
def test_a_hold_that_is_idle_ends_with_success(commands: Commands) -> None:
    held = commands.hold("-s", "slurm", "--idle-minutes", "0.05", "dist.ddp", "-j", "1x1", "--max_retries", "3", *NODE)
    held_runs.check_idle_end(held)
