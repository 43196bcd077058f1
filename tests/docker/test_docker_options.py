"""What the options do on a real engine: the workspace, users, networks, what is kept."""

import pytest
from torchx.specs import AppState

from muster.components import dist

pytestmark = pytest.mark.docker

IMAGE = "muster-test:torch"


@pytest.fixture
def workspace(tmp_path):
    folder = tmp_path / "work"
    (folder / "sub").mkdir(parents=True)
    (folder / "main.py").write_text("import os\nprint(os.getcwd(), os.getuid(), open('sub/data').read())\n")
    (folder / "sub" / "data").write_text("payload")
    (folder / "sub" / "data").chmod(0o600)
    (folder / "secret").write_text("x")
    (folder / ".torchxignore").write_text("secret\n")
    return str(folder)


@pytest.fixture
def image_with_user(client):
    """The test image with a user and without a working directory."""
    container = client.containers.create(IMAGE, "true")
    container.commit("muster-test", "nobody", changes=["USER nobody", "WORKDIR /"])
    container.remove()
    yield "muster-test:nobody"
    client.images.remove("muster-test:nobody", force=True)


def test_workspace_is_copied_into_the_working_directory(apps, app_of, workspace):
    app_id = apps.run(app_of("pwd; ls -A; python3 main.py"), workspace=workspace)
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    assert apps.logs(app_id) == ["/app\n", ".torchxignore\n", "main.py\n", "sub\n", "/app 0 payload\n"]


def test_workspace_belongs_to_the_images_user(apps, app_of, workspace, image_with_user):
    app = app_of("python3 main.py; touch sub/new && echo wrote", image=image_with_user)
    app_id = apps.run(app, workspace=workspace)
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    assert apps.logs(app_id) == ["/workspace 65534 payload\n", "wrote\n"]


def test_agent_runs_as_the_images_user(apps, workspace, image_with_user):
    app = dist.ddp(script="main.py", j="1x2", image=image_with_user, name="job", start="cold")
    app_id = apps.run(app, workspace=workspace)
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    said = apps.logs(app_id, role=app.roles[0].name)
    assert sum("/workspace 65534 payload" in line for line in said) == 2


def test_agent_runs_on_a_read_only_root(apps, workspace):
    app = dist.ddp(script="main.py", j="2x1", image=IMAGE, name="job", start="cold")
    app_id = apps.run(app, workspace=workspace, read_only=True)
    state = apps.wait(app_id).state
    assert state == AppState.SUCCEEDED, [apps.logs(app_id, role=app.roles[0].name, replica=k) for k in range(2)]
    said = apps.logs(app_id, role=app.roles[0].name, replica=1)
    assert any("/app 0 payload" in line for line in said), said  # twice where a busy machine made a second round
    (container, _) = apps.containers(app_id)
    assert container.attrs["HostConfig"]["ReadonlyRootfs"] is True


def test_image_repo_builds_an_image_that_is_deleted_with_the_app(apps, app_of, workspace, client):
    app_id = apps.run(app_of("cat sub/data"), workspace=workspace, image_repo="muster-test/patched", quiet=True)
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    assert apps.logs(app_id) == ["payload"]
    assert [tag for image in client.images.list("muster-test/patched") for tag in image.tags]
    apps.delete(app_id)
    assert client.images.list("muster-test/patched") == []


@pytest.mark.parametrize("options", [{"image_repo": "muster-test/patched"}, {}])
def test_own_dockerfile_of_the_workspace_is_used(apps, app_of, tmp_path, options):
    """Without image_repo it was ignored in silence."""
    (tmp_path / "Dockerfile.torchx").write_text("ARG IMAGE\nFROM $IMAGE\nRUN echo built >/made\n")
    app_id = apps.run(app_of("cat /made"), workspace=str(tmp_path), **options)
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    assert apps.logs(app_id) == ["built\n"]


@pytest.mark.parametrize(
    ("keep", "command", "kept"),
    [("none", "exit 1", 0), ("failed", "exit 1", 1), ("failed", "true", 0), ("all", "true", 1)],
)
def test_what_is_kept(apps, app_of, keep, command, kept):
    app_id = apps.run(app_of(command), keep=keep)
    status = apps.wait(app_id)
    assert status.state == (AppState.SUCCEEDED if command == "true" else AppState.FAILED)
    assert len(apps.containers(app_id)) == kept
    assert len(apps.left(app_id)) == kept  # the network goes in any case


def test_existing_network_is_joined_and_stays(apps, app_of, client):
    network = client.networks.create("muster-test-existing", driver="bridge")
    try:
        app_id = apps.run(app_of("sleep 600", replicas=2), network="muster-test-existing")
        assert apps.inside(app_id, "getent hosts $TORCHX_RANK0_HOST", replica=1).split()[1] == f"{app_id}-rank0"
        apps.remove_all()
        assert network.name in {each.name for each in client.networks.list()}
    finally:
        network.remove()


def test_missing_network_is_one_line(apps, app_of):
    with pytest.raises(RuntimeError, match="network 'no-such-net' does not exist"):
        apps.run(app_of("true"), network="no-such-net")


def test_environment_and_limits_reach_the_command(apps, app_of, monkeypatch):
    monkeypatch.setenv("MUSTER_TEST_COPIED", "copied")
    app = app_of("echo $MUSTER_TEST_COPIED $GIVEN $(ulimit -n) $MUSTER_TOKEN.", env={"R": "${replica_id}"})
    app_id = apps.run(app, copy_env=["MUSTER_TEST_*"], env={"GIVEN": "given"}, ulimits=["nofile:512"])
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    assert apps.logs(app_id) == ["copied given 512 .\n"]
