"""An app of several roles and a workspace, through TorchX's own dry run: TorchX gives it to the first role only."""

import pytest
from torchx.runner import Runner
from torchx.specs import AppDef

from muster.components import dist
from muster.schedulers import docker, kubernetes
from muster.schedulers.kubernetes import images


def build_app():
    """Three agent roles, the last of another image, and one that runs something else in the same image."""
    roles = []
    for name, image in (("learner", "img"), ("actor", "img"), ("other", "another")):
        (role,) = dist.ddp(script="main.py", image=image, j="1x1").roles
        role.name = name
        roles.append(role)
    (plain,) = dist.ddp(script="main.py", image="img", j="1x1").roles
    plain.name, plain.entrypoint, plain.args = "plain", "sh", ["-c", "true"]
    return AppDef(name="app", roles=[*roles, plain])


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """A function: create a scheduler, options -> its request."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "main.py").write_text("print(1)")

    def run(factory, **cfg):
        scheduler = factory("test")
        with Runner("test", {"it": lambda session_name, **_: scheduler}) as runner:
            return runner.dryrun(build_app(), "it", cfg, workspace=f"file://{workspace}").request

    return run


def test_agent_roles_of_one_image_share_it_on_docker(dry_run):
    containers = {each.role: each for each in dry_run(docker.create_scheduler).request.containers}
    assert containers["learner"].workspace is not None
    assert containers["actor"].workspace == containers["learner"].workspace
    assert containers["other"].workspace is containers["plain"].workspace is None


def test_agent_roles_of_one_image_share_it_on_kubernetes(dry_run):
    text = str(dry_run(kubernetes.create_scheduler).documents)
    assert text.count("'name': 'MUSTER_WORKSPACE'") == 2


def test_agent_roles_of_one_image_share_the_image_that_was_built_of_it(dry_run, monkeypatch):
    monkeypatch.setattr(images, "build_image", lambda image, path, report: "sha256:built")
    request = dry_run(kubernetes.create_scheduler, image_repo="registry.example/x")
    jobs = [each for each in request.documents if each["kind"] == "Job"]
    shown = [job["spec"]["template"]["spec"]["containers"][0]["image"] for job in jobs]
    assert shown == ["registry.example/x:built", "registry.example/x:built", "another", "img"]
