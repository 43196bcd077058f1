"""The driver with an engine that fails in ways a real one cannot be made to fail: every end is still reported."""

import errno
import io
import json
import queue
import tarfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from docker_samples import build_app, build_container, build_facts

from muster._shared.contract import AGENT_BUNDLE_NAME, FORMAT, LogNames
from muster.schedulers.docker import driver as drivers
from muster.schedulers.docker.driver import DockerDriver
from muster.schedulers.docker.engine import Engine
from muster.schedulers.docker.running_apps.exit_evidence import read_events
from muster.schedulers.docker.sdk import DockerError, EngineUnavailable, NotFound
from muster.schedulers.docker.spec import Label
from muster.schedulers.supervision.driver import EventQueue
from muster.schedulers.supervision.state import ReplicaId
from muster.schedulers.wording.reasons import Code, Reason

REPLICA = ReplicaId("w", 0)
COMMAND = ("python3", "/opt/muster/muster-agent.zip", "--rdzv-id", "job-7", "main.py")
_GOES_AWAY = object()


class ScriptedEngine:
    """One container, created before. A test defines what happens to it, and which calls fail how often."""

    def __init__(self):
        self.status, self.exit_code = "created", None
        self.happens = queue.SimpleQueue()
        self.failing = {}
        self.removed = []
        self.signals = queue.SimpleQueue()
        self.is_followed = threading.Event()

    def fail(self, call, *errors):
        self.failing[call] = list(errors)

    def _may_fail(self, call):
        if self.failing.get(call):
            raise self.failing[call].pop(0)

    def end(self, exit_code):
        self.status, self.exit_code = "exited", exit_code
        self.post("die", exitCode=str(exit_code))

    def post(self, action, **attributes):
        labels = {**build_app().labels, Label.ROLE: "w", Label.REPLICA: "0", Label.INCARNATION: "0"}
        self.happens.put({"Action": action, "Actor": {"ID": "c", "Attributes": {**labels, **attributes}}})

    def now_s(self):
        self._may_fail("now_s")
        return 0.0

    def events(self, actions, since_s):
        self.is_followed.set()
        while (event := self.happens.get()) is not _GOES_AWAY:
            yield event

    def inspect_container(self, container):
        self._may_fail("inspect_container")
        return build_facts(labels={Label.INCARNATION: "0"}, status=self.status, exit_code=self.exit_code)

    def list_containers(self, labels):
        return [self.inspect_container("c")]

    def is_available(self):
        return True

    def list_container_ids(self, labels, *, running_only=False):
        self._may_fail("list_container_ids")
        return []

    def start_container(self, container):
        self._may_fail("start_container")
        self.post("start")
        self.status = "running"

    def signal_container(self, container, name):
        self._may_fail("signal_container")
        self.signals.put(name)

    def wait_container(self, container, timeout_s):
        return 137

    def suspend_container(self, container, *, suspended):
        self._may_fail("suspend_container")
        self.signals.put("pause" if suspended else "unpause")

    def remove_container(self, container):
        self._may_fail("remove_container")
        self.removed.append(container)

    def copy_out(self, container, path, limit_bytes):
        self._may_fail("copy_out")

    def logs(self, container, *, stdout):
        self._may_fail("logs")
        yield 2, b"muster: --nproc-per-node 0: must be 1 or more\n"

    def list_volumes(self, labels):
        return {}


@pytest.fixture
def engine():
    return ScriptedEngine()


@pytest.fixture
def event_queue():
    event_queue = EventQueue()
    yield event_queue
    event_queue.close()


@pytest.fixture
def runs_agent():
    return True


