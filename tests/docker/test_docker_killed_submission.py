"""A submission that a signal ends, or that fails, leaves nothing; what SIGKILL leaves goes with the next command."""

import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from harness import LIMIT_S
from torchx.specs import AppState, Resource

from muster.cli.commands import main
from muster.schedulers import kubernetes
from muster.schedulers.errors import EngineError
from muster.schedulers.supervision import client as supervision

pytestmark = pytest.mark.docker

BARE = "muster-test:bare"

KILLED = """
import os, pkgutil, signal, sys
from torchx.runner import Runner
from torchx.specs import AppDef, Resource, Role
from muster.schedulers.docker import create_detached_scheduler

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

where, name, workspace = sys.argv[1:]
setattr(pkgutil.resolve_name(where), name, die)
resource = Resource(cpu=-1, gpu=1, memMB=0)
role = Role("w", image="tiny", entrypoint="sh", args=["-c", "true"], resource=resource)
Runner("test", {"docker": create_detached_scheduler}).run(AppDef("killed", roles=[role]), "docker", {}, workspace)
"""

POINTS = {
    "image_check": ("muster.schedulers.docker.engine:Engine", "wait_container"),
    "reserved": ("muster.schedulers.docker.running_apps.creation", "_join_network"),
    "created": ("muster.schedulers.supervision.client", "submit"),
    "registered": ("muster.schedulers.supervision.client", "start_supervisor"),
}


def list_left(apps):
    """Names of all that the engine has of any app."""
    label = {"label": "io.muster.app"}
    api = apps.client.api
    return [
        *api.containers(all=True, filters=label),
        *api.networks(filters=label),
        *(api.volumes(filters=label)["Volumes"] or ()),
    ]


