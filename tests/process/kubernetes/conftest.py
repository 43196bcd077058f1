"""The double of the API server."""

import pytest
from doubles import kubernetes_api

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
