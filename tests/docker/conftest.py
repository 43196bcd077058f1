"""A real engine and its test images (.ci/docker-engine, .ci/docker-image), and a TorchX runner over our schedulers."""

import os
import time

import pytest

IMAGE = "muster-test:torch"
BARE = "muster-test:bare"
DEADLINE_S = 90.0


def _missing(images):
    """Why these tests cannot run here; None when they can."""
    try:
        import docker
    except ImportError:
        return "the docker package is not installed"
    try:
        client = docker.from_env(timeout=60)
        have = {tag for image in client.images.list() for tag in image.tags}
        client.close()
    except docker.errors.DockerException as error:
        return f"no Docker engine answers: {error}"
    lacking = [image for image in images if image not in have]
    return f"the engine lacks {', '.join(lacking)}; make them with .ci/docker-image" if lacking else None


@pytest.fixture(scope="session", autouse=True)
def _engine_or_skip():
    reason = _missing([IMAGE, BARE, "muster-test:python39"])
    if reason is None:
        return
    if "docker" in os.environ.get("MUSTER_REQUIRE", "").split(","):
        pytest.fail(f"MUSTER_REQUIRE names docker, but {reason}")
    pytest.skip(reason)


@pytest.fixture
def client(_engine_or_skip):
    """The engine's own client: what a person would look with."""
    import docker

    client = docker.from_env(timeout=60)
    yield client
    client.close()


@pytest.fixture(scope="session")
def tiny_tar(_engine_or_skip):
    """The root of an image of 2 MB, as a tar: a shell and `sleep`."""
    import docker

    client = docker.from_env(timeout=60)
    files = "/bin/sh /bin/sleep $(ldd /bin/sh /bin/sleep | grep -o '/lib[^ ]*' | sort -u)"
    container = client.containers.create(BARE, ["sh", "-c", f"mkdir /tiny && cp -L --parents {files} /tiny"])
    try:
        container.start()
        assert container.wait()["StatusCode"] == 0
        stream, _ = container.get_archive("/tiny/.")
        return b"".join(stream)
    finally:
        container.remove()
        client.close()


def wait_until(check, what, deadline_s=DEADLINE_S):
    """Look until `check()` is true; returns what it returned.

    It looks again and again because what the checks ask (the output so far, the engine's lists, a process) has no one
    event in common. The end of an app has one: see `Apps.wait`.
    """
    until_s = time.monotonic() + deadline_s
    while not (found := check()):
        if time.monotonic() > until_s:
            raise AssertionError(f"{what}: not within {deadline_s:g} s")
        time.sleep(0.05)
    return found


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

        client.look(folder := self.scheduler._folder(app_id))
        assert client.wait_ended(folder, limit_s=deadline_s), f"end of {app_id}: not within {deadline_s:g} s"
        return self.status(app_id)

    def logs(self, app_id, role="w", replica=0, **how):
        return list(self.runner.log_lines(f"docker://test/{app_id}", role, replica, **how))

    def containers(self, app_id, *, every=True, **labels):
        """The app's replicas' containers, as the engine has them."""
        wanted = [f"io.muster.app={app_id}", "io.muster.role", *(f"io.muster.{k}={v}" for k, v in labels.items())]
        return self.client.containers.list(all=every, filters={"label": wanted}, ignore_removed=True)

    def inside(self, app_id, command, role="w", replica=0):
        """What a command says that runs in a replica's container."""
        (container,) = self.containers(app_id, every=False, role=role, replica=replica)
        code, said = container.exec_run(["sh", "-c", command])
        assert code == 0, said
        return said.decode()

    def cancel(self, app_id):
        self.runner.cancel(f"docker://test/{app_id}")

    def delete(self, app_id):
        self.scheduler.delete(app_id)

    @property
    def scheduler(self):
        return self.runner._scheduler("docker")

    def left(self, app_id=None):
        """All that the engine holds of an app, or of any of ours."""
        label = {"label": f"io.muster.app={app_id}" if app_id else "io.muster.app"}
        return (
            self.client.containers.list(all=True, filters=label, ignore_removed=True)
            + self.client.networks.list(filters=label)
            + self.client.volumes.list(filters=label)
            + self.client.images.list(filters=label)
        )

    def remove_all(self):
        """Kill and delete whatever the test submitted."""
        from muster.schedulers.supervision import client

        for app_id in self.ids:
            folder = self.scheduler._folder(app_id)
            if folder is not None:
                client.request_stop(folder, "kill")
            self.delete(app_id)

    def close(self):
        self.remove_all()
        self.runner.close()


@pytest.fixture
def state_home(tmp_path, monkeypatch):
    """A state folder of the test's own: the developer's apps are left alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


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
    """See `wait_until`: test files cannot import from here."""
    return wait_until
