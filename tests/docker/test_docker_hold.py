"""`muster hold -s local_docker`: containers whose agents wait for runs."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import held_runs
import pytest
from harness import wait_until
from held_runs import Commands, Held, HeldContract

pytestmark = pytest.mark.docker
IMAGE = ("--image", "muster-test:torch")


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """A hold of two containers that the tests leave usable."""
    commands = Commands(tmp_path_factory.mktemp("held"))
    made = commands.hold("-s", "local_docker", "dist.ddp", "-j", "2x1", *IMAGE)
    yield made
    done = commands.call("muster", "release", "--now")
    commands.call("muster", "delete", made.handle)
    assert done.returncode == 0, done


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """For holds of a test's own."""
    made = Commands(tmp_path)
    yield made
    made.call("muster", "release", "--now")
    for each in made.call("muster", "list", "-s", "docker", "--json").stdout.splitlines():
        for app in json.loads(each)["apps"]:
            if app["handle"].startswith("docker://hold-") and "another home folder" not in json.dumps(app):
                made.call("muster", "delete", app["handle"])


@pytest.fixture
def hold_one(commands: Commands) -> Callable[..., Held]:
    words = ("dist.ddp", "-j", "1x1", "--max_retries", "3", *IMAGE)
    return lambda *options: commands.hold("-s", "local_docker", *options, *words)


class TestHolds(HeldContract):
    """Holds of containers."""


def list_containers(client: Any, held: Held) -> list[Any]:
    """Its containers, by node."""
    found = client.containers.list(filters={"label": [f"io.muster.app={held.app_id}", "io.muster.role"]})
    return sorted(found, key=lambda each: each.labels["io.muster.replica"])


@pytest.mark.long
def test_a_container_that_is_lost_while_idle_is_replaced(commands: Commands, client: Any) -> None:
    held = commands.hold("-s", "local_docker", "dist.ddp", "-j", "2x1", "--max_retries", "1", *IMAGE)
    list_containers(client, held)[1].kill()
    wait_until(lambda: len(list_containers(client, held)) == 2, what="another container runs")
    wait_until(lambda: commands.run(held_runs.REDUCE).returncode == 0, what="a run on it succeeds")
