"""`muster hold -s kubernetes`, of the double of the API server: pods whose agents wait for runs."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import held_runs
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
def test_a_run_from_another_machine_is_refused_by_the_holder(held: Held, tmp_path: Path) -> None:
    """Another state folder knows nothing of the first run, and has the hold by its handle."""
    other = Commands(tmp_path, {"KUBECONFIG": held.commands.env["KUBECONFIG"]})
    with held.commands.started(SLEEP, "first") as first:
        done = other.run(held_runs.REDUCE, cfg=f"app={held.handle}")
        assert done.returncode == 1, done
        assert f"hold runs {first.app_id} now; " in done.stderr, done.stderr
        listed = other.call("muster", "status", held.handle)
        assert f"held: it runs {first.app_id}" in listed.stdout, listed
    held.wait_idle()


@pytest.mark.long
def test_a_run_from_another_machine_waits_if_it_is_told_to(held: Held, tmp_path: Path) -> None:
    other = Commands(tmp_path, {"KUBECONFIG": held.commands.env["KUBECONFIG"]})
    (other.work / "main.py").write_text(held_runs.REDUCE)
    words = [
        "run",
        "-s",
        "held",
        "-cfg",
        f"wait=true,app={held.handle}",
        "dist.ddp",
        "-j",
        "2x1",
        "--script",
        "main.py",
    ]
    with held.commands.started(SLEEP, "first") as first:
        command = [str(held_runs.BIN / "muster"), *words]
        second = subprocess.Popen(
            command, cwd=other.work, env=other.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert second.stderr is not None
        line = next(line for line in second.stderr if "waiting for" in line)
        assert f"waiting for {first.app_id} on {held.handle}" in line
        first.process.send_signal(signal.SIGINT)
        first.wait_end()
        rest = second.communicate(timeout=90)[1]
        assert (second.returncode, rest.count("sum 2.0")) == (0, 2), rest
    held.wait_idle()


@pytest.mark.long
def test_a_run_whose_pod_is_lost_fails_with_its_reason(pods: tuple[Any, Any, Path], commands: Commands) -> None:
    cluster, kubelet, _ = pods
    held = commands.hold(*WORDS, "dist.ddp", "-j", "2x1", "--image", "img")
    with commands.started(SLEEP, "main") as run:
        kubelet.kill(cluster.find_pod(held.app_id.partition(":")[2], 1))
        assert run.wait_end() == 1, run.text
    assert "FAILED" in commands.call("muster", "status", run.app_id).stdout
