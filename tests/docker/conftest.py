"""A real engine and its test images (.ci/docker-engine, .ci/docker-image), and a TorchX runner over our schedulers.

Two workers of pytest-xdist share the engine, each with files of its own: a test looks only at what it made itself, and
what it gives a name of its own choice has that name in no other file. The rest is marked `alone`.
"""

import os
import shutil
import socket
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import LIMIT_S, skip_or_fail, wait_until

from muster.schedulers.docker.engine import Engine
from muster.schedulers.docker.sdk import DEFAULT_HOST

IMAGE = "muster-test:torch"
BARE = "muster-test:bare"
FAKE_GPUS = ("GPU-aaaa", "GPU-bbbb", "GPU-cccc")
DEADLINE_S = 90.0


def _missing(images):
    """Why these tests cannot run here; None when they can."""
    try:
        import docker
    except ImportError:
        return "the docker package is not installed"
    try:
        _look_for_socket()
        client = docker.from_env(timeout=LIMIT_S)
        have = {tag for image in client.images.list() for tag in image.tags}
        client.close()
    except (OSError, docker.errors.DockerException) as error:
        return f"no Docker engine answers: {error}"
    lacking = [image for image in images if image not in have]
    return f"the engine lacks {', '.join(lacking)}; make them with .ci/docker-image" if lacking else None


def _look_for_socket():
    """Raise OSError where nothing answers at the engine's socket: the SDK would leave its own end of it open."""
    path = os.environ.get("DOCKER_HOST", DEFAULT_HOST).removeprefix("unix://")
    if path.startswith("/"):
        with socket.socket(socket.AF_UNIX) as end:
            end.settimeout(60)
            end.connect(path)


@pytest.fixture(scope="session", autouse=True)
def _engine_or_skip():
    reason = _missing([IMAGE, BARE])
    if reason is not None:
        skip_or_fail("docker", reason)


@pytest.fixture
def client(_engine_or_skip):
    """The engine's own client, to inspect what was created."""
    import docker

    client = docker.from_env(timeout=LIMIT_S)
    yield client
    client.close()


@pytest.fixture(scope="session")
def tiny_tar(_engine_or_skip):
    """The root of an image of 3 MB, as a tar: a shell and a few commands."""
    import docker

    client = docker.from_env(timeout=LIMIT_S)
    commands = "/bin/sh /bin/sleep /bin/hostname /usr/bin/getent"
    files = f"{commands} $(ldd {commands} | grep -o '/lib[^ ]*\\.[0-9]*' | sort -u)"
    container = client.containers.create(BARE, ["sh", "-c", f"mkdir /tiny && cp -L --parents {files} /tiny"])
    try:
        container.start()
        assert container.wait()["StatusCode"] == 0
        stream, _ = container.get_archive("/tiny/.")
        return b"".join(stream)
    finally:
        container.remove()
        client.close()


