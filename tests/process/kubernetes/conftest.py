"""The double of the API server and a scheduler that talks to it."""

import pytest
from doubles import kubernetes_api
from doubles.kubernetes_apps import RecordedClock

pytest.importorskip("kubernetes", reason="the Kubernetes client is not installed")


@pytest.fixture(scope="session")
def double():
    return kubernetes_api


@pytest.fixture
def cluster(double, tmp_path, monkeypatch):
    with double.serve() as running:
        double.write_kubeconfig(tmp_path / "kubeconfig", running)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        yield running


@pytest.fixture
def clock():
    return RecordedClock()


@pytest.fixture
def scheduler(cluster, clock):
    from muster.schedulers.kubernetes import create_scheduler
    from muster.schedulers.kubernetes.scheduler import KubernetesScheduler

    made = KubernetesScheduler("kubernetes", "session", clock=clock)
    made.properties = create_scheduler.properties
    yield made
    made.close()