@pytest.fixture
def killed(apps_with_gpus, state_home, tmp_path, request):
    """The app id of a submission that was killed at a point."""
    (state_home / "muster" / "docker-images").unlink()  # images are tried again
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "main.py").touch()
    words = [sys.executable, "-c", KILLED, *POINTS[request.param], str(tmp_path / "code")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list_left(apps_with_gpus)
    (mark,) = (state_home / "muster" / "docker-submissions").iterdir()
    os.utime(mark, (0, 0))  # no supervisor is just starting any more
    return mark.name


def at(*points):
    """A submission that was killed at each of these points, and in the long tests at the others, too."""
    rest = [pytest.param(each, marks=pytest.mark.long) for each in POINTS if each not in points]
    return pytest.mark.parametrize("killed", [*points, *rest], indirect=True)


@at("created")
def test_the_next_submission_removes_what_a_killed_one_has_left(killed, apps_with_gpus, app_of, state_home, tmp_path):
    app = app_of("sleep 600", image="tiny")
    app.roles[0].resource = Resource(cpu=-1, gpu=3, memMB=0)  # all that the engine has
    app_id = apps_with_gpus.run(app, workspace=str(tmp_path / "code"))
    assert apps_with_gpus.left(killed) == []
    assert not (state_home / "muster" / "docker-apps" / killed).exists()
    assert list((state_home / "muster" / "docker-submissions").iterdir()) == []
    assert [item.app_id for item in apps_with_gpus.scheduler.list()] == [app_id]


@at("registered")
def test_prune_removes_what_a_killed_submission_has_left(killed, apps_with_gpus, state_home, shell):
    done = shell("prune", "--yes")
    assert (done.code, f"docker://{killed}" in done.out) == (0, True), done
    assert list_left(apps_with_gpus) == []
    assert sorted(path.name for path in (state_home / "muster").rglob(f"*{killed}*")) == []


@pytest.mark.alone
@pytest.mark.parametrize("point", ["created", pytest.param("registered", marks=pytest.mark.long)])
def test_prune_leaves_an_app_alone_that_is_being_submitted(apps, app_of, monkeypatch, point):
    """Its containers were created, no state folder told of them yet, and they were removed."""

    def prune_and_go_on(*args, **named):
        assert main(["prune", "--yes"]) == 0
        return go_on(*args, **named)

    name = {"created": "submit", "registered": "start_supervisor"}[point]
    go_on = getattr(supervision, name)
    monkeypatch.setattr(supervision, name, prune_and_go_on)
    app_id = apps.run(app_of("echo runs", image=BARE))
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    assert apps.logs(app_id) == ["runs\n"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_command_that_a_signal_ends_leaves_nothing(apps, state_home, tmp_path, wait_until, signum):
    """Its containers and network stayed on the engine."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "weights").write_bytes(os.urandom(40 << 20))
    words = ["run", "-s", "docker", "--workspace", f"file://{code}", "utils.sh", "--image", BARE, "sleep", "600"]
    env = {**os.environ, "TORCHX_CONFIG": "", "PYTHONWARNINGS": ""}
    state = state_home / "muster"
    process = subprocess.Popen(
        [Path(sys.executable).with_name("torchx"), *words], cwd=tmp_path, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        (mark,) = wait_until(lambda: list((state / "docker-submissions").glob("*")), "a submission")
        wait_until(lambda: apps.left(mark.name) or process.poll() is not None, "something of it")
        process.send_signal(signum)
        _, err = process.communicate(timeout=200)
    finally:
        process.kill()
        process.communicate()
    assert "Traceback" not in err, err
    assert process.returncode == -signum
    wait_until(lambda: not apps.left(mark.name), "end of all of it")  # the engine may still be removing a probe
    assert [*(state / "docker-submissions").iterdir(), *(state / "docker-apps").glob("*")] == []


@pytest.fixture
def list_all(apps_of_own_engine):
    """A function: names of all images, and ids of all containers of the engine."""
    api = apps_of_own_engine.client.api
    named = {"dangling": False}
    return lambda: (
        {tag for image in api.images(filters=named) for tag in image["RepoTags"]},
        {each["Id"] for each in api.containers(all=True)},
    )


IMAGE_REPO = {"image_repo": "127.0.0.1:1/x", "quiet": True}


@pytest.fixture
def code(tmp_path):
    """An empty folder; the state is beside it."""
    (tmp_path / "code").mkdir()
    return tmp_path / "code"


def test_a_build_that_fails_is_one_line_and_leaves_no_container_and_no_name(apps_of_own_engine, app_of, code, list_all):
    """Also for a cluster: TorchX's builder left a container, and its error was a traceback."""
    before = list_all()
    (code / "Dockerfile.torchx").write_text("ARG IMAGE\nFROM $IMAGE\nRUN echo a >/a\nRUN echo b >/b\nRUN exit 3\n")
    why = "The command '/bin/sh -c exit 3' returned a non-zero code: 3"
    app = app_of("true", image="tiny")
    with pytest.raises(RuntimeError, match=re.escape(why)):
        apps_of_own_engine.run(app, workspace=str(code))
    assert list_all() == before
    line = re.escape(f"cannot build the workspace's image: {why}")
    with closing(kubernetes.create_scheduler("test")) as scheduler, pytest.raises(EngineError, match=f"^{line}$"):
        scheduler.build_workspace_and_update_role(app.roles[0], str(code), IMAGE_REPO)
    assert list_all() == before


def test_an_image_for_a_cluster_has_the_workspace_and_a_push_that_fails_is_one_line(apps_of_own_engine, app_of, code):
    for name in ("folder", "heavy"):
        (code / name).mkdir()
        (code / name / "data").write_text("in the image\n")
    (code / "link").symlink_to("folder")  # TorchX cannot pack it
    (code / ".dockerignore").write_text("heavy\n")
    app = app_of("true", image="tiny")
    with closing(kubernetes.create_scheduler("test")) as scheduler:
        scheduler.build_workspace_and_update_role(app.roles[0], str(code), IMAGE_REPO)
        info = scheduler.submit_dryrun(app, IMAGE_REPO)
        (built,) = info.request.images_to_push
        shell = ["sh", "-c", "read line <link/data; echo $line; echo *"]
        said = apps_of_own_engine.client.containers.run(built, shell, remove=True)
        assert said.startswith(b"in the image\n")
        assert b"link" in said
        assert b"heavy" not in said
        with pytest.raises(EngineError, match=r"docker image: .*127\.0\.0\.1:1: connect: "):
            scheduler.schedule(info)


def test_a_build_for_a_cluster_without_an_engine_is_one_line(app_of, tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    (role,) = app_of("true").roles
    with pytest.raises(EngineError, match=r"^image_repo .* unix://"):
        kubernetes.create_scheduler("test").build_workspace_and_update_role(role, str(tmp_path), IMAGE_REPO)
