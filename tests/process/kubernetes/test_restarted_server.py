"""The API server is restarted while a command waits: a wait and a followed log go on, as the job does."""

import threading

import pytest
from doubles.kubernetes_apps import build_agent_role
from harness import wait_until
from torchx import specs
from torchx.runner import Runner
from torchx.specs.api import AppState


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
    scheduler._clock = clock
    for client in scheduler._clients.values():
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
