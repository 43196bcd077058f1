"""What the options do on a real engine: the workspace, users, networks, what is kept."""

import io
import os
import tarfile
import threading
from types import SimpleNamespace

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
def image_with_user_and_folder(make_image):
    """Its WORKDIR is root's, as most images' is."""
    return make_image("app-user", changes="USER nobody")


@pytest.mark.parametrize("options", [{}, {"image_repo": "muster-test/owned", "quiet": True}])
def test_a_user_can_write_beside_its_code(apps, app_of, workspace, image_with_user_and_folder, client, options):
    words = "touch main.py new sub/new && stat -c '%U %a %n' . main.py new sub; cat sub/data"
    app_id = apps.run(app_of(words, image=image_with_user_and_folder), workspace=workspace, **options)
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    *lines, payload = apps.logs(app_id)
    owners = [line.split()[::2] for line in lines]
    assert owners == [["nobody", "."], ["nobody", "main.py"], ["nobody", "new"], ["nobody", "sub"]]
    assert (lines[0], payload) == ("nobody 755 .\n", "payload")
    if options:
        assert [tag for image in client.images.list("muster-test/owned") for tag in image.tags]
        apps.delete(app_id)
        assert client.images.list("muster-test/owned") == []


def test_workspace_is_copied_into_the_working_directory(apps, app_of, workspace, client):
    """And limits of the log stand beside the engine's own driver."""
    app_id = apps.run(app_of("pwd; ls -A; python3 main.py"), workspace=workspace, log_opts={"max-size": "1m"})
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    assert apps.logs(app_id) == ["/app\n", ".torchxignore\n", "main.py\n", "sub\n", "/app 0 payload\n"]
    (container,) = apps.containers(app_id)
    driver = client.info()["LoggingDriver"]
    assert container.attrs["HostConfig"]["LogConfig"] == {"Type": driver, "Config": {"max-size": "1m"}}


def test_own_dockerfile_of_the_workspace_is_used(apps, app_of, tmp_path):
    """Without image_repo it was ignored in silence."""
    (tmp_path / "Dockerfile.torchx").write_text("ARG IMAGE\nFROM $IMAGE\nRUN echo built >/made\n")
    app_id = apps.run(app_of("cat /made"), workspace=str(tmp_path))
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    assert apps.logs(app_id) == ["built\n"]


@pytest.mark.parametrize(
    ("keep", "command", "kept"),
    [("none", "exit 1", 0), ("failed", "exit 1", 1), pytest.param("failed", "true", 0, marks=pytest.mark.long)],
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


def test_options_reach_the_engine(apps, app_of, monkeypatch):
    monkeypatch.setenv("MUSTER_TEST_COPIED", "copied")
    app = app_of("exec sleep 600", replicas=2, env={"R": "${replica_id}"})
    app.roles[0].port_map = {"board": 6006, "other": 7000}
    app_id = apps.run(
        app,
        tmpfs=["/scratch:64m", "/run/made"],
        publish=["board", "127.0.0.2:28800:8000/udp"],
        user="65534:65534",
        labels={"team": "vision", "io.other": "a:b"},
        log_driver="json-file",
        log_opts={"max-size": "1m", "max-file": "2"},
        security_opt=["no-new-privileges", "seccomp:unconfined"],
        cap_add=["cap_sys_ptrace", "IPC_LOCK"],
        dns=["10.9.8.7"],
        extra_hosts=["data.example:10.0.0.7", "me:host-gateway"],
        copy_env=["MUSTER_TEST_*"],
        env={"GIVEN": "given"},
        ulimits=["nofile:512"],
    )
    for replica in range(2):
        (container,) = apps.containers(app_id, replica=replica)
        config, host = container.attrs["Config"], container.attrs["HostConfig"]
        assert host["Tmpfs"] == {"/scratch": "exec,size=67108864", "/run/made": "exec"}
        published = {"HostIp": "127.0.0.2", "HostPort": str(28800 + replica)}
        assert host["PortBindings"]["8000/udp"] == [published]
        assert config["User"] == "65534:65534"
        assert (config["Labels"]["team"], config["Labels"]["io.other"]) == ("vision", "a:b")
        assert config["Labels"]["io.muster.app"] == app_id
        assert host["LogConfig"] == {"Type": "json-file", "Config": {"max-size": "1m", "max-file": "2"}}
        assert host["SecurityOpt"] == ["no-new-privileges", "seccomp=unconfined"]
        assert [name.upper().removeprefix("CAP_") for name in host["CapAdd"]] == ["SYS_PTRACE", "IPC_LOCK"]
        assert host["Dns"] == ["10.9.8.7"]
        assert host["ExtraHosts"] == ["data.example:10.0.0.7", "me:host-gateway"]
        ports = container.attrs["NetworkSettings"]["Ports"]
        assert ports["8000/udp"] == [published]
        assert ports["6006/tcp"][0]["HostIp"] == "127.0.0.1"
        assert int(ports["6006/tcp"][0]["HostPort"]) > 0
    assert apps.inside(app_id, "id -u; stat -f -c '%T %b' /scratch").split()[:2] == ["65534", "tmpfs"]
    assert "10.0.0.7\tdata.example" in apps.inside(app_id, "cat /etc/hosts")
    said = apps.inside(app_id, "echo $MUSTER_TEST_COPIED $GIVEN $R $MUSTER_TOKEN.; ulimit -n", replica=1)
    assert said == "copied given 1 .\n512\n"


def test_options_beside_an_agent_and_a_read_only_root(apps, workspace):
    app = dist.ddp(script="main.py", j="1x2", image=IMAGE, name="job", start="cold")
    options = {"tmpfs": ["/tmp:256m"], "user": "nobody", "log_driver": "local", "security_opt": ["no-new-privileges"]}
    app_id = apps.run(app, workspace=workspace, read_only=True, **options)
    assert apps.wait(app_id).state == AppState.SUCCEEDED, apps.logs(app_id, role=app.roles[0].name)
    assert sum("/app 65534 payload" in line for line in apps.logs(app_id, role=app.roles[0].name)) == 2
    (container,) = apps.containers(app_id)
    assert container.attrs["HostConfig"]["Tmpfs"] == {"/tmp": "exec,size=268435456"}
    _, stat = container.get_archive(f"{container.labels['io.muster.run_dir']}events.jsonl")  # nobody could write it
    assert stat["size"] > 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"publish": ["203.0.113.1:28801:80"]}, r"could not be started: .*203\.0\.113\.1"),
        ({"user": "no-such-user"}, "no-such-user"),
        ({"network": "no-such-net"}, "network 'no-such-net' does not exist"),
    ],
)
def test_what_the_engine_refuses_is_one_line(apps, app_of, workspace, options, why):
    apps.refuse(app_of("sleep 600"), why, workspace=workspace, **options)


def test_a_container_that_could_not_start_has_not_started_during_its_removal(apps, client):
    """Many files are in it, so the engine needs some time to remove it."""
    labels = {"io.muster.app": f"removed-{os.urandom(4).hex()}"}
    container = client.containers.create("muster-test:bare", "true", labels={**labels, "io.muster.role": "w"})
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for number in range(4000):
            archive.addfile(tarfile.TarInfo(f"files/{number}"))
    container.put_archive("/tmp", packed.getvalue())
    removal = threading.Thread(target=container.remove)
    removal.start()
    seen = []
    while removal.is_alive():
        seen.append(apps.scheduler._is_starting(SimpleNamespace(labels=labels, containers=["w"])))
    assert seen
    assert all(seen)
