"""`muster hold -s kubernetes` on a real cluster: two pods whose agents wait for runs."""

import os

import held_runs
import pytest

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]


@pytest.fixture
def held(namespace, tmp_path):
    commands = held_runs.Commands(tmp_path)
    policy = os.environ.get("MUSTER_TEST_PULL_POLICY", "IfNotPresent")
    words = ("-s", "kubernetes", "-cfg", f"namespace={namespace},image_pull_policy={policy}", "dist.ddp", "-j", "2x1")
    held = commands.hold(*words, "--image", os.environ["MUSTER_TEST_IMAGE"], "--cpu", "1", "--memMB", "512")
    yield held
    commands.call("muster", "release", "--now")
    commands.call("muster", "delete", held.handle)


def test_runs_on_two_pods(held):
    held_runs.check_two_runs(held)
    held_runs.check_failure(held)
    held_runs.check_one_at_a_time(held)
    held_runs.check_killed_link(held)