@pytest.fixture
def driver(engine, event_queue, tmp_path, monkeypatch, runs_agent):
    monkeypatch.setattr(drivers, "RECONNECT_S", 0.0)
    (tmp_path / AGENT_BUNDLE_NAME).write_bytes(b"")
    app = build_app(build_container(command=COMMAND, runs_agent=runs_agent))
    driver = DockerDriver(engine, app, tmp_path, event_queue)
    yield driver
    monkeypatch.setattr(drivers, "STOP_S", 0.0)  # no test looks any more
    driver._closing.set()
    engine.happens.put(_GOES_AWAY)
    driver.close(succeeded=True)
    if driver._watcher is not None:
        driver._watcher.join()


def next_end(event_queue):
    """The next end; waits for it."""
    while (event := event_queue.pop()) is None:
        event_queue.run_once()
    return event


@pytest.mark.parametrize("error", [DockerError("cannot ask: 500"), ZeroDivisionError("a bug")])
def test_end_is_reported_after_an_error_in_the_watcher(driver, engine, event_queue, capfd, error):
    """The thread had ended after a bug, and the supervisor waited for the end of its app for ever."""
    engine.fail("now_s", error, error)
    start(driver)
    engine.end(3)
    assert next_end(event_queue).exit_code == 3
    assert capfd.readouterr().err.count(str(error)) == 1


@pytest.mark.parametrize("error", [DockerError("cannot inspect: 500"), ZeroDivisionError("a bug")])
def test_end_is_reported_after_errors_of_the_last_look_of_a_start(driver, engine, event_queue, capfd, error):
    """No event follows of a container that has ended while it was started: the app ran for ever."""

    def start_container(container):
        engine.status, engine.exit_code = "exited", 143  # with True for was_away it would be started again
        engine.fail("inspect_container", error, error, error)

    engine.start_container = start_container
    driver._ensure_watcher()
    engine.is_followed.wait()
    driver.start(REPLICA, 1)
    assert next_end(event_queue).exit_code == 143
    driver._closing.wait(0.05)
    assert event_queue.pop() is None
    assert capfd.readouterr().err.count(str(error)) == 1


@pytest.mark.parametrize("error", [EngineUnavailable("gone"), DockerError("500")])
def test_end_of_an_adopted_replica_is_reported_after_an_error_of_the_engine(driver, engine, event_queue, error):
    """The replica counted as starting from then on, so its end was ignored."""
    engine.status = "running"
    engine.fail("inspect_container", error, DockerError("cannot list containers: 500"))
    assert driver.adopt(REPLICA, {"start": 1})
    while driver._replicas[REPLICA].container is None:
        driver._closing.wait(0.001)
    engine.end(3)
    assert next_end(event_queue).exit_code == 3


@pytest.mark.parametrize("size", [0, 100, 600])
def test_a_broken_archive_is_an_error_of_the_engine(size):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("error.json")
        member.size = 1000
        archive.addfile(member, io.BytesIO(bytes(1000)))
    engine = Engine({})
    stream = iter([packed.getvalue()[:size]])
    engine._client = SimpleNamespace(api=SimpleNamespace(get_archive=lambda *_: (stream, {"size": 1000})))
    with pytest.raises(DockerError, match=r"'/error.json' .*'c': .+$"):
        engine.copy_out("c", "/error.json", 2000)


@pytest.mark.parametrize("errors", [[DockerError("500")] * 2, [EngineUnavailable("gone")]])
def test_end_is_reported_when_the_containers_files_cannot_be_read(driver, engine, event_queue, errors):
    """At all, or until a stopped engine is back."""
    engine.fail("copy_out", *errors)
    start(driver)
    engine.end(1)
    assert next_end(event_queue).exit_code == 1


