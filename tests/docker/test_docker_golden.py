"""Today's code works with the jobs that version 19df633 left on an engine; see tests/golden.

The containers, networks and volumes are made here with the labels, names and places that version gave them.
"""

import contextlib
import io
import tarfile

import golden_state
import pytest
from torchx.specs import AppState

pytestmark = pytest.mark.docker

IMAGE = "muster-test:torch"
WAITS = "echo golden line; exec sleep 1000"
CAUSE = "rank 1 on node 1 (node-a) exited with code 1 (ValueError: bad batch 17)"


@pytest.fixture
def agent_bundle():
    from muster.schedulers.bundle import build_agent_bundle

    return build_agent_bundle()


@pytest.fixture
def golden(apps, client, state_home, tmp_path, agent_bundle):
    """Makes a job of the golden state: its folder, its things on the engine, or both; returns its id."""

    def restore(app_id, *, folder=True, engine=True, command=WAITS, files=None):
        apps.ids.append(app_id)
        if folder:
            golden_state.restore("docker", state_home, tmp_path, apps=[app_id])
            # what was left out for its size; jobs of that version have theirs
            (state_home / "muster/docker-apps" / app_id / "muster-agent.zip").write_bytes(agent_bundle)
        things = {
            kind: [each for each in found if label_of(kind, each) == app_id]
            for kind, found in golden_state.read_engine().items()
        }
        for network in things["networks"]:
            labels = network["Labels"]
            made = client.networks.create(
                network["Name"], driver=network["Driver"], labels=labels, check_duplicate=True
            )
            undo.callback(remove, made)
        for volume in things["volumes"]:
            undo.callback(remove, client.volumes.create(volume["Name"], labels=volume["Labels"]))
        there = {"host", *(network["Name"] for network in things["networks"])}
        for container in things["containers"] if engine else ():
            network = container["HostConfig"]["NetworkMode"]  # that of an app that has ended is gone
            made = create(client, container, network if network in there else "bridge", command, files or {})
            undo.callback(remove, made, force=True)
            made.start()
        return app_id

    with contextlib.ExitStack() as undo:
        yield restore
        apps.remove_all()


def label_of(kind, thing):
    return (thing["Config"] if kind == "containers" else thing)["Labels"]["io.muster.app"]


def remove(thing, **options):
    import docker

    with contextlib.suppress(docker.errors.NotFound):  # the test's own doing
        thing.remove(**options)


def create(client, golden, network, command, files):
    config = golden["Config"]
    made = client.containers.create(
        IMAGE,
        ["sh", "-c", command],
        name=golden["Name"].lstrip("/"),
        hostname=None if network == "host" else config["Hostname"],
        labels=config["Labels"],
        network=network,
        init=golden["HostConfig"]["Init"],
    )
    if files:
        made.put_archive("/", pack(files))
    return made


def pack(files):
    """A tar of text files, by their absolute paths."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return packed.getvalue()


def test_its_containers_are_adopted(apps, golden):
    app_id = golden("running-golden")
    assert apps.status(app_id).state == AppState.UNKNOWN  # looking starts nothing
    answer = apps.scheduler.recover_app(app_id)
    assert answer.line == f"{app_id} goes on: 0 replicas started again, 3 still ran"
    status = apps.status(app_id)
    assert (status.state, status.num_restarts) == (AppState.RUNNING, 0)
    assert {role.role: [each.state for each in role.replicas] for role in status.roles} == {
        "trainer": [AppState.RUNNING, AppState.RUNNING],
        "side": [AppState.RUNNING],
    }
    assert apps.logs(app_id, "trainer", 1) == ["golden line\n"]
    assert len(apps.containers(app_id)) == 3
    apps.cancel(app_id)
    assert apps.wait(app_id).state == AppState.CANCELLED
    assert apps.containers(app_id, every=False) == []
    apps.delete(app_id)
    assert apps.left(app_id) == []


def test_missing_containers_are_created_again(apps, golden, wait_until):
    app_id = golden("running-golden", engine=False)
    answer = apps.scheduler.recover_app(app_id)
    assert answer.line == f"{app_id} goes on: 3 replicas started again, 0 still ran"
    assert apps.status(app_id).state == AppState.RUNNING
    for replica in (0, 1):
        expected = f"rank {replica} of 2, attempt 0: wait\n"
        wait_until(lambda k=replica, line=expected: line in apps.logs(app_id, "trainer", k), expected)
    assert apps.status(app_id).num_restarts == 0  # that used no retries
    assert {(c.labels["io.muster.role"], c.labels["io.muster.replica"]) for c in apps.containers(app_id)} == {
        ("trainer", "0"),
        ("trainer", "1"),
        ("side", "0"),
    }
    apps.cancel(app_id)
    assert apps.wait(app_id).state == AppState.CANCELLED
    apps.delete(app_id)
    assert apps.left(app_id) == []


def test_the_labels_alone_suffice(apps, golden, wait_until):
    """The state folder is gone."""
    app_id = golden("running-golden", folder=False)
    status = apps.status(app_id)
    assert status.state == AppState.RUNNING
    assert {role.role: len(role.replicas) for role in status.roles} == {"side": 1, "trainer": 2}
    assert app_id in [app.app_id for app in apps.scheduler.list()]
    wait_until(lambda: apps.logs(app_id, "side") == ["golden line\n"], "the log")
    apps.cancel(app_id)
    assert apps.containers(app_id, every=False) == []
    apps.delete(app_id)
    assert apps.left(app_id) == []


def test_the_report_of_its_agent_names_the_root_cause(apps, golden):
    report, error = golden_state.last_words("failed"), golden_state.read_report("failed", "error.json")
    files = {"/var/opt/muster/report.json": report, "/var/opt/muster/error.json": error}
    app_id = golden("running-golden", command="exit 1", files=files)
    apps.status(app_id)
    failed = apps.wait(app_id)
    assert failed.state == AppState.FAILED
    assert CAUSE in failed.msg
    assert '"message": "ValueError: bad batch 17"' in failed.structured_error_msg


@pytest.mark.parametrize("app_id", ["hostnet-golden", "readonly-golden"])
def test_its_reservations_are_released(apps, golden, client, app_id):
    """A port of the host is a volume of the engine, and so is the agent of read-only containers."""
    golden(app_id)
    label = {"label": f"io.muster.app={app_id}"}
    assert len(client.volumes.list(filters=label)) == 1
    assert apps.status(app_id).state == AppState.UNKNOWN
    apps.cancel(app_id)
    assert apps.wait(app_id).state == AppState.CANCELLED
    assert client.volumes.list(filters={"label": ["io.muster.claim", *label.values()]}) == []
    apps.delete(app_id)
    assert apps.left(app_id) == []


def test_an_ended_one_is_deleted(apps, golden):
    app_id = golden("failed-golden", command="echo golden line; exit 1")
    assert apps.status(app_id).state == AppState.FAILED
    assert apps.logs(app_id, "trainer", 0) == ["golden line\n"]
    apps.delete(app_id)
    assert apps.left(app_id) == []
    assert apps.status(app_id) is None
