"""`muster hold -s kubernetes` on a real cluster: two pods whose agents wait for runs."""

import os

import pytest
from held_runs import Commands, HeldContract

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.timeout(900),
    # a kubeconfig with insecure-skip-tls-verify is its owner's choice
    pytest.mark.filterwarnings("ignore:Unverified HTTPS request"),
]
IMAGE = ("--image", os.environ.get("MUSTER_TEST_IMAGE", ""))


@pytest.fixture(scope="module")
def hold(namespace, small_file, tmp_path_factory):
    """Called with options of `muster hold` and a component's arguments."""
    commands, made = Commands(tmp_path_factory.mktemp("held")), []
    policy = os.environ.get("MUSTER_TEST_PULL_POLICY", "IfNotPresent")
    config = f"namespace={namespace},image_pull_policy={policy},pod_template={small_file}"
    words = ("-s", "kubernetes", "-cfg", config)

    def make(options, *arguments):
        made.append(commands.hold(*words, *options, "dist.ddp", *arguments, *IMAGE))
        return made[-1]

    yield make
    for each in made:
        commands.call("muster", "release", "--now", each.handle)
        commands.call("muster", "delete", each.handle)


@pytest.fixture(scope="module")
def held(hold):
    return hold((), "-j", "2x1")


@pytest.fixture
def hold_one(hold):
    return lambda *options: hold(options, "-j", "1x1", "--max_retries", "3")


class TestHolds(HeldContract):
    """Holds of pods."""

    # It wants no other hold.
    test_release_during_a_run = None