@pytest.mark.parametrize(
    ("errors", "is_told"),
    [
        ((), True),
        ((EngineUnavailable("gone"),), True),
        ((DockerError("configured logging driver does not support reading"),), False),
    ],
)
@pytest.mark.parametrize("code", [2, 127])
def test_end_is_reported_when_the_engine_keeps_no_logs(driver, engine, event_queue, errors, is_told, code):
    """Those of an agent that refuses its arguments, and of an init that finds no command, are read for the reason."""
    engine.fail("logs", *errors)
    start(driver)
    engine.end(code)
    end = next_end(event_queue)
    said = Reason(code=Code.AGENT_SAID, text="--nproc-per-node 0: must be 1 or more")
    assert (end.exit_code, end.reasons) == (code, (said,) if code == 2 and is_told else ())


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (DockerError("no space left"), "no space left"),
        (OSError(errno.EIO, "Input/output error"), "[Errno 5] Input/output error"),
    ],
)
@pytest.mark.parametrize("of_removal", [EngineUnavailable("gone"), DockerError("busy"), NotFound("gone")])
def test_failed_start_is_reported_when_the_container_cannot_be_removed(
    driver, engine, event_queue, error, why, of_removal
):
    engine.fail("start_container", error)
    engine.fail("remove_container", of_removal)
    driver.start(REPLICA, 1)
    end = next_end(event_queue)
    assert (end.exit_code, end.final, end.reasons) == (127, True, (Reason(code=Code.COULD_NOT_START, text=why),))


def test_bug_in_a_thread_is_in_the_supervisors_log(driver, engine, capfd):
    engine.fail("start_container", ZeroDivisionError("a bug"))
    driver.start(REPLICA, 1)
    driver._closing.set()
    driver._pool.shutdown(wait=True)
    assert "ZeroDivisionError: a bug" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["restarts-w", LogNames.ERROR])
