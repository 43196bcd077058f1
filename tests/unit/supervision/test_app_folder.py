import fcntl
import os
import stat
from contextlib import ExitStack, nullcontext, suppress

import pytest
from supervised_apps import build_spec

from muster.schedulers.errors import EngineError
from muster.schedulers.supervision import client
from muster.schedulers.supervision.app_folder import (
    AppFolder,
    AppRecord,
    ProcessId,
    StateError,
    is_own_app_folder,
)
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.registry import AppRegistry, find_state_dir
from muster.schedulers.supervision.state import (
    AppPhase,
    Outcome,
    ReplicaId,
    ReplicaState,
    ReplicaStatus,
    RetryScope,
    SupervisedApp,
    SupervisedRole,
)
from muster.schedulers.wording.reasons import Code, Reason

PLAN = SupervisedRole(name="r", replicas=2, runs_agent=True, min_replicas=1, max_retries=3, retry_scope=RetryScope.ROLE)


@pytest.fixture
def spec(tmp_path):
    return build_spec(
        tmp_path / "app-x",
        roles=(PLAN,),
        grace_s=2.5,
        owner=ProcessId(pid=1, start_ticks="5"),
        description={"name": "app"},
        details={"token": "h1dden"},
    )


@pytest.fixture
def folder(spec):
    folder = AppFolder(spec.folder)
    folder.create(spec)
    return folder


def test_a_spec_survives_the_disk(spec, folder):
    assert folder.read_spec() == spec


def test_secrets_are_for_the_owner_and_go_at_the_end(folder):
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.private_file.stat().st_mode) == 0o600
    assert "h1dden" not in folder.spec_file.read_text()
    folder.remove_secrets()
    assert folder.read_spec().details == {}


def test_a_record_survives_the_disk(folder):
    assert folder.read_record() is None
    first, second = ReplicaId("r", 0), ReplicaId("r", 1)
    record = AppRecord(
        app=SupervisedApp(
            replicas={
                first: ReplicaState(status=ReplicaStatus.LOST, starts=2, exit_code=137),
                second: ReplicaState(status=ReplicaStatus.RUNNING, starts=1),
            },
            phase=AppPhase.RESTARTING,
            retries={"r": 2},
            restarting=("r",),
            grace_number=3,
            lingering=3,
            outcome=Outcome.FAILED,
            reasons=(
                Reason(
                    code=Code.AGENT_ENDED,
                    replica="r/0",
                    exit_code=0,
                    causes=(Reason(code=Code.JOB_FAILED, text="because", count=0, suspected=("n1", "n2")),),
                ),
            ),
        ),
        machine=Machine.here(),
        supervisor=ProcessId.of(os.getpid()),
        handles={second: {"pid": 7}},
        hosts={first: "b"},
        submitted_s=1.5,
        ended_s=2.5,
    )
    folder.write_record(record)
    assert folder.read_record() == record
    assert [name for name in os.listdir(folder.state_dir) if name.startswith(".")] == []


def test_no_role_gets_the_folder_of_the_state(spec, folder):
    folder.write_request("cancel")
    (folder.state_dir / "muster-agent.zip").touch()
    names = [
        "r",
        ".",
        "..",
        ".muster",
        "..muster",
        ".x",
        "..x",
        "torchelastic",
        "0",
        "lock",
        "supervisor.log",
        "spec.json",
    ]
    names += os.listdir(folder.state_dir)
    of_roles = [folder.replica_dir(ReplicaId(name, 0)) for name in dict.fromkeys(names) if name not in (".", "..")]
    for made in of_roles:
        made.mkdir(parents=True)
    assert all(made.parents[1] == folder.path and folder.state_dir not in made.parents for made in of_roles)
    assert AppFolder(spec.folder).read_spec() == spec
    assert AppFolder(spec.folder).read_request() == "cancel"


def test_a_process_is_its_pid_and_its_start():
    me = ProcessId.of(os.getpid())
    assert me.is_alive()
    assert not ProcessId(pid=me.pid, start_ticks="1").is_alive()