class Apps:
    """Submits apps, looks at them, and removes them all at the end of a test."""

    def __init__(self, client):
        from torchx.runner import Runner

        from muster.schedulers.docker import create_detached_scheduler, create_scheduler

        self.client = client
        self.ids = []
        factories = {"docker": create_detached_scheduler, "local_docker": create_scheduler}
        self.runner = Runner("test", factories)

    def run(self, app, scheduler="docker", workspace=None, **cfg):
        """Submit; returns the app's id."""
        handle = self.runner.run(app, scheduler, cfg=cfg, workspace=workspace)
        app_id = handle.rsplit("/", 1)[1]
        self.ids.append(app_id)
        return app_id

    def status(self, app_id, scheduler="docker"):
        return self.runner.status(f"{scheduler}://test/{app_id}")

    def wait(self, app_id, deadline_s=DEADLINE_S):
        """Wait for the end of its supervisor, which starts again when it died; returns TorchX's status."""
        from muster.schedulers.supervision import client

        client.read_app(folder := self.scheduler.find_folder(app_id))
        if not client.wait_ended(folder, limit_s=deadline_s):
            pytest.fail(f"end of {app_id}: not within {deadline_s:g} s\n{self._show(app_id, folder)}")
        return self.status(app_id)

    def _show(self, app_id, folder):
        """What an app that has not ended has recorded and printed."""
        shown = [folder.state_file.read_text(), folder.log_file.read_text()]
        for container in self.containers(app_id):
            output = container.logs(timestamps=True, tail=40).decode(errors="replace")
            shown.append(f"{container.name} {container.id[:12]}: {container.attrs['State']}\n{output}")
        return "\n".join(shown)

    def logs(self, app_id, role="w", replica=0, **how):
        return list(self.runner.log_lines(f"docker://test/{app_id}", role, replica, **how))

    def containers(self, app_id, *, every=True, **labels):
        """The app's replicas' containers, as the engine has them."""
        wanted = [f"io.muster.app={app_id}", "io.muster.role", *(f"io.muster.{k}={v}" for k, v in labels.items())]
        return self.client.containers.list(all=every, filters={"label": wanted}, ignore_removed=True)

    def inside(self, app_id, command, role="w", replica=0):
        """The output of a command in a replica's container."""
        (container,) = self.containers(app_id, every=False, role=role, replica=replica)
        with closing(Engine(os.environ)) as engine:
            code, said, errors = engine.run_inside(container.id, ["sh", "-c", command])
        assert code == 0, said + errors
        return said

    def cancel(self, app_id):
        self.runner.cancel(f"docker://test/{app_id}")

    def delete(self, app_id):
        self.scheduler.delete(app_id)

    @property
    def scheduler(self):
        return self.runner._scheduler("docker")

    def left(self, app_id):
        """All that the engine holds of an app."""
        label = {"label": f"io.muster.app={app_id}"}
        return (
            self.client.containers.list(all=True, filters=label, ignore_removed=True)
            + self.client.networks.list(filters=label)
            + self.client.volumes.list(filters=label)
            + self.client.images.list(filters=label)
        )

    def refuse(self, app, message, **cfg):
        """Submit an app that must be refused: in one line, with nothing of it left."""
        from muster.schedulers.errors import EngineError

        app.name = f"refused-{os.urandom(4).hex()}"
        with pytest.raises(EngineError, match=message) as raised:
            self.run(app, **cfg)
        assert "\n" not in str(raised.value)
        # the plain lists: what is in them may be gone when the client looks at it
        api, label = self.client.api, {"label": "io.muster.app"}
        kept = [api.containers(all=True, filters=label), api.networks(filters=label)]
        kept += [api.volumes(filters=label), api.images(filters=label)]
        assert app.name not in str(kept)

    def remove_all(self):
        """Kill and delete whatever the test submitted."""
        from muster.schedulers.supervision import client

        for app_id in self.ids:
            folder = self.scheduler.find_folder(app_id)
            if folder is not None:
                client.request_stop(folder, "kill")
            self.delete(app_id)

    def close(self):
        self.remove_all()
        self.runner.close()


@pytest.fixture(scope="session")
def seen_images(tmp_path_factory):
    """What submissions found out about images; kept from test to test, or each would try each image again."""
    return tmp_path_factory.mktemp("images")


@pytest.fixture
def state_home(tmp_path, seen_images, monkeypatch):
    """A state folder of the test's own: the developer's apps are not touched."""
    folder = tmp_path / "state"
    (folder / "muster").mkdir(parents=True, mode=0o700)
    (folder / "muster" / "docker-images").symlink_to(seen_images)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


@pytest.fixture
def apps_on(state_home):
    """Makes `Apps` of an engine's client; DOCKER_HOST names the same engine."""
    made = []

    def make(client):
        made.append(Apps(client))
        return made[-1]

    yield make
    for apps in made:
        apps.close()
        assert [thing for app_id in apps.ids for thing in apps.left(app_id)] == []


@pytest.fixture
def apps(client, apps_on):
    return apps_on(client)


