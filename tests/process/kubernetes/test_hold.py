"""`muster hold -s kubernetes`, of the double of the API server: pods whose agents wait for runs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doubles.kubernetes_kubelet import run_kubelet
from held_runs import SLEEP, Commands, Held, HeldContract

WORDS = ("-s", "kubernetes", "-cfg", "namespace=team")


@pytest.fixture(scope="module")
def pods(double: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Path]]:
    """A cluster whose pods run, and a folder with its kubeconfig."""
    folder = tmp_path_factory.mktemp("cluster")
    with double.serve() as cluster, run_kubelet(cluster, folder / "pods") as kubelet:
        double.write_kubeconfig(folder / "kubeconfig", cluster)
        yield cluster, kubelet, folder


@pytest.fixture(scope="module")
def held(pods: tuple[Any, Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """A hold of two pods that the tests leave usable."""
    commands = Commands(tmp_path_factory.mktemp("held"), {"KUBECONFIG": str(pods[2] / "kubeconfig")})
    yield commands.hold(*WORDS, "dist.ddp", "-j", "2x1", "--image", "img")
    done = commands.call("muster", "release", "--now")
    assert done.returncode == 0, done


@pytest.fixture
def commands(pods: tuple[Any, Any, Path], tmp_path: Path) -> Iterator[Commands]:
    """For holds of a test's own."""
    made = Commands(tmp_path, {"KUBECONFIG": str(pods[2] / "kubeconfig")})
    yield made
    made.call("muster", "release", "--now")


@pytest.fixture
def hold_one(commands: Commands) -> Callable[..., Held]:
    words = ("dist.ddp", "-j", "1x1", "--max_retries", "3", "--image", "img")
    return lambda *options: commands.hold(*WORDS, *options, *words)


def test_two_runs_after_one_another(held: Held) -> None:
    HeldContract().test_two_runs_after_one_another(held)


@pytest.mark.long
class TestHolds(HeldContract):
    """Holds of pods."""

    test_two_runs_after_one_another = None  # type: ignore[assignment]  # above


@pytest.mark.long
def test_a_run_whose_pod_is_lost_fails_with_its_reason(pods: tuple[Any, Any, Path], commands: Commands) -> None:
    cluster, kubelet, _ = pods
    held = commands.hold(*WORDS, "dist.ddp", "-j", "2x1", "--image", "img")
    with commands.started(SLEEP, "main") as run:
        kubelet.kill(cluster.find_pod(held.app_id.partition(":")[2], 1))
        assert run.wait_end() == 1, run.text
    assert "FAILED" in commands.call("muster", "status", run.app_id).stdout
