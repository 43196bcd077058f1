"""An app from submission to deletion, on a real engine, with plain commands; both TorchX lines."""

import re

import pytest
from torchx.specs import AppDef, AppState, RetryPolicy

pytestmark = pytest.mark.docker


def test_replicas_have_names_and_find_rank0(apps, app_of):
    app_id = apps.run(app_of("sleep 600", replicas=2))
    assert apps.inside(app_id, "hostname", replica=1) == "w-1\n"
    rank0 = apps.inside(app_id, "hostname -i")
    assert apps.inside(app_id, "getent hosts $TORCHX_RANK0_HOST", replica=1).split()[0] == rank0.strip()
    assert apps.inside(app_id, "getent hosts w-0", replica=1).split()[0] == rank0.strip()


def test_failed_replica_stops_the_app(apps, app_of):
    app_id = apps.run(app_of("[ $REPLICA = 1 ] && exit 3; sleep 600", replicas=2, env={"REPLICA": "${replica_id}"}))
    status = apps.wait(app_id)
    assert status.state == AppState.FAILED
    assert "w/1 exited with code 3" in status.msg
    assert apps.containers(app_id, every=False) == []


def test_plain_role_is_retried_with_any_exit_code(apps, app_of):
    count = "echo run >>/data/runs; [ $(wc -l </data/runs) = 3 ]"
    volume = apps.client.volumes.create()
    try:
        from torchx.specs import VolumeMount

        mounts = [VolumeMount(src=volume.name, dst_path="/data")]
        app = app_of(f"{count} || exit 1", mounts=mounts, max_retries=2, retry_policy=RetryPolicy.REPLICA)
        app_id = apps.run(app)
        status = apps.wait(app_id)
        assert status.state == AppState.SUCCEEDED
        assert status.num_restarts == 2
        assert [c.labels["io.muster.incarnation"] for c in apps.containers(app_id)] == ["2", "1", "0"]
        apps.delete(app_id)
        assert volume.name in {each.name for each in apps.client.volumes.list()}  # the user's, not ours
    finally:
        volume.remove(force=True)


def test_app_of_several_roles(apps, app_of):
    (lead,) = app_of("sleep 600", role="lead").roles
    (extra,) = app_of("sleep 600", role="extra", replicas=2).roles
    app_id = apps.run(AppDef(name="two", roles=[lead, extra]))
    assert apps.inside(app_id, "getent hosts rank0", role="extra", replica=1).split()[1] == "rank0"
    assert apps.inside(app_id, "getent hosts extra-1", role="lead").split()[1] == "extra-1"
    assert {role.role: len(role.replicas) for role in apps.status(app_id).roles} == {"lead": 1, "extra": 2}


def test_cancelled_app_reads_cancelled(apps, app_of):
    app_id = apps.run(app_of("trap '' TERM; echo ready; while :; do sleep 1; done", replicas=3), grace_s=1.0)
    assert next(iter(apps.runner.log_lines(f"docker://test/{app_id}", "w", 2, should_tail=True))) == "ready\n"
    apps.cancel(app_id)
    assert apps.wait(app_id).state == AppState.CANCELLED
    ended = [container.attrs["State"]["ExitCode"] for container in apps.containers(app_id)]
    assert ended == [137, 137, 137]


@pytest.mark.alone  # what an older version has left (test_docker_golden.py) is removed, too
def test_prune_removes_what_ended_jobs_left(apps, app_of, capsys):
    from muster.cli.commands import main

    ended, running = apps.run(app_of("true")), apps.run(app_of("sleep 600"))
    assert apps.wait(ended).state == AppState.SUCCEEDED
    assert apps.left(ended)
    assert main(["prune", "--yes"]) == 0
    assert f"docker://{ended}" in capsys.readouterr().out
    assert apps.left(ended) == []
    assert apps.status(ended) is None
    assert len(apps.containers(running, every=False)) == 1


def test_a_job_whose_containers_a_person_has_removed_is_told_alike_by_all_commands(apps, app_of, capsys):
    """`muster list` did not show it, though it was `last`. `muster log` printed nothing."""
    from muster.cli.commands import main

    app_id = apps.run(app_of("echo hello"))
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    for container in apps.containers(app_id):
        container.remove()
    assert {item.app_id: item.state for item in apps.scheduler.list()}[app_id] == AppState.SUCCEEDED
    assert main(["list", "-s", "docker"]) == 0
    assert re.search(rf"^docker://torchx/{app_id} .* SUCCEEDED: ended at ", capsys.readouterr().out, re.MULTILINE)
    assert main(["status", app_id]) == 0
    assert capsys.readouterr().out.startswith(f"docker://torchx/{app_id}  SUCCEEDED: ended at ")
    line = "[muster] w/0 has no log: its containers were removed, and their output with them\n"
    for words in ([], ["-f"]):
        assert main(["log", app_id, *words]) == 0
        assert line in capsys.readouterr().out


@pytest.mark.alone  # what an older version has left (test_docker_golden.py) is removed, too
def test_prune_removes_containers_whose_state_folder_is_gone(apps, app_of, tmp_path):
    import shutil

    from muster.cli.commands import main

    app_id = apps.run(app_of("true"))
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    shutil.rmtree(apps.scheduler.find_folder(app_id).path)
    assert main(["prune", "--yes", "--older-than", "1h"]) == 0
    assert apps.left(app_id)
    assert main(["prune", "--yes"]) == 0
    assert apps.left(app_id) == []


def test_describe_gives_back_the_submitted_app_field_by_field(apps, app_of, tmp_path):
    from copy import deepcopy
    from dataclasses import fields

    from torchx.specs import BindMount, DeviceMount, VolumeMount

    mounts = [
        BindMount(src_path=str(tmp_path), dst_path="/data", read_only=True),
        VolumeMount(src="muster-test-volume", dst_path="/v"),
        DeviceMount(src_path="/dev/null", dst_path="/dev/x", permissions="r"),
    ]
    more = {"env": {"LR": "0.1"}, "port_map": {"board": 6006}, "metadata": {"k": {"x": [1]}}, "min_replicas": 1}
    submitted = deepcopy(more)  # torchx 0.7 changes what it is given
    (tmp_path / "file").touch()
    app_id = apps.run(app_of("test -e /data", replicas=2, mounts=mounts, **more), workspace=str(tmp_path))
    try:
        assert apps.wait(app_id).state == AppState.SUCCEEDED
        (role,) = apps.scheduler.describe(app_id).roles  # the runner answers from its own memory
        (was,) = app_of("test -e /data", replicas=2, mounts=mounts, **submitted).roles
        role.env = {name: value for name, value in role.env.items() if not name.startswith("TORCHX_")}
        same = [field.name for field in fields(was) if field.name != "workspace"]  # the nightly names the given one
        assert {name: getattr(role, name) for name in same} == {name: getattr(was, name) for name in same}
    finally:
        apps.delete(app_id)
        apps.client.volumes.get("muster-test-volume").remove()
