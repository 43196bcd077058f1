"""The double of the API server and a scheduler that talks to it."""

import importlib.util
import threading
from pathlib import Path

import pytest

pytest.importorskip("kubernetes", reason="the Kubernetes client is not installed")

_DOUBLE = Path(__file__).resolve().parents[2] / "doubles" / "kubernetes_api.py"


def _load():
    spec = importlib.util.spec_from_file_location("kubernetes_api", _DOUBLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class RecordedPace:
    """Time that does not pass; remembers what was waited for."""

    def __init__(self):
        self.pauses = []
        self.lock = threading.Lock()

    def now_s(self):
        return sum(self.pauses)

    def pause(self, seconds):
        with self.lock:
            self.pauses.append(seconds)


@pytest.fixture(scope="session")
def double():
    return _load()


@pytest.fixture
def cluster(double, tmp_path, monkeypatch):
    with double.serve() as running:
        double.write_kubeconfig(tmp_path / "kubeconfig", running)
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        yield running


@pytest.fixture
def pace():
    return RecordedPace()


@pytest.fixture
def scheduler(cluster, pace):
    from muster.schedulers.kubernetes.scheduler import KubernetesScheduler

    made = KubernetesScheduler("session", pace=pace)
    yield made
    made.close()
