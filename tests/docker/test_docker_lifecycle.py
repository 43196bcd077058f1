"""An app from submission to deletion, on a real engine, with plain commands."""

import shutil

import pytest
from torchx.specs import AppDef, AppState, VolumeMount

pytestmark = pytest.mark.docker


def test_replicas_of_all_roles_have_names_and_find_rank0(apps, app_of):
    (lead,) = app_of("sleep 600", role="lead").roles
    (extra,) = app_of("sleep 600", role="extra", replicas=2).roles
    app_id = apps.run(AppDef(name="two", roles=[lead, extra]))
    assert apps.inside(app_id, "hostname", role="extra", replica=1) == "extra-1\n"
    address = apps.inside(app_id, "hostname -i", role="lead").strip()
    for name in ("$TORCHX_RANK0_HOST", "rank0", "lead-0"):
        found = apps.inside(app_id, f"getent hosts {name}", role="extra", replica=1)
        assert found.split()[0] == address, name
    assert apps.inside(app_id, "getent hosts extra-1", role="lead").split()[1] == "extra-1"
    assert {role.role: len(role.replicas) for role in apps.status(app_id).roles} == {"lead": 1, "extra": 2}


def test_a_cancelled_app_is_killed_after_its_grace_period_and_leaves_the_users_volume(apps, app_of, volume):
    mounts = [VolumeMount(src=volume.name, dst_path="/data")]
    words = "trap '' TERM; echo ready; while :; do sleep 1; done"
    app_id = apps.run(app_of(words, replicas=2, mounts=mounts), grace_s=1.0)
    assert next(iter(apps.runner.log_lines(f"docker://test/{app_id}", "w", 1, should_tail=True))) == "ready\n"
    apps.cancel(app_id)
    assert apps.wait(app_id).state == AppState.CANCELLED
    assert [container.attrs["State"]["ExitCode"] for container in apps.containers(app_id)] == [137, 137]
    apps.delete(app_id)
    assert volume.name in {each.name for each in apps.client.volumes.list()}, "not ours"


@pytest.mark.alone
def test_prune_removes_containers_whose_state_folder_is_gone(apps, app_of, shell):
    app_id = apps.run(app_of("true"))
    assert apps.wait(app_id).state == AppState.SUCCEEDED
    shutil.rmtree(apps.scheduler.find_folder(app_id).path)
    assert shell("prune", "--yes", "--older-than", "1h").code == 0
    assert apps.left(app_id)
    assert shell("prune", "--yes").code == 0
    assert apps.left(app_id) == []
