"""What a real engine has said of containers is read."""

from types import SimpleNamespace

import pytest

from muster.schedulers.docker.engine import Engine, parse_container
from muster.schedulers.docker.spec import Label

pytestmark = pytest.mark.torchx

RECORDED = {
    "Id": "c208796d5464",
    "Name": "/job-trainer-0",
    "Config": {"Labels": {"io.muster.app": "job", "io.muster.role": "trainer"}},
    "HostConfig": {"Memory": 0, "DeviceRequests": None},
}
"""What a real engine said of a container on 22 November 2026, without the rest."""
STARTED = "2026-11-22T06:38:31.667719138Z"


@pytest.mark.parametrize(
    ("status", "is_running", "code", "finished", "expected"),
    [
        ("exited", False, 143, "2026-11-22T06:38:39.100751473Z", 143),
        ("running", True, 0, "0001-01-01T00:00:00Z", None),
    ],
)
def test_what_an_engine_says_of_a_container_is_read(status, is_running, code, finished, expected):
    state = {"Status": status, "Running": is_running, "ExitCode": code, "OOMKilled": False, "Error": ""}
    found = parse_container({**RECORDED, "State": {**state, "StartedAt": STARTED, "FinishedAt": finished}})
    assert (found.name, found.labels["io.muster.role"], found.gpu_ids) == ("job-trainer-0", "trainer", ())
    assert (found.running, found.exit_code, found.finished_at) == (is_running, expected, finished)


def test_the_newest_container_of_a_replica_comes_last():
    numbers = {"c": "2", "a": "0", "b": "1"}
    state = {"Status": "running", "ExitCode": 0}

    def inspect(name):
        return {**RECORDED, "Id": name, "Config": {"Labels": {Label.INCARNATION: numbers[name]}}, "State": state}

    engine = Engine({})
    listed = [{"Id": name} for name in numbers]
    engine._client = SimpleNamespace(api=SimpleNamespace(containers=lambda **_: listed, inspect_container=inspect))
    assert [facts.id for facts in engine.list_containers({})] == ["a", "b", "c"]
