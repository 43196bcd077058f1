"""`muster hold -s ssh`: hosts whose agents wait for runs."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import find_processes, wait_until
from held_runs import SLEEP, Commands, Held, HeldContract
from ssh_jobs import wait_gone
from sshd_world import SshWorld


def build_options(world: SshWorld, runs: Path, hosts: str = "a,b") -> str:
    return f"hosts={hosts},ssh={world.ssh},python={sys.executable},folder={runs}"


@pytest.fixture(scope="module")
def held(world: SshWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """A hold of two hosts that the tests leave usable."""
    runs = tmp_path_factory.mktemp("it's on the host")
    commands = Commands(tmp_path_factory.mktemp("held"))
    yield commands.hold("-s", "ssh", "-cfg", build_options(world, runs), "dist.ddp", "-j", "2x1")
    done = commands.call("muster", "release", "--now")
    assert done.returncode == 0, done
    wait_gone(runs)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """For holds of a test's own."""
    made = Commands(tmp_path)
    yield made
    made.call("muster", "release", "--now")


@pytest.fixture
def hold_one(world: SshWorld, commands: Commands, runs: Path) -> Iterator[Callable[..., Held]]:
    words = ("-cfg", build_options(world, runs, "c"), "dist.ddp", "-j", "1x1", "--max_retries", "3")
    yield lambda *options: commands.hold("-s", "ssh", *options, *words)
    wait_gone(runs)


class TestHolds(HeldContract):
    """Holds of hosts."""


@pytest.mark.long
def test_a_run_whose_host_is_lost_fails_with_its_reason(world: SshWorld, commands: Commands, runs: Path) -> None:
    held = commands.hold("-s", "ssh", "-cfg", f"{build_options(world, runs, 'c,d')},lost_s=5", "dist.ddp", "-j", "2x1")
    with commands.started(SLEEP, "main") as run:
        for pid in find_processes(f"{held.app_id}/hold-1"):
            with contextlib.suppress(ProcessLookupError):  # the end of one before ends others
                os.kill(pid, signal.SIGKILL)
        assert run.wait_end() == 1, run.text
    assert f"node 1 of {held.handle}" in commands.call("muster", "status", run.app_id).stdout
    wait_until(lambda: held.find_state() != "RUNNING", what="the hold has ended")
    wait_gone(runs)
