"""The model of the API server, without sockets, and a scheduler that talks to it."""

import functools

import pytest
import yaml
from doubles import kubernetes_memory
from doubles.kubernetes_apps import RecordedClock
from doubles.kubernetes_cluster import write_kubeconfig

WAITS = {"logs._LOOK_S": 0.05, "logs._POLL_INTERVAL_S": 0.05}
"""Of threads, which wait for each other by the machine's clock."""

pytest.importorskip("kubernetes", reason="the Kubernetes client is not installed")


@pytest.fixture(autouse=True)
def small_agent(monkeypatch):
    """Its own tests pack it."""
    monkeypatch.setattr("muster.schedulers.kubernetes.manifests.bundles.build_agent_bundle", lambda: b"the agent")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with kubernetes_memory.connect(monkeypatch) as running:
        write_kubeconfig(tmp_path / "kubeconfig", running)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        # the same in C: each session reads a kubeconfig
        monkeypatch.setattr(yaml, "safe_load", functools.partial(yaml.load, Loader=yaml.CSafeLoader))
        for name, seconds in WAITS.items():
            monkeypatch.setattr(f"muster.schedulers.kubernetes.running_apps.{name}", seconds)
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
