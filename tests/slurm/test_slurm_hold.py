"""`muster hold -s slurm`: an allocation whose agents wait for runs."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import held_runs
import pytest
from harness import find_processes, read_command, wait_until
from held_runs import SLEEP, Commands, Held, HeldContract
from slurm_world import Cluster

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


@pytest.fixture
def hold_one(commands: Commands) -> Callable[..., Held]:
    words = ("dist.ddp", "-j", "1x1", "--max_retries", "3", *NODE)
    return lambda *options: commands.hold("-s", "slurm", *options, *words)


class TestHolds(HeldContract):
    """Holds of allocations."""


@pytest.mark.long
def test_a_workspace_travels_where_the_nodes_share_no_folder(commands: Commands) -> None:
    """One node: those of this cluster share /tmp, where Slurm brings each node its copy."""
    held = commands.hold("-s", "slurm", "-cfg", "shared=false", "dist.ddp", "-j", "1x1", *NODE)
    held_runs.check_two_runs(held, nodes=1)


@pytest.mark.long
def test_a_run_whose_node_is_lost_names_it_and_what_is_left_can_be_used(commands: Commands) -> None:
    held = commands.hold("-s", "slurm", "dist.ddp", "-j", "2x1", *NODE)
    with commands.started(SLEEP, "main") as run:
        holders = [pid for pid in find_processes(held.app_id) if " 1:" in read_command(pid)]
        for signum in (signal.SIGSTOP, signal.SIGKILL):  # or one could tell of the other's end before its own
            for pid in holders:
                with contextlib.suppress(ProcessLookupError):  # the end of one before ends others
                    os.kill(pid, signum)
        assert run.wait_end() == 1, run.text
    assert f"node 1 of {held.handle}" in commands.call("muster", "status", run.app_id).stdout
    held.wait_idle()
    done = commands.run(held_runs.REDUCE)
    assert (done.returncode, f"node 1 of {held.handle}" in done.stderr) == (1, True), done
    held.wait_idle()
    done = commands.run(held_runs.REDUCE, j="1x1")
    assert (done.returncode, done.stderr.count("sum 1.0")) == (0, 1), done


SAVE = """
import signal, sys, time
import torch
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved", flush=True)))
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.long
@pytest.mark.timeout(450)
def test_the_limit_of_the_allocation_stops_the_run_and_ends_the_hold(commands: Commands) -> None:
    """Three minutes, the last 40 s are for saving; Slurm may send its signal 60 s earlier than that."""
    held = commands.hold("-s", "slurm", "-cfg", "time=3,grace_s=40", "dist.ddp", "-j", "2x1", *NODE)
    with commands.started(SAVE, "main") as run:
        code = run.wait_end()
    assert (code, "received SIGTERM" in run.text) == (1, True), run.text
    assert all(f"{rank}]:saved" in run.text for rank in ("n0.r0", "n1.r1")), run.text
    wait_until(lambda: held.find_state() not in ("RUNNING", "PENDING"), what="the hold has ended")
    assert "time limit" in held.read_line(), held.read_line()
    late = commands.call("muster", "stacks", held.handle)
    assert "ended already (FAILED: " in late.stderr, late
    done = commands.run(held_runs.REDUCE)
    assert "nothing is held" in done.stderr, done
