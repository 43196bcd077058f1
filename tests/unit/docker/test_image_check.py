"""What is refused before any container is started, and what a temporary container prints.

An image's entrypoint may print a banner before the probe's own line.
"""

from types import SimpleNamespace

import pytest
from docker_samples import build_app, build_container
from torchx.specs import AppDef, Resource, Role

from muster.schedulers.docker.container_body import ImageFacts
from muster.schedulers.docker.options import DockerOptions
from muster.schedulers.docker.request import WORKSPACE_KEY, RequestBuilder
from muster.schedulers.docker.running_apps import image_check, reservations
from muster.schedulers.docker.running_apps.image_check import MARK, check_images, find_words
from muster.schedulers.docker.sdk import DockerError

BANNER = "=============\n== PyTorch ==\n=============\nNVIDIA Release 24.01\n"


class Engine:
    """Runs any probe, which prints `output`."""

    def __init__(self, output: str, working_dir: str = "/") -> None:
        self.output, self.working_dir = output, working_dir

    def info(self):
        return {"NCPU": 4}

    def count_cpus(self):
        return 4

    def inspect_image(self, _name):
        return ImageFacts(id="sha256:1", working_dir=self.working_dir, user="")

    def create_container(self, _name, _body):
        return "c"

    def start_container(self, _container):
        pass

    def wait_container(self, _container, _limit_s):
        return 0

    def logs(self, _container):
        yield 1, self.output.encode()

    def remove_container(self, _container):
        pass


@pytest.mark.parametrize("before", ["", BANNER, f"{MARK} is ours\n", "no end of line"])
def test_a_banner_of_the_entrypoint_is_passed_over(before, tmp_path):
    """It was a traceback: ValueError: invalid literal for int() with base 10: '============='."""
    request = build_app(build_container())
    assert check_images(Engine(f"{before}\n{MARK} 3.10 torch\n"), request, tmp_path).init
    ports = Engine(f"{before}\n{MARK} 29400 29402\n")
    assert reservations._find_free_ports(ports, request, request.containers[0], [29400, 29401, 29402]) == [29400, 29402]


def test_an_entrypoint_that_does_not_run_the_command(tmp_path):
    with pytest.raises(DockerError) as error:
        check_images(Engine("hello\nworld\n"), build_app(build_container()), tmp_path)
    assert "image 'img' does not" in str(error.value)
    assert check_images(Engine("hello\n"), build_app(build_container(runs_agent=False)), tmp_path).init


@pytest.mark.parametrize(
    ("program", "argv", "count"), [(image_check._PROBE, [], 1), (reservations._FREE_PORTS, ["0", "x"], None)]
)
def test_the_probes_print_the_mark(program, argv, count, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["-c", *argv[:1]])
    exec(compile(program, "probe", "exec"), SimpleNamespace().__dict__)
    words = find_words(capsys.readouterr().out)
    assert words is not None
    assert words == ["0"] if count is None else len(words) >= count


@pytest.mark.parametrize("image_repo", [None, "registry.example/built"])
@pytest.mark.parametrize("with_workspace", [(True, True), (False, True)])
def test_a_tmpfs_over_the_workspace_of_any_role_is_refused(tmp_path, image_repo, with_workspace):
    """It was not for a workspace built into the image, nor for the second role of an image."""
    roles = [
        Role(
            name=name,
            image="img",
            entrypoint="sh",
            resource=Resource(cpu=1, gpu=0, memMB=0),
            metadata={WORKSPACE_KEY: "key"} if has_workspace else {},
        )
        for name, has_workspace in zip("ab", with_workspace, strict=True)
    ]
    options = DockerOptions(image_repo=image_repo, tmpfs={"/work": "exec"})
    app = AppDef(name="job", roles=roles)
    app = RequestBuilder(app=app, options=options, name="job-x", token="s3cret", user="0@here").build()
    line = "^tmpfs: '/work' .* '/work/code'$"
    with pytest.raises(DockerError, match=line):
        check_images(Engine("", "/work/code"), app, tmp_path)
