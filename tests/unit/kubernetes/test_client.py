"""Requests to what is no API server of Kubernetes, and to one that is away, starts again, or whose node is."""

from types import SimpleNamespace

import pytest
from doubles.kubernetes_apps import build_agent_role
from doubles.kubernetes_cluster import Fault
from torchx import specs
from torchx.specs.api import AppState

from muster.schedulers.errors import EngineError
from muster.schedulers.kubernetes.api.client import RETRY_BUDGET_S, Client
from muster.schedulers.kubernetes.api.connection import Access
from muster.schedulers.kubernetes.api.errors import ApiError, Unreachable
from muster.schedulers.kubernetes.scheduler import KubernetesScheduler


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"<html>\n  <body>Log in</body></html>", "'<html> <body>Log in</body></html>'"),
        (b'["a"]', "'[\"a\"]'"),
        (b"\xff" * 1000, repr("\N{REPLACEMENT CHARACTER}" * 100)),
    ],
)
def test_a_page_in_place_of_an_object_is_one_line(body, shown):
    """It was a traceback."""
    pool = SimpleNamespace(request=lambda *_args, **_more: SimpleNamespace(status=200, data=body), clear=lambda: None)
    connection = SimpleNamespace(host="https://web", origin="context c", pool=pool, build_auth_headers=dict)
    client = Client(Access(), connect=lambda _access: connection)
    with pytest.raises(Unreachable) as error:
        client.request("GET", "/apis/batch/v1/jobs", what="jobs", verb="list")
    assert f": it sent {shown}" in str(error.value)


def test_a_node_that_does_not_answer_is_not_told_as_the_server():
    """It said "the API server does not answer: trying again for 150 s", and tried for less."""
    answers = [SimpleNamespace(status=200, data=b"{}", headers={})]
    gone = SimpleNamespace(status=500, data=b"dial: no route to host", headers={})
    pool = SimpleNamespace(request=lambda *_a, **_m: answers.pop() if answers else gone, clear=lambda: None)
    connection = SimpleNamespace(host="https://web", origin="context c", pool=pool, build_auth_headers=dict)
    sleeps, lines = [], []
    clock = SimpleNamespace(now_s=lambda: sum(sleeps), sleep=sleeps.append)
    client = Client(Access(), connect=lambda _access: connection, clock=clock, notify=lines.append)
    client.request("GET", "/version", what="the version", verb="read")
    with pytest.raises(ApiError):
        client.read_bytes("/log", what="log of p", query={}, limit_s=30.0)
    assert sum(sleeps) > 3
    assert lines == []
    with pytest.raises(ApiError):
        client.request("GET", "/version", what="the version", verb="read")
    said = "does not answer (500 dial: no route to host): trying again for 150 s"
    assert lines == [f"the API server https://web {said}"]


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