def test_end_is_reported_on_a_disk_that_cannot_be_written(driver, engine, event_queue, tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    monkeypatch.setattr(Path, "exists", lambda path: False)
    engine.copy_out = lambda container, path, limit_bytes: b'{"attempt": 2}\n'
    start(driver)
    engine.end(1)
    assert next_end(event_queue).exit_code == 1


def test_an_engine_that_hung_during_a_start_starts_the_container_later(driver, engine, event_queue):
    """The watcher's stream of events went on: nothing else says that it answers again."""
    engine.fail("start_container", EngineUnavailable("Read timed out"))
    driver._ensure_watcher()
    engine.is_followed.wait()
    driver.start(REPLICA, 1)
    while engine.status != "running":
        driver._closing.wait(0.001)
    engine.end(0)
    assert next_end(event_queue).exit_code == 0


@pytest.mark.parametrize("error", [EngineUnavailable("Read timed out"), DockerError("500")])
def test_a_signal_that_the_engine_did_not_take_is_sent_again(driver, engine, error):
    start(driver)
    engine.fail("signal_container", *[error] * 3)
    driver.stop(REPLICA)
    assert engine.signals.get() == "SIGTERM"


@pytest.mark.parametrize(("runs_agent", "word"), [(True, "SIGINT"), (False, "SIGTERM")], ids=["agent", "plain"])
def test_a_ctrl_c_reaches_agents_as_sigint(driver, engine, word):
    start(driver)
    driver.stop(REPLICA, is_interrupt=True)
    assert engine.signals.get() == word


def test_a_ctrl_c_is_not_sent_twice(driver, engine):
    """The engine may have sent the first one although its answer is lost, and a second one kills."""
    start(driver)
    engine.fail("signal_container", EngineUnavailable("Read timed out"))
    driver.stop(REPLICA, is_interrupt=True)
    assert engine.signals.get() == "SIGTERM"


def test_a_kill_during_a_start_is_no_mere_stop(driver, engine):
    """A program that ignores SIGTERM ran on, and its supervisor with it."""
    asked, may_start = threading.Event(), threading.Event()
    start_container = engine.start_container

    def start_slowly(container):
        asked.set()
        may_start.wait()
        start_container(container)

    engine.start_container = start_slowly
    driver.start(REPLICA, 1)
    asked.wait()
    driver.stop(REPLICA)
    driver.kill(REPLICA)
    while driver._replicas[REPLICA].asked != "SIGKILL":
        driver._closing.wait(0.001)
    may_start.set()
    assert engine.signals.get() == "SIGKILL"


@pytest.mark.parametrize("errors", [[], [EngineUnavailable("Read timed out")] * 3, [DockerError("500")] * 3])
@pytest.mark.parametrize(
    ("runs_agent", "call", "expected"),
    [
        (True, "signal_container", ["SIGTSTP", "SIGCONT"]),
        (False, "suspend_container", ["pause", "unpause"]),
    ],
    ids=["agent", "plain"],
)
def test_a_job_is_suspended_and_continued(driver, engine, call, expected, errors):
    """Also if the engine did not take it: a job whose continuation was lost stood still for ever."""
    start(driver)
    for suspended, word in zip((True, False), expected, strict=True):
        engine.fail(call, *errors)
        driver.suspend(suspended=suspended)
        assert engine.signals.get(timeout=30) == word


def test_a_continuation_before_a_stop_that_the_engine_did_not_take_is_sent_again(driver, engine):
    start(driver)
    driver.suspend(suspended=True)
    assert engine.signals.get() == "SIGTSTP"
    send, failing = engine.signal_container, [DockerError("500")]

    def refuse_once(container, name):
        if name == "SIGCONT" and failing:
            raise failing.pop()
        send(container, name)

    engine.signal_container = refuse_once
    driver.stop(REPLICA)
    assert [engine.signals.get(timeout=30) for _ in range(3)] == ["SIGTERM", "SIGTERM", "SIGCONT"]


def test_an_end_by_a_stopped_engine_is_no_loss_if_the_first_look_fails(driver, engine, event_queue):
    """The first look forgot that the engine was away."""
    start(driver)
    engine.status, engine.exit_code = "exited", 143
    engine.fail("inspect_container", DockerError("500"))
    restarted = threading.Event()
    driver._restart = lambda *_: restarted.set()
    driver._handle_failure(REPLICA, EngineUnavailable("gone"))
    assert restarted.wait(30)
    assert event_queue.pop() is None


def test_a_container_that_starts_while_the_job_is_suspended_is_suspended_too(driver, engine):
    driver.suspend(suspended=True)
    driver.start(REPLICA, 1)
    assert engine.signals.get() == "SIGTSTP"


@pytest.mark.parametrize("runs_agent", [False])
def test_a_container_that_a_person_restarts_has_not_ended(driver, engine, event_queue, monkeypatch):
    monkeypatch.setattr(drivers, "SETTLE_S", 0.02)
    start(driver)
    engine.post("kill", signal="15")
    engine.end(3)
    engine.post("stop")
    while not driver._outside_stops.may_restart("c"):
        driver._closing.wait(0.001)
    driver._closing.wait(0.1)  # more than the driver would have waited without "stop"
    engine.start_container("c")
    engine.exit_code = None
    while driver._outside_stops.may_restart("c"):
        driver._closing.wait(0.001)
    engine.end(0)
    assert next_end(event_queue).exit_code == 0


@pytest.mark.parametrize("runs_agent", [False])
@pytest.mark.parametrize("errors", [[], [DockerError("cannot list containers: 500")]])
def test_a_container_that_is_stopped_and_not_restarted_is_lost(driver, engine, event_queue, monkeypatch, errors):
    """The driver asks whether the engine stops. Without an answer it forgot the container, and the app ran for ever."""
    monkeypatch.setattr(drivers, "SETTLE_S", 0.02)
    monkeypatch.setattr(drivers, "RESTART_S", 0.1)
    start(driver)
    engine.fail("list_container_ids", *errors)
    engine.post("kill", signal="15")
    engine.end(143)
    engine.post("stop")
    assert next_end(event_queue).exit_code == 143
    driver._closing.wait(0.05)
    assert event_queue.pop() is None


@pytest.mark.parametrize("runs_agent", [False])
def test_a_container_that_is_started_again_after_its_end_was_reported_is_killed(driver, engine, event_queue):
    start(driver)
    engine.end(3)
    assert next_end(event_queue).exit_code == 3
    engine.start_container("c")
    assert engine.signals.get() == "SIGKILL"


@pytest.mark.parametrize("runs_agent", [False])
def test_a_container_that_is_restarted_while_the_app_is_closed_is_killed(driver, engine, event_queue):
    """The engine tells of the stop after the end, and the app was closed in between: the container ran on."""
    start(driver)
    engine.post("kill", signal="15")
    while "c" not in driver._outside_stops.signalled:
        driver._closing.wait(0.001)
    driver._closing.wait(0.05)
    driver.kill(REPLICA)
    assert engine.signals.get() == "SIGKILL"
    engine.end(137)
    assert next_end(event_queue).exit_code == 137

    def restart():
        pause = threading.Event()
        pause.wait(0.1)
        engine.post("stop")
        pause.wait(0.3)
        engine.start_container("c")
        engine.list_container_ids = lambda labels, *, running_only=False: ["c"]

    thread = threading.Thread(target=restart)
    thread.start()
    driver.close(succeeded=False)
    thread.join()
    assert engine.signals.get(timeout=1) == "SIGKILL"


def test_containers_that_still_run_at_the_end_are_killed(driver, engine):
    engine.list_container_ids = lambda labels, *, running_only=False: ["c"]
    driver.close(succeeded=False)
    assert engine.signals.get() == "SIGKILL"


def test_restarts_in_place_are_counted_from_the_first_nodes_records(driver, engine, event_queue, tmp_path):
    records = b'{"attempt": 0}\n{"attempt": 2}\n'
    asked = []

    def copy_out(container, path, limit_bytes):
        asked.append(path)
        return records if path.endswith("events.jsonl") else None

    engine.copy_out = copy_out
    details = {"request": driver._app.to_json()}
    start(driver)
    assert read_events(engine, tmp_path, details)[0] == 2
    engine.end(0)
    next_end(event_queue)
    engine.list_containers = lambda labels: []  # removed
    assert read_events(engine, tmp_path, {})[0] == 2
    assert set(asked) == {f"/var/opt/muster/logs/job-7/{name}" for name in ("events.jsonl", "status.json")}


def test_while_node_0_does_not_run_the_next_nodes_files_are_read(driver, engine, tmp_path):
    app = driver._app.to_json()
    second = {**app["containers"][0], "replica": 1}
    details = {"request": {**app, "containers": [app["containers"][0], second]}}
    states = {"0": "exited", "1": "running"}
    asked = []

    def list_containers(labels):
        replica = labels[Label.REPLICA]
        facts = {"id": f"c{replica}", "running": states[replica] == "running"}
        facts["started_at"] = "2027-01-15T08:00:00.5Z"
        return [SimpleNamespace(**facts)]

    engine.list_containers = list_containers
    engine.copy_out = lambda container, path, limit_bytes: asked.append(container)
    read_events(engine, tmp_path, details)
    assert set(asked) == {"c1"}
    asked.clear()
    states["0"] = "running"
    read_events(engine, tmp_path, details)
    assert set(asked) == {"c0"}
    for time_s, is_told in ((1_799_999_999.0, False), (1_800_000_001.0, True)):  # on a volume, an earlier container's
        status = json.dumps({"format": FORMAT, "step": 79, "time_s": time_s}).encode()
        engine.copy_out = lambda container, path, limit_bytes, status=status: asked.append(container) or status
        assert (read_events(engine, tmp_path, details)[1][REPLICA.role].status is not None) is is_told
    asked.clear()
    states.update({"0": "exited", "1": "exited"})
    read_events(engine, tmp_path, details)
    assert set(asked) == {"c0"}


def start(driver):
    """Start the container, and wait until the pool has done it."""
    driver.start(REPLICA, 1)
    while driver._replicas[REPLICA].starting:
        driver._closing.wait(0.001)
