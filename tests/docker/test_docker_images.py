"""Images: from a real registry on this machine, missing, and unfit for the agent."""

import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from harness import skip_or_fail
from torchx.specs import AppState

import muster
from muster.components import dist

pytestmark = pytest.mark.docker

IMAGE = "muster-test:torch"
AGENT = {"entrypoint": "python3", "args": ["-m", "muster.agent", "main.py"]}
CONFIG = """\
version: 0.1
storage: {{filesystem: {{rootdirectory: {root}}}}}
http: {{addr: "127.0.0.1:0"}}
"""


def add_file(tar, name, text):
    """The same tar with one more file."""
    buffer = io.BytesIO(tar)
    with tarfile.open(fileobj=buffer, mode="a") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


class Registry:
    """Has the new version of an image; an old one is on this machine."""

    def __init__(self, client, address, tiny_tar):
        self.address = address
        self.image = f"{address}/muster-test/tiny:stable"
        self._client = client
        for version in ("old", "new"):
            client.api.import_image_from_data(
                add_file(tiny_tar, "version", f"{version}\n"), repository="muster-test/tiny", tag=version
            )
        self.put("new")
        said = client.api.push(f"{address}/muster-test/tiny", tag="stable", stream=True, decode=True)
        errors = [line["error"] for line in said if "error" in line]
        assert errors == []

    def put(self, version):
        """Give the engine this version, or none, under the registry's name."""
        if version is not None:
            self._client.api.tag(f"muster-test/tiny:{version}", self.image.removesuffix(":stable"), "stable")
        elif self._client.images.list(self.image):
            self._client.images.remove(self.image)

    def close(self):
        self.put(None)
        for version in ("old", "new"):
            self._client.images.remove(f"muster-test/tiny:{version}", force=True)


@pytest.fixture(scope="module")
def registry(_engine_or_skip, tiny_tar, tmp_path_factory, wait_until):
    import docker

    if shutil.which("docker-registry") is None:
        skip_or_fail("docker", "docker-registry is not installed; on Debian: apt-get install docker-registry")
    folder = tmp_path_factory.mktemp("registry")
    (folder / "config.yml").write_text(CONFIG.format(root=folder / "data"))
    log = folder / "log"
    with log.open("w") as said:
        process = subprocess.Popen(["docker-registry", "serve", folder / "config.yml"], stdout=said, stderr=said)
    client = docker.from_env(timeout=60)
    try:
        # it picks a free port and prints it
        address = wait_until(lambda: re.search(r"listening on ([0-9.:]+)", log.read_text()), "a registry")[1]
        registry = Registry(client, address, tiny_tar)
        yield registry
        registry.close()
    finally:
        client.close()
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("pull", "here", "runs"),
    [("missing", None, "new"), ("always", "old", "new"), pytest.param("missing", "old", "old", marks=pytest.mark.long)],
)
def test_what_is_pulled(apps, app_of, registry, capfd, pull, here, runs):
    registry.put(None)
    registry.put(here)
    app_id = apps.run(app_of("read v </version; echo $v", image=registry.image, replicas=2), pull=pull)
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    assert [apps.logs(app_id, replica=replica) for replica in range(2)] == [[f"{runs}\n"]] * 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("docker: ")]
    pulls = pull == "always" or here is None
    assert lines[:1] == ([f"docker: pulling image {registry.image}"] if pulls else [])  # once, not once per replica
    assert lines.count(f"docker: pulling image {registry.image}") == int(pulls)


def test_what_cannot_be_pulled_is_one_line(apps, app_of, registry, capfd):
    registry.put(None)
    message = f"the engine has no image '{registry.image}', and pull=never forbids pulling it"
    apps.refuse(app_of("true", image=registry.image), message, pull="never")
    image = registry.image.replace(":stable", ":none")
    apps.refuse(app_of("true", image=image), f"cannot pull image '{image}': .*manifest.* unknown", quiet=True)
    assert "docker: " not in capfd.readouterr().err, "quiet"


