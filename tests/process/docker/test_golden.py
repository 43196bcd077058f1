"""Today's code shows the ended jobs of `docker` that version 19df633 left, without an engine; see tests/golden."""

import golden_state
import pytest
from torchx.runner import get_runner
from torchx.specs import AppState, Resource, Role

pytestmark = pytest.mark.torchx

ENDED = ("succeeded-golden", "failed-golden", "cancelled-golden")
CAUSE = "rank 1 on node 1 (trainer-1) exited with code 1 (ValueError: bad batch 17)"


@pytest.fixture
def runner(tmp_path, monkeypatch):
    pytest.importorskip("docker", reason="the docker package is not installed")
    (tmp_path / "state").mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")  # not unix://: there the SDK leaks the socket that fails
    golden_state.restore("docker", tmp_path / "state", tmp_path, apps=ENDED)
    with get_runner() as made:
        yield made


def handle(app_id, scheduler="docker"):
    return f"{scheduler}://torchx/{app_id}"


@pytest.mark.parametrize("scheduler", ["docker", "local_docker"])
def test_list(runner, scheduler):
    assert {app.app_id: app.state for app in runner._scheduler(scheduler).list()} == {
        "succeeded-golden": AppState.SUCCEEDED,
        "failed-golden": AppState.FAILED,
        "cancelled-golden": AppState.CANCELLED,
    }


def test_status(runner):
    assert runner.status(handle("succeeded-golden")).state == AppState.SUCCEEDED
    cancelled = runner.status(handle("cancelled-golden", "local_docker"))
    assert (cancelled.state, cancelled.msg) == (AppState.CANCELLED, "cancelled")
    assert [(role.role, [each.state for each in role.replicas]) for role in cancelled.roles] == [
        ("side", [AppState.CANCELLED])
    ]


def test_status_names_the_root_cause(runner):
    failed = runner.status(handle("failed-golden"))
    assert failed.state == AppState.FAILED
    assert CAUSE in failed.msg
    assert '"message": "ValueError: bad batch 17"' in failed.structured_error_msg


def test_describe(runner):
    (role,) = runner.describe(handle("cancelled-golden")).roles
    assert role == Role(
        name="side",
        image="muster-test:torch",
        entrypoint="sh",
        args=["-c", "echo working; while :; do sleep 1; done"],
        env={"TORCHX_JOB_ID": "docker://torchx/${app_id}"},
        resource=Resource(cpu=-1, gpu=0, memMB=0),
    )


def test_cancel_changes_nothing(runner):
    runner.cancel(handle("failed-golden"))
    assert runner.status(handle("failed-golden")).state == AppState.FAILED
