"""The driver with an engine that fails in ways a real one cannot be made to fail: every end is still reported."""

import json
import queue

import pytest

from muster._contract import AGENT_BUNDLE_NAME
from muster.schedulers.docker import driver as drivers
from muster.schedulers.docker.driver import DockerDriver
from muster.schedulers.docker.engine.container_state import ContainerFacts
from muster.schedulers.docker.engine.errors import DockerError, EngineUnavailable, NotFound
from muster.schedulers.docker.live.restarts import count_restarts, read_events
from muster.schedulers.docker.spec import AppRequest, ContainerRequest, Label
from muster.schedulers.supervision.driver import EventQueue
from muster.schedulers.supervision.events import ReplicaEnded
from muster.schedulers.supervision.state import ReplicaId

pytestmark = pytest.mark.torchx

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

    def fail(self, call, *errors):
        self.failing[call] = list(errors)

    def _may_fail(self, call):
        if self.failing.get(call):
            raise self.failing[call].pop(0)

    def end(self, exit_code):
        self.status, self.exit_code = "exited", exit_code
        self.happens.put({"Action": "die", "Actor": {"ID": "c", "Attributes": {"exitCode": str(exit_code)}}})

    def now_s(self):
        self._may_fail("now_s")
        return 0.0

    def events(self, actions, since_s):
        while (event := self.happens.get()) is not _GOES_AWAY:
            yield event

    def inspect_container(self, container):
        self._may_fail("inspect_container")
        labels = {Label.INCARNATION: "0"}
        facts = {"id": "c", "name": "c", "labels": labels, "oom_killed": False, "error": ""}
        times = {"started_at": "", "finished_at": ""}
        return ContainerFacts(status=self.status, exit_code=self.exit_code, **facts, **times)

    def list_containers(self, labels):
        return [self.inspect_container("c")]

    def list_container_ids(self, labels, *, running_only=False):
        return []

    def start_container(self, container):
        self._may_fail("start_container")
        self.status = "running"

    def signal_container(self, container, name):
        self.signals.put(name)

    def pause_container(self, container):
        self.signals.put("pause")

    def unpause_container(self, container):
        self.signals.put("unpause")

    def remove_container(self, container):
        self._may_fail("remove_container")
        self.removed.append(container)

    def copy_out(self, container, path, limit_bytes):
        self._may_fail("copy_out")

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
    container = ContainerRequest(
        role="w", replica=0, image="img", name="a-w-0", command=COMMAND, env={}, hostname="w-0", aliases=(),
        runs_agent=runs_agent, bundled=True,
    )  # fmt: skip
    app = AppRequest(
        app_id="a", network="net", owns_network=False, pull="missing", grace_s=1.0, keep="all", user="u",
        containers=(container,),
    )  # fmt: skip
    driver = DockerDriver(engine, app, tmp_path, event_queue)
    yield driver
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


def test_end_is_reported_once(driver, engine, event_queue):
    driver.start(REPLICA, 1)
    engine.end(3)
    assert next_end(event_queue) == ReplicaEnded(replica=REPLICA, exit_code=3, reason="", final=False)
    assert event_queue.pop() is None


def test_watcher_continues_after_an_error_of_a_running_engine(driver, engine, event_queue, capfd):
    engine.fail("now_s", DockerError("cannot ask: 500"), DockerError("cannot ask: 500"))
    driver.start(REPLICA, 1)
    engine.end(3)
    assert next_end(event_queue).exit_code == 3
    assert capfd.readouterr().err.count("retrying: cannot ask: 500") == 2


def test_end_is_reported_when_the_containers_files_cannot_be_read(driver, engine, event_queue):
    engine.fail("copy_out", DockerError("500"), DockerError("500"))
    driver.start(REPLICA, 1)
    engine.end(1)
    assert next_end(event_queue).exit_code == 1


def test_files_are_read_when_a_stopped_engine_is_back(driver, engine, event_queue):
    engine.fail("copy_out", EngineUnavailable("gone"))
    driver.start(REPLICA, 1)
    engine.end(1)
    assert next_end(event_queue).exit_code == 1


@pytest.mark.parametrize("error", [EngineUnavailable("gone"), DockerError("busy"), NotFound("gone")])
def test_failed_start_is_reported_when_the_container_cannot_be_removed(driver, engine, event_queue, error):
    engine.fail("start_container", DockerError("no space left"))
    engine.fail("remove_container", error)
    driver.start(REPLICA, 1)
    end = next_end(event_queue)
    assert (end.exit_code, end.final) == (127, True)
    assert "could not be started: no space left" in end.reason


def test_bug_in_a_thread_is_in_the_supervisors_log(driver, engine, capfd):
    engine.fail("start_container", ZeroDivisionError("a bug"))
    driver.start(REPLICA, 1)
    driver._closing.set()
    driver._pool.shutdown(wait=True)
    assert "ZeroDivisionError: a bug" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("runs_agent", "expected"), [(True, ["SIGTSTP", "SIGCONT"]), (False, ["pause", "unpause"])], ids=["agent", "plain"]
)
def test_a_suspended_job_is_continued(driver, engine, expected):
    driver.start(REPLICA, 1)
    wait_started(driver)
    for suspended, word in zip((True, False), expected, strict=True):
        driver.suspend(suspended=suspended)
        assert engine.signals.get() == word


def test_a_container_that_starts_while_the_job_is_suspended_is_suspended_too(driver, engine):
    driver.suspend(suspended=True)
    driver.start(REPLICA, 1)
    assert engine.signals.get() == "SIGTSTP"


def test_a_suspended_agent_is_continued_to_handle_its_stop(driver, engine):
    driver.start(REPLICA, 1)
    wait_started(driver)
    driver.suspend(suspended=True)
    assert engine.signals.get() == "SIGTSTP"
    driver.stop(REPLICA)
    assert [engine.signals.get(), engine.signals.get()] == ["SIGTERM", "SIGCONT"]


def test_restarts_in_place_are_counted_from_the_first_nodes_records(driver, engine, event_queue, tmp_path):
    records = b'{"attempt": 0}\n{"attempt": 2}\n'
    asked = []

    def copy_out(container, path, limit_bytes):
        asked.append(path)
        return records if path.endswith("events.jsonl") else None

    engine.copy_out = copy_out
    details = {"request": driver._app.to_json()}
    driver.start(REPLICA, 1)
    wait_started(driver)
    assert count_restarts(engine, tmp_path, details) == 2
    engine.end(0)
    next_end(event_queue)
    engine.list_containers = lambda labels: []  # removed
    assert count_restarts(engine, tmp_path, {}) == 2
    assert set(asked) == {"/var/opt/muster/logs/job-7/events.jsonl"}


def test_a_hang_is_read_from_the_first_nodes_records(driver, engine, event_queue, tmp_path):
    hang = {"what": "hang_named", "time_s": 1_800_000_000.0, "attempt": 1, "detail": {"text": "rank 1 sleeps"}}
    engine.copy_out = lambda container, path, limit_bytes: json.dumps(hang).encode() + b"\n"
    driver.start(REPLICA, 1)
    wait_started(driver)
    told = (1, "rank 1 sleeps (reported at 2027-01-15 08:00:00 UTC)")
    assert read_events(engine, tmp_path, {"request": driver._app.to_json()}) == told
    engine.end(0)
    next_end(event_queue)
    assert read_events(engine, tmp_path, {}) == (1, "")


def wait_started(driver):
    """Wait until the pool has carried out the start."""
    while driver._replicas[REPLICA].starting:
        driver._closing.wait(0.001)
