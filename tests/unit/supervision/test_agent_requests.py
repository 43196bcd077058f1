"""An app that is asked for something, while another shell deletes it or its supervisor cannot go on."""

import errno
import io
import os
import shutil
import tempfile
from dataclasses import replace

import pytest
from supervised_apps import make_folder

from muster._shared.contract import AskOutcome
from muster._shared.control import NOT_REACHED, CommandExit, ControlError
from muster._shared.reports import Answer
from muster.schedulers.errors import EngineError
from muster.schedulers.local import create_detached_scheduler
from muster.schedulers.supervision import agent_requests, app_folder, client
from muster.schedulers.supervision.app_folder import AppFolder, AppRecord, StateError
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.state import (
    AppPhase,
    ReplicaId,
    ReplicaState,
    ReplicaStatus,
    RetryScope,
    SupervisedApp,
    SupervisedRole,
)

PLAN = SupervisedRole(name="r", replicas=1, runs_agent=True, min_replicas=1, max_retries=0, retry_scope=RetryScope.ROLE)


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "app-x", roles=(PLAN,), details={"token": "h1dden"})


def test_every_role_has_the_whole_limit(folder, monkeypatch):
    """Roles are asked one after the other; the supervisor must not end the second while it saves."""
    two = replace(folder.read_spec(), roles=(PLAN, replace(PLAN, name="s")))
    record = AppRecord(app=SupervisedApp(replicas={}), machine=Machine.here())
    requests = []
    monkeypatch.setattr(agent_requests, "read_running", lambda folder: (two, record))
    monkeypatch.setattr(AppFolder, "send_request", lambda folder, request: requests.append(request) or True)
    monkeypatch.setattr(agent_requests, "_wait_recorded", lambda folder, is_so: folder.read_record())
    done = Answer(outcome=AskOutcome.DONE, line="stopped")
    monkeypatch.setattr(agent_requests, "ask_roles", lambda *_: done)
    monkeypatch.setattr(client, "wait_ended", lambda folder, limit_s: True)
    assert agent_requests.stop_app(folder, 60.0, answer_nothing) == done  # it said twice that they had stopped
    assert requests == [f"drain:{120 + agent_requests.DRAIN_MARGIN_S:g}"]


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_stop_that_cannot_be_asked_for_is_withdrawn_if_no_agent_has_ended(folder, monkeypatch, goes_on):
    """All replicas got SIGTERM without having saved."""
    replicas = {ReplicaId("r", 0): ReplicaState(status=ReplicaStatus.RUNNING)}
    record = AppRecord(app=SupervisedApp(replicas=replicas), machine=Machine.here())
    records, requests = [], []
    monkeypatch.setattr(agent_requests, "read_running", lambda folder: (folder.read_spec(), record))
    monkeypatch.setattr(agent_requests, "_wait_recorded", lambda folder, is_so: folder.read_record())

    def send(folder, request):
        requests.append(request)
        phase = AppPhase.RUNNING if goes_on else AppPhase.ENDING
        records.append(replace(record, app=replace(record.app, phase=phase, draining=int(not goes_on))))
        return True

    monkeypatch.setattr(AppFolder, "send_request", send)
    monkeypatch.setattr(AppFolder, "read_record", lambda folder: records[-1] if records else None)
    monkeypatch.setattr(client, "wait_ended", lambda folder, limit_s: len(requests) == 3)
    answer = agent_requests.stop_app(folder, 60.0, lambda *_: (NOT_REACHED, "", "no route"))
    drains = [f"drain:{60 + agent_requests.DRAIN_MARGIN_S:g}", "drain:0"]
    assert requests == (drains if goes_on else [*drains, "cancel"])
    assert answer.outcome is (AskOutcome.UNREACHED if goes_on else AskOutcome.DONE)
    assert "asked: no route" in answer.line


