"""The double of the API server and a scheduler that talks to it."""

import importlib.util
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("kubernetes", reason="the Kubernetes client is not installed")

_DOUBLE = Path(__file__).resolve().parents[2] / "doubles" / "kubernetes_api.py"


def _load():
    spec = importlib.util.spec_from_file_location("kubernetes_api", _DOUBLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class RecordedClock:
    """A clock whose sleeps take no time and are recorded."""

    def __init__(self):
        self.sleeps = []
        self.lock = threading.Lock()

    def now_s(self):
        return sum(self.sleeps)

    def sleep(self, seconds):
        with self.lock:
            self.sleeps.append(seconds)


@pytest.fixture(scope="session")
def double():
    return _load()


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
    from muster.schedulers.kubernetes.scheduler import KubernetesScheduler

    made = KubernetesScheduler("session", clock=clock)
    yield made
    made.close()


@pytest.fixture
def run_and_wait(cluster, tmp_path):
    """Runs `torchx run --wait` until it waits; gives the process, and its lines on stderr so far."""

    @contextmanager
    def run():
        (tmp_path / "main.py").write_text("print('hello')\n")
        command = [sys.executable, "-m", "torchx.cli.main", "run", "-s", "kubernetes", "--wait"]
        command += ["dist.ddp", "-j", "1x1", "--script", "main.py"]
        environment = {**os.environ, "HOME": str(tmp_path)}
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as waiting:
            said = []
            for line in waiting.stderr:
                said.append(line)
                if "Waiting for the app to finish" in line:
                    break
            yield waiting, said

    return run
