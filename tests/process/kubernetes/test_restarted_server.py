"""The API server is restarted while a command waits: a wait and a followed log go on, as the job does."""

import threading

import pytest
from doubles.kubernetes_apps import build_agent_role
from harness import wait_until
from torchx import specs
from torchx.runner import Runner
from torchx.specs.api import AppState

from muster.schedulers.errors import EngineError
from muster.schedulers.kubernetes.api.client import RETRY_BUDGET_S

pytestmark = pytest.mark.torchx


@pytest.fixture
def app(cluster, scheduler):
    """An app whose only pod runs; its id."""
    role = build_agent_role(nodes=1, max_retries=1)
    app_id = scheduler.submit(specs.AppDef(name="app", roles=[role]), {})
    cluster.start_pod(find_pod(cluster, app_id))
    return app_id


def find_pod(cluster, app_id):
    return cluster.find_pod(app_id.partition(":")[2], 0)


class RestartingClock:
    """A clock whose waits take no time; after some of them the server is there again."""

    def __init__(self, start, after=8):
        self.seconds = 0.0
        self.waits = 0
        self.start, self.after = start, after
        self.lock = threading.Lock()

    def now_s(self):
        return self.seconds

    def sleep(self, seconds):
        with self.lock:
            self.seconds += seconds
            self.waits += 1
            if self.waits == self.after:
                self.start()


@pytest.fixture
def patient(scheduler, double, cluster):
    """The scheduler whose waits for the server are counted: it comes back after 8 of them."""

    def start():
        double.start_again(cluster, forbids=3, fails=3)

    clock = RestartingClock(start)
    scheduler._session._clock = clock
    for client in scheduler._session._clients.values():
        client._clock = clock
    return scheduler


@pytest.mark.soak
def test_a_wait_lasts_through_a_restart_of_the_server(cluster, app, patient, capsys):
    """It ended with "connection refused" after 0.6 s, and with the 403 of a server that starts."""
    runner = Runner("session", {"kubernetes": lambda _name, **_more: patient})
    found = []

    def wait():
        found.append(runner.wait(f"kubernetes://session/{app}", wait_interval=0.01))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    wait_for_requests(cluster, 10)
    cluster.server.stop()
    cluster.end_pod(find_pod(cluster, app), 0)
    waiting.join(60)
    assert [status.state for status in found] == [AppState.SUCCEEDED]
    assert capsys.readouterr().err.count("does not answer") <= 1, "said once"


def wait_for_requests(cluster, number):
    """So many more have been answered."""
    goal = len(cluster.requests) + number
    wait_until(lambda: len(cluster.requests) >= goal)


@pytest.mark.soak
def test_a_followed_log_lasts_through_a_restart_of_the_server(cluster, app, patient):
    cluster.write_log(find_pod(cluster, app), "one\n", 1)
    lines = patient.log_iter(app, "trainer", 0, should_tail=True)
    read = iter(lines)
    assert next(read) == "one\n"
    cluster.server.stop()
    cluster.write_log(find_pod(cluster, app), "two\n", 2)
    assert next(read) == "two\n"
    cluster.end_pod(find_pod(cluster, app), 0)
    assert list(read) == []


@pytest.mark.parametrize("fault", ["refused", 500, 403])
def test_a_server_that_does_not_come_back_is_given_up_after_more_than_two_minutes(
    cluster, app, scheduler, clock, double, fault
):
    assert scheduler.describe(app).state is AppState.RUNNING
    began_s = clock.now_s()
    if fault == "refused":
        cluster.server.stop()
    else:
        cluster.faults.append(double.Fault("", "", fault, "starts", times=10**6))
    with pytest.raises(EngineError, match=r"Connection refused|500 starts|is not allowed to list jobs"):
        scheduler.describe(app)
    assert RETRY_BUDGET_S - 15 < clock.now_s() - began_s <= RETRY_BUDGET_S
    assert RETRY_BUDGET_S - 15 >= 120
    if fault == "refused":
        double.start_again(cluster)


def test_a_right_that_an_account_never_had_is_no_reason_to_wait(cluster, app, clock):
    """The submission has listed jobs; a command in another shell has not."""
    from muster.schedulers.kubernetes.scheduler import KubernetesScheduler

    cluster.allowed = {}
    other = KubernetesScheduler("other", clock=clock)
    began_s = clock.now_s()
    with pytest.raises(EngineError, match="is not allowed to list jobs"):
        other.describe(app)
    assert clock.now_s() == began_s
    other.close()


def test_torchx_run_wait_lasts_through_a_restart_of_the_server(cluster, double, run_and_wait):
    """By the command line, in real time."""
    with run_and_wait() as (waiting, said):
        wait_for_requests(cluster, 2)
        cluster.server.stop()
        for line in waiting.stderr:
            said.append(line)
            if "does not answer" in line:
                break
        double.start_again(cluster, forbids=1)
        cluster.start_pod(next(iter(cluster.find("pods"))))
        cluster.end_pod(next(iter(cluster.find("pods"))), 0)
        said.append(waiting.communicate(timeout=90)[1])
    assert waiting.returncode == 0, "".join(said)
    shown = "".join(said)
    assert f"muster: the API server {cluster.url} does not answer (" in shown
    assert "trying again for 150 s" in shown
    assert "SUCCEEDED" in shown
