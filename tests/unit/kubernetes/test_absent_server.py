"""A server that is away, or starts again: how long a command waits for it."""

import pytest
from doubles.kubernetes_apps import build_agent_role
from doubles.kubernetes_cluster import Fault
from torchx import specs
from torchx.specs.api import AppState

from muster.schedulers.errors import EngineError
from muster.schedulers.kubernetes.api.client import RETRY_BUDGET_S
from muster.schedulers.kubernetes.scheduler import KubernetesScheduler


@pytest.fixture
def app(cluster, scheduler):
    """An app whose only pod runs; its id."""
    app_id = scheduler.submit(specs.AppDef(name="app", roles=[build_agent_role(nodes=1, max_retries=1)]), {})
    cluster.start_pod(cluster.find_pod(app_id.partition(":")[2], 0))
    return app_id


@pytest.mark.parametrize("fault", ["refused", 500, 403])
def test_a_server_that_does_not_come_back_is_given_up_after_more_than_two_minutes(
    cluster, app, scheduler, clock, fault
):
    assert scheduler.describe(app).state is AppState.RUNNING
    began_s = clock.now_s()
    if fault == "refused":
        cluster.server.stop()
    else:
        cluster.faults.append(Fault("", "", fault, "starts", times=10**6))
    with pytest.raises(EngineError, match=r"Connection refused|500 starts|to list jobs"):
        scheduler.describe(app)
    assert RETRY_BUDGET_S - 15 < clock.now_s() - began_s <= RETRY_BUDGET_S
    assert RETRY_BUDGET_S - 15 >= 120


def test_a_right_that_an_account_never_had_is_no_reason_to_wait(cluster, app, clock):
    """The submission has listed jobs; a command in another shell has not."""
    cluster.allowed = {}
    other = KubernetesScheduler("kubernetes", "other", clock=clock)
    began_s = clock.now_s()
    with pytest.raises(EngineError, match="to list jobs"):
        other.describe(app)
    assert clock.now_s() == began_s
    other.close()
