"""Where an app runs: told by boot and installation, not by the host name, which may change."""

import socket
from contextlib import nullcontext
from dataclasses import replace

import pytest
from supervised_apps import make_folder

from muster._shared.control import ControlError
from muster.schedulers.supervision import agent_requests, client, machine
from muster.schedulers.supervision.app_folder import AppRecord, ProcessId
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.state import AppPhase, SupervisedApp

HERE = Machine(host="one", boot_id="boot-1", machine_id="disk-1", pid_namespace="pid:[1]")


@pytest.mark.parametrize(
    ("record", "shows_pids", "shares_kernel", "is_later_boot"),
    [
        (HERE, True, True, False),
        (replace(HERE, host="renamed"), True, True, False),
        (replace(HERE, pid_namespace="pid:[2]"), False, True, False),  # another container
        (replace(HERE, boot_id="boot-0"), False, False, True),
        (replace(HERE, boot_id="boot-0", host="renamed"), False, False, True),
        (replace(HERE, boot_id="boot-0", machine_id="disk-2"), False, False, False),  # another machine of that name
    ],
)
def test_where_an_app_runs(record, shows_pids, shares_kernel, is_later_boot):
    assert HERE.shows_pids_of(record) is shows_pids
    assert HERE.shares_kernel_with(record) is shares_kernel
    assert HERE.is_later_boot_of(record) is is_later_boot


def test_this_machine_is_itself_under_another_name(monkeypatch):
    before = Machine.here()
    monkeypatch.setattr(socket, "gethostname", lambda: "renamed")
    after = Machine.here()
    assert after.host == "renamed"
    assert after.shows_pids_of(before)
    assert before.pid_namespace


def test_the_id_of_the_installation_is_not_published(tmp_path, monkeypatch):
    file = tmp_path / "machine-id"
    file.write_text("0123456789abcdef\n")
    monkeypatch.setattr(machine, "_MACHINE_ID_FILES", (file,))
    assert machine.read_machine_id() not in "0123456789abcdef"
    assert len(machine.read_machine_id()) == 12
    file.write_text("")
    assert machine.read_machine_id() == socket.gethostname()


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "a")


def record_of(where):
    app = SupervisedApp(replicas={}, phase=AppPhase.RUNNING)
    return AppRecord(app=app, machine=where, supervisor=ProcessId(pid=1, start_ticks="not its start"))


@pytest.mark.parametrize(
    ("where", "supervised"),
    [
        (replace(Machine.here(), host="renamed"), False),
        (replace(Machine.here(), pid_namespace="pid:[1]"), False),  # the lock is free
        (replace(Machine.here(), boot_id="earlier"), False),
        (Machine(host="elsewhere", boot_id="b", machine_id="m", pid_namespace="pid:[1]"), None),
    ],
)
def test_a_dead_supervisor_is_missed_under_any_host_name(folder, where, supervised, monkeypatch):
    started = []
    monkeypatch.setattr(client, "start_supervisor", lambda *_, **how: started.append(how))
    folder.write_record(record_of(where))
    assert client.is_supervised(folder, record_of(where)) is supervised
    is_lost = supervised is False
    assert bool(client.find_loss(folder, client.read_app(folder)[1])) is is_lost
    assert started == []  # looking starts nothing
    client.revive_app(folder)
    with nullcontext() if is_lost else pytest.raises(ControlError):
        agent_requests.recover_app(folder)
    assert started == ([{}, {"recovers": True}] if is_lost else [])


def test_restarts_of_a_supervisor_keep_their_distance(folder, monkeypatch):
    waits = []
    monkeypatch.setattr(client, "start_supervisor", lambda *_: folder.lock_file.touch())
    monkeypatch.setattr(client.time, "sleep", waits.append)
    folder.write_record(record_of(Machine.here()))
    for _ in range(3):
        client.revive_app(folder)
    assert len(waits) == 2  # none before the first
    assert all(0 < wait_s <= client.RESTART_INTERVAL_S for wait_s in waits)
