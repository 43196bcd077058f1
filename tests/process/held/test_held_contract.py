"""What every adapter must do, of runs on a hold of this machine: their replicas run the agent, and nothing else."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract_hooks import OnThisMachine

from muster.schedulers.adapter import PluginScheduler, SchedulerError
from muster.testing.contract_apps import build_shell

MUSTER = str(Path(sys.executable).parent / "muster")


@pytest.mark.torch
@pytest.mark.long
class TestHeld(OnThisMachine):
    """Each test has a hold of two nodes."""

    name = "held"
    factory = "muster.schedulers.held:create_scheduler"

    @pytest.fixture(autouse=True)
    def _hold(self, _own_state: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")  # the apps' python3 is the hold's
        self._call("hold", "dist.ddp", "-j", "2x1")
        yield
        self._call("release", "--now")

    def _call(self, *words: str) -> None:
        done = subprocess.run([MUSTER, *words], capture_output=True, text=True, timeout=self.limit_s)
        assert done.returncode == 0, done

    def test_a_role_without_an_agent_is_refused(self, scheduler: PluginScheduler) -> None:
        with pytest.raises(SchedulerError, match="role w does"):
            self.submit(scheduler, build_shell("true"))
        assert scheduler.list(self.cfg) == []

    # What such roles are for is not for a hold.
    test_an_app_runs_ends_and_is_deleted = None
    test_what_an_app_has_left_is_found_once_it_has_ended = None
    test_another_shell_sees_and_ends_it = None
    test_a_cancel_during_the_start_ends_it = None
    test_a_replica_that_fails_is_started_again_until_no_retry_is_left = None
    test_a_lost_replica_is_replaced = None
    test_a_submission_that_fails_leaves_nothing = None
    test_a_command_that_is_killed_leaves_nothing_that_cannot_be_removed = None