PYTHON39 = "muster-test:python39"


@pytest.mark.parametrize(
    ("image", "cfg", "message"),
    [
        ("muster-test:bare", {}, "role 'w' could not be started: image 'muster-test:bare' has no 'python3'; .*3.10 or"),
        (PYTHON39, {}, rf"image '{PYTHON39}' has Python 3\.9; muster's agent needs Python 3\.10 or newer"),
        (IMAGE, {"agent": "image"}, f"image '{IMAGE}' has no muster; leave out -cfg agent=image"),
    ],
    ids=["no python", "old python", "no muster"],
)
def test_an_image_that_is_unfit_is_one_line(apps, app_of, client, image, cfg, message):
    if image == PYTHON39 and not client.images.list(image):
        pytest.skip(f"there is no {image}: .ci/docker-image found no mirror with Debian 11")
    apps.refuse(app_of("", image=image, **AGENT), message, **cfg)


@pytest.mark.long  # the engine copies torch's files to hide them
def test_image_without_torch_is_one_line(apps, app_of, make_image):
    image = make_image("no-torch", "rm -r /usr/lib/python3/dist-packages/torch")
    apps.refuse(app_of("", image=image, **AGENT), r"image 'muster-test:no-torch' has Python 3\.11 but no torch")


def run_rank(apps, folder, image, program="import os; print('rank', os.environ['RANK'], flush=True)", **cfg):
    """The id of a job of one node that has ended, and its log."""
    (folder / "main.py").write_text(program)
    app = dist.ddp(script="main.py", j="1x1", image=image, name="job", start="cold")
    app_id = apps.run(app, workspace=str(folder), **cfg)
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    return app_id, "".join(apps.logs(app_id, role=app.roles[0].name))


@pytest.mark.parametrize(
    ("tag", "command", "entrypoint", "ran"),
    [
        ("python-u", "true", '["/usr/bin/env", "python3", "-u"]', ["/usr/bin/env", "python3", "-u"]),
        # An interpreter that no PATH has, as of a virtual environment; and the image has no other.
        pytest.param(
            "python-venv",
            "mkdir /venv; mv /usr/bin/python3.11 /venv/python; rm /usr/bin/python3",
            '["/venv/python"]',
            ["/venv/python", "/opt/muster/muster-agent.zip"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_an_entrypoint_may_be_the_interpreter(apps, make_image, tmp_path, tag, command, entrypoint, ran):
    """It was told to have no python3: it ran `python3 python3 ...`."""
    image = make_image(tag, command, changes=f"ENTRYPOINT {entrypoint}")
    app_id, said = run_rank(apps, tmp_path, image)
    assert "rank 0" in said
    (container,) = apps.containers(app_id)
    assert [container.attrs["Path"], *container.attrs["Args"]][: len(ran)] == ran


@pytest.mark.long
def test_the_jobs_muster_is_imported_and_not_the_images(apps, make_image, tmp_path):
    """The worker module of an older image speaks another status page."""
    site = "/usr/lib/python3/dist-packages/muster"
    files = f"mkdir -p {site}/_shared; cd {site}; echo >_shared/contract.py; echo 'raise RuntimeError' >worker.py"
    image = make_image("old-muster", f"{files}; echo '__version__ = \"0.0.9\"' >__init__.py")
    program = "from muster import worker; print('managed', worker.is_managed(), flush=True)"
    _, said = run_rank(apps, tmp_path, image, program)
    assert said.count("managed True") == 1
    line = f"gives {muster.__version__}, which"
    assert said.count(line) == 1


def test_agent_of_the_image_is_run(apps, make_image, tmp_path):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(Path(muster.__file__).parent, "usr/lib/python3/dist-packages/muster")
    image = make_image("with-muster", files=packed.getvalue())
    app_id, said = run_rank(apps, tmp_path, image, agent="image")
    assert "rank 0" in said
    (container,) = apps.containers(app_id)
    assert container.attrs["Config"]["Cmd"][:2] == ["python3", "-c"]