@pytest.fixture(params=[errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
def refuse_to_write(request):
    def refuse(path, text):
        raise OSError(request.param, os.strerror(request.param))

    return refuse


@pytest.mark.parametrize(
    "stop", [lambda folder: agent_requests.stop_app(folder, 1.0, answer_nothing), client.request_stop]
)
def test_an_app_on_a_full_disk_is_stopped_by_its_supervisor(folder, monkeypatch, stop, refuse_to_write):
    record = AppRecord(app=SupervisedApp(replicas={}), machine=Machine.here())
    requests = []
    monkeypatch.setattr(agent_requests, "read_running", lambda folder: (folder.read_spec(), record))
    monkeypatch.setattr(app_folder, "write_text", refuse_to_write)
    monkeypatch.setattr(AppFolder, "send_request", lambda folder, request: requests.append(request) or True)
    monkeypatch.setattr(agent_requests, "_wait_recorded", lambda *_: pytest.fail("nothing can be recorded"))
    monkeypatch.setattr(agent_requests, "ask_roles", lambda *_: Answer(outcome=AskOutcome.DONE, line="stopped"))
    monkeypatch.setattr(client, "wait_ended", lambda folder, limit_s: True)
    stop(folder)
    assert len(requests) == 1


@pytest.mark.parametrize(
    "stop", [lambda folder: agent_requests.stop_app(folder, 1.0, answer_nothing), client.request_stop]
)
def test_on_a_full_disk_no_supervisor_is_started_that_would_go_on(folder, monkeypatch, stop, refuse_to_write):
    record = AppRecord(app=SupervisedApp(replicas={}), machine=Machine.here())
    monkeypatch.setattr(agent_requests, "read_running", lambda folder: (folder.read_spec(), record))
    monkeypatch.setattr(app_folder, "write_text", refuse_to_write)
    monkeypatch.setattr(AppFolder, "send_request", lambda folder, request: False)
    told = rf"{folder.path}: (No space left on device|Read-only file system)$"
    with pytest.raises(EngineError, match=told):
        stop(folder)


def test_an_app_that_is_just_deleted_or_damaged_keeps_no_other_one_running(folder, monkeypatch, caplog):
    others = []
    for name in ("deleted", "damaged"):
        others.append(AppFolder(folder.path.with_name(name)))
        others[-1].create(replace(folder.read_spec(), app_id=name, folder=str(others[-1].path)))
    told = []

    def tell(folder, request):
        if not told:
            shutil.rmtree(others[0].path)
            others[1].spec_file.write_text("[]")
        told.append(f"{folder.path.name} {request}")
        return True

    monkeypatch.setattr(AppFolder, "send_request", tell)
    client.end_all([AppFolder(folder.path.with_name("none")), folder, *others, folder], flush_s=0.0)
    assert told == ["app-x cancel", "app-x cancel"]
    assert "spec.json cannot be read" in caplog.text


def test_a_resize_on_a_full_disk_is_refused_at_once(folder, monkeypatch):
    """The supervisor carried it out without a record, for which the command waited in vain."""
    record = AppRecord(app=SupervisedApp(replicas={ReplicaId("r", 0): ReplicaState()}), machine=Machine.here())
    folder.write_record(record)
    requests = []
    monkeypatch.setattr(agent_requests, "read_running", lambda folder: (folder.read_spec(), record))
    monkeypatch.setattr(AppFolder, "send_request", lambda folder, request: requests.append(request) or True)
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda **_: io.FileIO("/dev/full", "w"))
    with pytest.raises(ControlError) as error:
        agent_requests.resize_app(folder, 1, lambda spec: PLAN)
    assert f"{folder.path}: No space" in str(error.value)
    assert (error.value.exit_code, requests) == (CommandExit.REFUSED, [])


def open_app(folder):
    scheduler = create_detached_scheduler("test")
    scheduler.find_folder = lambda app_id: folder
    return scheduler._open_app(folder.path.name)


def answer_nothing(spec, replica, words, limit_s):
    raise AssertionError("it was asked")


def test_an_app_that_is_deleted_while_it_is_stopped(folder, monkeypatch):
    record = AppRecord(app=SupervisedApp(replicas={}), machine=Machine.here())
    found = (folder.read_spec(), record)
    monkeypatch.setattr(agent_requests, "read_running", lambda folder: found)
    shutil.rmtree(folder.path)
    with (
        pytest.raises(ControlError, match="no app 'app-x'") as error,
        open_app(folder) as opened,
    ):
        agent_requests.stop_app(opened, 1.0, answer_nothing)
    assert error.value.exit_code is CommandExit.UNKNOWN


@pytest.mark.parametrize("error", [EngineError("it ended early"), StateError("it ended early")])
def test_a_supervisor_that_cannot_go_on(folder, error):
    with (
        pytest.raises(ControlError, match="it ended early") as explained,
        open_app(folder),
    ):
        raise error
    assert explained.value.exit_code is CommandExit.LOST


def test_an_app_that_is_just_ending(folder, monkeypatch):
    """Its secrets go before its end is recorded; without them no agent can be asked."""
    folder.write_record(AppRecord(app=SupervisedApp(replicas={}), machine=Machine.here()))
    folder.remove_secrets()
    monkeypatch.setattr(client, "is_supervised", lambda folder, record: True)
    with pytest.raises(ControlError, match="has ended already") as error:
        agent_requests.read_running(folder)
    assert error.value.exit_code is CommandExit.ENDED


def test_an_app_that_ends_before_its_nodes_have_left_was_not_resized(folder, monkeypatch):
    """Its answer was that of a resize, with exit code 0."""
    monkeypatch.setattr(client, "has_ended", lambda record: True)
    folder.write_record(AppRecord(app=SupervisedApp(replicas={}), machine=Machine.here()))
    with pytest.raises(ControlError, match=r"^app-x .* being resized$") as ended:
        agent_requests._wait_left(
            folder, folder.read_spec(), "app-x has 1 node from now on: ", [ReplicaId("r", 1)], 0.0
        )
    assert ended.value.exit_code is CommandExit.ENDED
