"""A person restarts one container of a job through the engine: the supervisor follows it."""

import pytest
from torchx.specs import AppState

pytestmark = pytest.mark.docker

BARE = "muster-test:bare"


def test_a_container_that_is_restarted_runs_on_and_uses_no_retry(apps, app_of):
    """And its log is followed on."""
    app_id = apps.run(app_of("trap 'exit 3' TERM; hostname; while :; do sleep 0.1; done", replicas=2, image=BARE))
    lines = iter(apps.runner.log_lines(f"docker://test/{app_id}", "w", 1, should_tail=True))
    assert next(lines) == "w-1\n"
    apps.containers(app_id, replica=1)[0].restart(timeout=5)
    assert next(lines) == "w-1\n"
    status = apps.status(app_id)
    assert (status.state, status.num_restarts) == (AppState.RUNNING, 0), status.msg
    assert len(apps.containers(app_id)) == 2
    apps.cancel(app_id)
    assert list(lines) == []
    assert apps.wait(app_id).state == AppState.CANCELLED
    assert apps.containers(app_id, every=False) == []
