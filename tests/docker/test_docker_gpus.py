"""GPUs on a real engine: one without NVIDIA's runtime, one that believes in a fake hook, and one with GPUs if there is.

The engine hands device ids to NVIDIA's hook in NVIDIA_VISIBLE_DEVICES, which the container sees too. With a hook that
does nothing it does all the rest for real: so who gets which device is seen without having one.
"""

import itertools
import os

import pytest
from torchx.specs import AppState, Resource

from muster.schedulers import gpus as listing
from muster.schedulers.docker.running_apps import reservations
from muster.schedulers.docker.sdk import DockerError
from muster.schedulers.docker.spec import Label

pytestmark = pytest.mark.docker

BARE = "muster-test:bare"
SAYS = "echo $NVIDIA_VISIBLE_DEVICES; exec sleep 600"


def with_gpus(app, *gpus):
    """The same app with so many GPUs per replica of each role."""
    for role, count in zip(app.roles, gpus, strict=True):
        role.resource = Resource(cpu=-1, gpu=count, memMB=0)
    return app


def test_missing_runtime_is_refused_before_anything_is_created(apps, app_of, client):
    try:
        reservations.check_runtime(client.info())
    except DockerError:
        created = client.events(filters={"event": "create", "type": "container"}, decode=True)
        # an image that is nowhere: not even a pull is tried
        app = with_gpus(app_of("true", replicas=2, image="muster-test:none"), 1)
        apps.refuse(app, r"needs GPUs, but the engine has no NVIDIA runtime \(it has .*runc.*NVIDIA Container Toolkit")
        client.containers.create(BARE, "true", name="muster-test-marker").remove()
        since = iter(lambda: next(created)["Actor"]["Attributes"], None)
        before = list(itertools.takewhile(lambda each: each["name"] != "muster-test-marker", since))
        created.close()
        assert [each for each in before if app.name in each.get(Label.APP, "")] == []
    else:
        pytest.skip("this engine can hand out GPUs")


def test_each_replica_has_gpus_of_its_own_and_so_has_each_app(apps_with_gpus, app_of, wait_until, monkeypatch):
    apps = apps_with_gpus

    def sees(app_id, replica=0):
        return wait_until(lambda: apps.logs(app_id, replica=replica), "output")

    first = apps.run(with_gpus(app_of(SAYS, image="tiny", replicas=2, max_retries=1), 1))
    assert [sees(first, replica) for replica in range(2)] == [["GPU-aaaa\n"], ["GPU-bbbb\n"]]
    message = r"needs 2 GPUs \(2\), this host has 3, 2 of them in use by other containers"
    apps.refuse(with_gpus(app_of("true", image="tiny"), 2), message)
    second = apps.run(with_gpus(app_of(SAYS, image="tiny"), 1))
    assert sees(second) == ["GPU-cccc\n"]
    (lost,) = apps.containers(first, replica=1)
    lost.kill("SIGKILL")
    wait_until(lambda: apps.logs(first, replica=1) == ["GPU-bbbb\n"] * 2, "the replacement, on the same device")
    apps.cancel(first)
    assert apps.wait(first).state == AppState.CANCELLED
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    third = apps.run(with_gpus(app_of(SAYS, image="tiny"), 2))  # what an app had is free when it has ended
    assert sees(third) == ["GPU-bbbb,GPU-aaaa\n"]


def test_replicas_see_the_gpus_they_were_given(apps, app_of, client):
    """On a machine that has some."""
    try:
        gpus = reservations.limit_visible(listing.list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        reservations.check_runtime(client.info())
    except (DockerError, listing.GpuError) as fault:
        pytest.skip(str(fault))
    replicas = min(2, len(gpus))
    app_id = apps.run(with_gpus(app_of("nvidia-smi -L; exec sleep 600", image=BARE, replicas=replicas), 1))
    seen = [list(listing.parse_gpus(apps.inside(app_id, "nvidia-smi -L", replica=r))) for r in range(replicas)]
    assert seen == [[gpu] for gpu in gpus[:replicas]]
    apps.refuse(with_gpus(app_of("true", image=BARE), len(gpus)), f"{replicas} of them in use")