def test_a_kill_request_is_not_undone(folder):
    assert folder.read_request() is None
    folder.write_request("cancel")
    folder.write_request("kill")
    folder.write_request("cancel")
    assert folder.read_request() == "kill"


def test_a_request_to_a_dead_supervisor_is_detected(folder, tmp_path):
    assert not folder.send_request("cancel")
    assert not AppFolder(tmp_path / "nowhere").send_request("cancel")


def test_no_secret_stays_when_the_pipe_cannot_be_made(spec, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "mkfifo", refuse)
    folder = AppFolder(spec.folder)
    with pytest.raises(PermissionError):
        folder.create(spec)
    assert not folder.path.exists()


def test_a_request_to_a_supervisor_that_ends_meanwhile_is_not_sent(folder, monkeypatch):
    reader = os.open(folder.control_pipe, os.O_RDONLY | os.O_NONBLOCK)
    open_ = os.open

    def open_then_end(*words):
        fd = open_(*words)
        os.close(reader)
        return fd

    monkeypatch.setattr(os, "open", open_then_end)
    assert not folder.send_request("cancel")


def test_the_lock_tells_whether_a_supervisor_runs_in_another_namespace(folder):
    assert not folder.is_locked()
    with open(folder.lock_file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert folder.is_locked()
    assert not folder.is_locked()


def test_apps_of_another_host_are_only_read(spec, folder):
    app = SupervisedApp(
        replicas={ReplicaId("r", 0): ReplicaState(status=ReplicaStatus.RUNNING)}, phase=AppPhase.RUNNING
    )
    elsewhere = AppRecord(
        app=app,
        machine=Machine(host="another-host", boot_id="b", machine_id="another", pid_namespace="pid:[1]"),
        supervisor=ProcessId(pid=1, start_ticks="no such start"),
    )
    folder.write_record(elsewhere)
    assert client.read_app(folder) == (spec, elsewhere)


def test_a_wait_looks_for_signals_again_and_again(monkeypatch, folder):
    """One that arrives between Python's last look and the system call does not end that."""
    running = SupervisedApp(
        replicas={ReplicaId("r", 0): ReplicaState(status=ReplicaStatus.RUNNING)}, phase=AppPhase.RUNNING
    )
    folder.write_record(AppRecord(app=running, machine=Machine.here(), supervisor=ProcessId.of(os.getpid())))
    limits = []

    def wait(_fd, limit_s):
        limits.append(limit_s)
        if len(limits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(client.processes, "wait_readable", wait)
    with pytest.raises(KeyboardInterrupt):
        client.wait_ended(folder, limit_s=60.0)
    assert max(limits) <= client.INTERRUPT_POLL_S


def test_registry_finds_and_removes_apps(tmp_path, spec):
    registry = AppRegistry(tmp_path / "state", "local_cwd")
    assert list(registry) == []
    assert registry.open("app-x") is None
    registry.add("app-x", AppFolder(spec.folder).path)
    assert registry.open("app-x") is None, "a link without an app is no app"
    AppFolder(spec.folder).create(spec)
    assert registry.open("app-x").path == AppFolder(spec.folder).path
    assert list(registry) == ["app-x"]
    registry.remove("app-x")
    registry.remove("app-x")
    assert list(registry) == []


@pytest.mark.parametrize("app_id", ["", ".", "..", "../x", "a/b", "/etc"])
def test_registry_stays_in_its_folder(tmp_path, app_id):
    assert AppRegistry(tmp_path, "local_cwd").open(app_id) is None


def test_state_dir_prefers_xdg_then_home(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    xdg, home = tmp_path / "xdg", tmp_path / "home"
    assert find_state_dir({"XDG_STATE_HOME": str(xdg), "HOME": str(home)}) == xdg / "muster"
    assert find_state_dir({"XDG_STATE_HOME": "relative", "HOME": str(home)}) == home / ".local/state/muster"
    assert find_state_dir({"HOME": "/proc/nowhere"}) == tmp_path / f"muster-{os.geteuid()}"


def test_only_app_folders_are_ever_removed(tmp_path, spec):
    assert not is_own_app_folder(tmp_path)
    AppFolder(spec.folder).create(spec)
    assert is_own_app_folder(AppFolder(spec.folder).path)


def test_files_of_another_format_are_refused_and_can_be_removed(tmp_path, spec):
    folder, registry = AppFolder(spec.folder), AppRegistry(tmp_path / "state", "local_cwd")
    folder.create(spec)
    registry.add(spec.app_id, folder.path)
    for file in (folder.state_file, folder.spec_file):
        file.write_text('{"format": 99}')
        with pytest.raises(EngineError, match=rf"^{file} .* format 99"):
            client.read_app(folder)
    client.delete(folder, registry, spec.app_id)
    assert not folder.path.exists()
    assert list(registry) == []


def test_an_interrupt_while_asking_for_the_end_kills(folder, monkeypatch):
    words = []

    def ask(_folder, word="cancel"):
        words.append(word)
        if word == "cancel":
            raise KeyboardInterrupt

    monkeypatch.setattr(client, "request_stop", ask)
    monkeypatch.setattr(client, "has_ended", lambda _: False)
    monkeypatch.setattr(client, "wait_ended", lambda *_, **__: True)
    monkeypatch.setattr(AppFolder, "read_record", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        client.end_all([folder], flush_s=1)
    assert words == ["cancel", "kill"]


def test_a_ctrl_c_that_ends_the_program_is_told(spec, monkeypatch):
    """A pipeline that closes its runner for another reason stops its apps without one."""
    folder, words = AppFolder(spec.folder), []
    folder.create(spec)
    monkeypatch.setattr(client, "request_stop", lambda _, word: words.append(word))
    monkeypatch.setattr(client, "wait_ended", lambda *_, **__: True)
    for error in (KeyboardInterrupt, ValueError):
        with suppress(error), ExitStack() as stack:  # as TorchX leaves its runner
            stack.callback(client.end_all, [folder], flush_s=1)
            raise error
    client.end_all([folder], flush_s=1)
    assert words == ["interrupt", "cancel", "cancel"]


@pytest.mark.parametrize("interrupts", [False, True])
def test_an_app_that_cannot_be_stopped_keeps_no_other_one_running(spec, monkeypatch, caplog, interrupts):
    folders = [AppFolder(spec.folder), AppFolder(f"{spec.folder}-2")]
    asked, waited = [], []

    def ask(folder, word="cancel"):
        asked.append((folder.path.name, word))
        raise EngineError(f"no supervisor of {folder.path.name} runs")

    def wait(folder, *, limit_s):
        waited.append(folder.path.name)
        if interrupts and len(waited) == 1:
            raise KeyboardInterrupt
        raise EngineError(f"no supervisor of {folder.path.name} runs")

    for folder in folders:
        folder.create(spec)
    monkeypatch.setattr(client, "request_stop", ask)
    monkeypatch.setattr(client, "wait_ended", wait)
    with pytest.raises(KeyboardInterrupt) if interrupts else nullcontext():
        client.end_all(folders, flush_s=1)
    words = ["cancel", "kill"] if interrupts else ["cancel"]
    assert asked == [(name, word) for word in words for name in ("app-x", "app-x-2")]
    assert waited[-2:] == ["app-x", "app-x-2"]
    assert "supervisor of app-x-2" in caplog.text


@pytest.mark.parametrize(
    "text",
    [b"[" * 1_000_000, b"[]", b"7", b"\xff", b'{"format": 1, "replicas": 5}', b"[1" + b"0" * 400 + b"]"],
    ids=range(6),
)
def test_damaged_files_are_one_error_that_names_them(spec, folder, text):
    folder.state_file.write_bytes(text)
    with pytest.raises(StateError, match=r"state\.json cannot be read"):
        folder.read_record()
    folder.spec_file.write_bytes(text)
    with pytest.raises(StateError, match=r"spec\.json cannot be read"):
        folder.read_spec()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)], ids=range(3))
def test_what_is_no_file_is_one_error(tmp_path, folder, make):
    """`torchx list` waited for ever at a named pipe, read a device until memory was full, and ended at a folder."""
    make(folder.state_file)
    with pytest.raises(EngineError, match=r"state\.json cannot be read: "):
        client.read_app(folder)
