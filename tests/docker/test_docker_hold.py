"""`muster hold -s local_docker`: containers whose agents wait for runs."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import held_runs
import pytest
from harness import wait_until
from held_runs import SLEEP, Commands, Held, HeldContract

from muster.schedulers.docker.engine.client import Engine

pytestmark = pytest.mark.docker
IMAGE = ("--image", "muster-test:torch")


FACTS = """
import json, os, resource, signal, sys, threading
import torch
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
facts = {
    "environ": {k: v for k, v in os.environ.items() if not k.startswith(VARYING)},
    "argv": sys.argv, "path": sys.path[1:], "flags": str(sys.flags), "orig_argv": sys.orig_argv[1:],
    "is_in_cwd": sys.path[0] == os.getcwd(), "files": sorted(os.listdir()),
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
    "signals": {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
    "status": {k: status[k].strip() for k in ("Umask", "SigBlk", "SigIgn", "CapEff", "Groups", "NoNewPrivs")},
    "nice": os.nice(0), "cpus": sorted(os.sched_getaffinity(0)), "oom": open("/proc/self/oom_score_adj").read(),
    "threads": threading.active_count(), "torch_threads": torch.get_num_threads(), "umask": os.umask(0),
    "stdin": os.readlink("/proc/self/fd/0"), "shm": sorted(os.listdir("/dev/shm")),
    "modules": sorted(n for n in sys.modules if n.partition(".")[0] == "muster"),
}
print("facts", json.dumps(facts, sort_keys=True), flush=True)
"""
VARYING = ("TORCHELASTIC_", "MASTER_", "MUSTER_", "TORCHX_", "KUBEFLOW_", "HOSTNAME")
"""Prefixes of variables that have a job's id, folder, container or port."""


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """A hold of two containers that the tests leave usable."""
    commands = Commands(tmp_path_factory.mktemp("held"))
    made = commands.hold("-s", "local_docker", "dist.ddp", "-j", "2x1", *IMAGE)
    yield made
    done = commands.call("muster", "release", "--now")
    commands.call("muster", "delete", made.handle)
    assert done.returncode == 0, done


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """For holds of a test's own."""
    made = Commands(tmp_path)
    yield made
    made.call("muster", "release", "--now")
    for each in made.call("muster", "list", "-s", "docker", "--json").stdout.splitlines():
        for app in json.loads(each)["apps"]:
            if app["handle"].startswith("docker://hold-") and "another home folder" not in json.dumps(app):
                made.call("muster", "delete", app["handle"])


@pytest.fixture
def hold_one(commands: Commands) -> Callable[..., Held]:
    words = ("dist.ddp", "-j", "1x1", "--max_retries", "3", *IMAGE)
    return lambda *options: commands.hold("-s", "local_docker", *options, *words)


class TestHolds(HeldContract):
    """Holds of containers."""


def list_containers(client: Any, held: Held) -> list[Any]:
    """Its containers, by node."""
    found = client.containers.list(filters={"label": [f"io.muster.app={held.app_id}", "io.muster.role"]})
    return sorted(found, key=lambda each: each.labels["io.muster.replica"])


@pytest.mark.long
def test_a_worker_sees_what_it_would_in_a_container_of_its_own(held: Held) -> None:
    commands = held.commands
    for each in commands.work.iterdir():
        each.unlink()
    (commands.work / "main.py").write_text(FACTS.replace("VARYING", repr(VARYING)))
    found = []
    for name in ("held", "local_docker"):
        job = ("dist.ddp", "-j", "1x1", *IMAGE, "--script", "main.py")
        done = commands.call("muster", "run", "-s", name, "-cfg", "env=WORD:a b", *job)
        assert done.returncode == 0, done
        (line,) = (line for line in done.stderr.splitlines() if "]:facts " in line)
        found.append(json.loads(line.partition("]:facts ")[2]))
        commands.call("muster", "delete", done.stdout.strip().replace("torchx/", ""))
    assert found[0] == found[1]
    assert found[0]["environ"]["WORD"] == "a b"
    assert found[0]["files"] == ["main.py"]


@pytest.mark.long
def test_a_run_whose_agent_is_killed_fails_and_the_hold_goes_on(held: Held, client: Any) -> None:
    container = list_containers(client, held)[0]
    with held.commands.started(SLEEP, "main") as run:
        top = container.top(ps_args="-eo pid,args")["Processes"]
        agent = max(int(pid) for pid, words in top if "--muster-waiting" in words)
        os.kill(agent, signal.SIGKILL)
        assert run.wait_end() == 1, run.text
    held.wait_idle()
    held_runs.check_two_runs(held)


@pytest.mark.long
def test_nothing_of_many_runs_is_left(held: Held, client: Any) -> None:
    def look() -> object:
        seen = []
        for container in list_containers(client, held):
            names = sorted(words.split()[0] for _, words in container.top(ps_args="-eo pid,args")["Processes"])
            command = "find /var/opt/muster/logs -name 'main-*' | wc -l; ls /dev/shm"
            with closing(Engine(os.environ)) as engine:
                code, files, errors = engine.run_inside(container.id, ["sh", "-c", command])
            assert code == 0, errors
            seen.append((names, files))
        return seen

    held_runs.check_many_runs(held, look)


@pytest.mark.long
def test_a_container_that_is_lost_while_idle_is_replaced(commands: Commands, client: Any) -> None:
    held = commands.hold("-s", "local_docker", "dist.ddp", "-j", "2x1", "--max_retries", "1", *IMAGE)
    list_containers(client, held)[1].kill()
    held_runs_ready = lambda: len(list_containers(client, held)) == 2  # noqa: E731
    wait_until(held_runs_ready, timeout_s=60, what="another container runs")
    wait_until(lambda: commands.run(held_runs.REDUCE).returncode == 0, timeout_s=120, what="a run on it succeeds")


@pytest.mark.long
def test_a_run_whose_node_is_lost_fails_with_its_reason(commands: Commands, client: Any) -> None:
    held = commands.hold("-s", "local_docker", "dist.ddp", "-j", "2x1", *IMAGE)
    with commands.started(SLEEP, "main") as run:
        list_containers(client, held)[1].kill()
        assert run.wait_end() == 1, run.text
    status = commands.call("muster", "status", run.app_id).stdout
    assert f"node 1 of {held.handle}" in status, status
