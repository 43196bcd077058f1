"""What an engine refuses, lacks or limits: names, commands, memory, address pools, other users' objects."""

import os
from contextlib import closing

import pytest
from torchx.specs import AppState

from muster.schedulers.docker.engine import Engine
from muster.schedulers.docker.sdk import NoAddressPool
from muster.schedulers.errors import EngineError, SchedulerError

pytestmark = pytest.mark.docker


def submit_as(apps, app, app_id, **cfg):
    """Submit under a name of the test's choice."""
    from dataclasses import replace

    info = apps.runner.dryrun(app, "docker", cfg=cfg)
    made = info.request
    old = made.request.app_id

    def rename(value):
        return value.replace(old, app_id) if isinstance(value, str) else value

    containers = tuple(replace(each, name=rename(each.name)) for each in made.request.containers)
    request = replace(made.request, app_id=app_id, network=app_id, containers=containers)
    spec = replace(made.spec, app_id=app_id, folder=rename(made.spec.folder))
    info.request = replace(made, request=request, spec=spec)
    return apps.scheduler.schedule(info)


def list_containers(apps, prefix):
    """Without looking at each: those of other tests may go meanwhile."""
    names = [name.lstrip("/") for each in apps.client.api.containers(all=True) for name in each["Names"]]
    return [name for name in names if name.startswith(prefix)]


def test_missing_command_is_one_line_and_not_retried(apps, app_of):
    message = "'muster-test:torch' has no 'no-such-command'"
    try:
        app_id = apps.run(app_of("", entrypoint="no-such-command", replicas=2, max_retries=3, name="gone"))
    except EngineError as error:  # it was fast: the submission was taken back
        assert message in str(error)  # noqa: PT017  # both outcomes are right, which one comes is a race
        assert not list_containers(apps, "gone-")
        assert not [n for n in apps.client.networks.list() if n.name.startswith("gone-")]
        return
    status = apps.wait(app_id)
    assert status.state == AppState.FAILED
    assert message in status.msg
    assert status.num_restarts == 0


def test_containers_of_the_same_name_are_refused_and_not_touched(apps, app_of):
    """Of a second app of one name, and of another program."""
    apps.ids.append(submit_as(apps, app_of("sleep 600"), "twin"))
    with pytest.raises(SchedulerError, match="'twin'"):
        submit_as(apps, app_of("sleep 600"), "twin")
    assert apps.status("twin").state == AppState.RUNNING
    assert len(apps.containers("twin", every=False)) == 1
    foreign = apps.client.containers.create("muster-test:bare", "true", name="clash-w-1")
    try:
        with pytest.raises(EngineError, match="clash-w-1"):
            submit_as(apps, app_of("true", replicas=2), "clash")
        assert apps.left("clash") == []
        foreign.reload()
    finally:
        foreign.remove()


def fill_address_pools(engine, label):
    for number in range(30):
        try:
            engine.create_network(f"muster-fill-{number}", label)
        except NoAddressPool:
            return
    pytest.fail("30 networks fit")


@pytest.mark.long
def test_exhausted_address_pools_are_one_line(apps_of_own_engine, app_of):
    label = {"io.muster.test": "fills-pools"}
    with closing(Engine(os.environ)) as engine:
        try:
            fill_address_pools(engine, label)
            why = r"remove unused networks \(docker network prune\) or name an existing one with -cfg network=NAME"
            apps_of_own_engine.refuse(app_of("true", image="tiny"), why)
        finally:
            for network in engine.list_networks(label):
                engine.remove_network(network["Id"])


def test_objects_of_others_are_not_touched(apps, app_of, monkeypatch):
    from muster.schedulers.docker import scheduler
    from muster.schedulers.docker.running_apps import orphaned_apps

    app_id = apps.run(app_of("sleep 600"))
    theirs = {"torchx.pytorch.org/app-id": "theirs", "torchx.pytorch.org/role-name": "w"}
    theirs["torchx.pytorch.org/replica-id"] = "0"
    foreign = apps.client.containers.run("muster-test:bare", "sleep 600", detach=True, labels=theirs)
    try:
        assert "theirs" not in [item.app_id for item in apps.scheduler.list()]
        apps.delete("theirs")
        with monkeypatch.context() as elsewhere:
            for module in (scheduler, orphaned_apps):
                elsewhere.setattr(module, "build_user_id", lambda: "0@elsewhere")
            elsewhere.setenv("XDG_STATE_HOME", os.environ["XDG_STATE_HOME"] + "-other")
            assert app_id not in [item.app_id for item in apps.scheduler.list()]
            assert apps.scheduler.describe(app_id) is None
            apps.delete(app_id)
        foreign.reload()
        assert foreign.status == "running"
        assert len(apps.containers(app_id, every=False)) == 1
    finally:
        foreign.remove(force=True)


def test_app_without_its_state_folder_is_known_by_its_labels(apps, app_of, monkeypatch):
    app_id = apps.run(app_of("trap 'exit 0' TERM; while :; do sleep 0.1; done", replicas=2))
    home = os.environ["XDG_STATE_HOME"]
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("XDG_STATE_HOME", os.environ["XDG_STATE_HOME"] + "-other")
        assert apps.scheduler.describe(app_id).state == AppState.RUNNING
        assert f"state is in {home}/muster;" in apps.scheduler.describe(app_id).msg
        listed = {item.app_id: item.has_other_home for item in apps.scheduler.list()}
        assert listed[app_id] is True
        apps.cancel(app_id)
        assert apps.containers(app_id, every=False) == []