@pytest.fixture(scope="session")
def fake_tools(tmp_path_factory):
    """NVIDIA's hook, which does nothing, and `nvidia-smi`, which lists three GPUs; a folder for PATH."""
    folder = tmp_path_factory.mktemp("nvidia")
    listing = "".join(f"GPU {index}: NVIDIA H200 (UUID: {uuid})\n" for index, uuid in enumerate(FAKE_GPUS))
    (folder / "nvidia-container-runtime-hook").write_text("#!/bin/sh\nexit 0\n")
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<END\n{listing}END\n")
    for tool in folder.iterdir():
        tool.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def own_engine(_engine_or_skip, fake_tools, tiny_tar, wait_until):
    """Address of an engine for tests alone: with the fake hook, room for 8 networks, and the image `tiny`."""
    import docker

    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("only root can start an engine, and dockerd must be installed")
    folder = Path(tempfile.mkdtemp(prefix="muster-engine-"))  # short: sockets lie in it
    host = f"unix://{folder}/docker.sock"
    # In a network namespace of its own: beside another engine it would use that engine's bridge and rules.
    words = ["unshare", "--net", "dockerd", "--host", host, "--pidfile", folder / "pid"]
    words += ["--data-root", folder / "data", "--exec-root", folder / "exec"]
    words += ["--default-address-pool", "base=10.213.0.0/24,size=27"]
    words += ["--storage-driver", os.environ.get("MUSTER_DOCKER_STORAGE", "overlay2")]
    env = {**os.environ, "PATH": f"{fake_tools}:{os.environ['PATH']}"}
    log = folder / "log"
    with log.open("w") as said:
        process = subprocess.Popen(words, env=env, stdout=said, stderr=said, start_new_session=True)
    try:
        wait_until(lambda: process.poll() is not None or "API listen on" in log.read_text(), "an engine")
        assert process.poll() is None, log.read_text()
        client = docker.DockerClient(host, timeout=LIMIT_S)
        client.api.import_image_from_data(tiny_tar, repository="tiny", tag="latest")
        client.close()
        yield host
    finally:
        process.terminate()
        process.wait(timeout=LIMIT_S)
        shutil.rmtree(folder)


@pytest.fixture
def apps_of_own_engine(own_engine, apps_on, monkeypatch):
    import docker

    monkeypatch.setenv("DOCKER_HOST", own_engine)
    client = docker.DockerClient(own_engine, timeout=LIMIT_S)
    yield apps_on(client)
    client.close()


@pytest.fixture
def apps_with_gpus(apps_of_own_engine, fake_tools, monkeypatch):
    monkeypatch.setenv("PATH", f"{fake_tools}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return apps_of_own_engine


@pytest.fixture
def make_image(client):
    """Makes an image out of the test image: what a change to a container of it leaves."""
    made = []

    def make(tag, command="true", files=None, changes=None):
        container = client.containers.create(IMAGE, ["sh", "-c", command])
        try:
            if files is not None:
                container.put_archive("/", files)
            container.start()
            assert container.wait()["StatusCode"] == 0
            container.commit("muster-test", tag, changes=changes)
        finally:
            container.remove()
        made.append(f"muster-test:{tag}")
        return made[-1]

    yield make
    for image in made:
        client.images.remove(image, force=True)


@pytest.fixture
def shell(capsys):
    """Runs a command of `muster` in this process; it has `code`, `out` and `err`."""
    from muster.cli.commands import main

    def run(*words):
        capsys.readouterr()
        code = main([*words])
        return SimpleNamespace(code=code, **capsys.readouterr()._asdict())

    return run


@pytest.fixture
def volume(client, apps):
    """A volume of the engine; removed after the containers that use it."""
    volume = client.volumes.create()
    yield volume
    apps.remove_all()
    volume.remove(force=True)


@pytest.fixture
def app_of():
    """Makes an AppDef of one role that runs a shell command."""
    from torchx.specs import AppDef, Resource, Role

    def make(command, *, replicas=1, name="app", role="w", image=IMAGE, memory_mb=0, **role_args):
        resource = Resource(cpu=-1, gpu=0, memMB=memory_mb)
        what = {"entrypoint": "sh", "args": ["-c", command], "resource": resource, **role_args}
        return AppDef(name=name, roles=[Role(name=role, image=image, num_replicas=replicas, **what)])

    return make


@pytest.fixture(name="wait_until", scope="session")
def _wait_until():
    return wait_until
