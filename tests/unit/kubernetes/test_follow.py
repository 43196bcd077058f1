"""Logs: across breaks, replacements and removals; every line once; few connections."""

import re
import threading
from collections.abc import Callable

import pytest
from doubles.kubernetes_apps import build_agent_role
from doubles.kubernetes_cluster import Fault
from torchx import specs

from muster.schedulers.adapter.scheduler import LogRequest
from muster.schedulers.errors import EngineError, SchedulerError
from muster.schedulers.kubernetes.running_apps import logs


@pytest.fixture
def app(cluster, scheduler):
    """Submits an app of some nodes and starts its pods."""

    def start(nodes=1, max_retries=3, running=True):
        role = build_agent_role(nodes=nodes, max_retries=max_retries)
        app_id = scheduler.submit(specs.AppDef(name="app", roles=[role]), {})
        if running:
            for index in range(nodes):
                cluster.start_pod(cluster.find_pod(app_id.partition(":")[2], index))
        return app_id

    return start


def pod(cluster, app_id, index=0):
    return cluster.find_pod(app_id.partition(":")[2], index)


class Follower:
    """Reads a log in a thread; waits for expected lines, with a deadline."""

    def __init__(self, scheduler, app_id, k=0):
        self.lines: list[str] = []
        self.changed = threading.Condition()
        self.ended = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run, args=(scheduler, app_id, k), daemon=True)
        self.thread.start()

    def run(self, scheduler, app_id, k):
        try:
            for line in scheduler.log_iter(app_id, "trainer", k, should_tail=True):
                with self.changed:
                    self.lines.append(line)
                    self.changed.notify_all()
        except Exception as error:
            self.error = error
        finally:
            with self.changed:
                self.ended = True
                self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]):
        with self.changed:
            assert self.changed.wait_for(condition, timeout=60), self.lines

    def finish(self):
        self.wait_for(lambda: self.ended)
        if self.error is not None:
            raise self.error
        return self.lines


def test_an_existing_log_is_read_once_with_its_newlines(cluster, scheduler, app):
    app_id = app()
    for second in range(3):
        cluster.write_log(pod(cluster, app_id), f"line {second}\n", second)
    cluster.write_log(pod(cluster, app_id), "no newline", 9)
    assert list(scheduler.log_iter(app_id, "trainer")) == ["line 0\n", "line 1\n", "line 2\n", "no newline"]
    assert list(scheduler.log_iter(app_id, "trainer", regex="line [12]")) == ["line 1\n", "line 2\n"]
    times = [line.at_s for line in scheduler.read_log(app_id, LogRequest(role="trainer", index=0))]
    assert [at_s - times[0] for at_s in times] == [0.0, 1.0, 2.0, 9.0], "`muster log` sorts by them"


def test_following_ends_with_the_app(cluster, scheduler, app):
    app_id = app()
    cluster.write_log(pod(cluster, app_id), "first\n", 1)
    follower = Follower(scheduler, app_id)
    follower.wait_for(lambda: follower.lines == ["first\n"])
    cluster.write_log(pod(cluster, app_id), "second\n", 2)
    follower.wait_for(lambda: follower.lines[1:] == ["second\n"])
    cluster.write_log(pod(cluster, app_id), "last line", 3)
    cluster.end_pod(pod(cluster, app_id), 0)
    assert follower.finish() == ["first\n", "second\n", "last line"]


@pytest.mark.parametrize("after_bytes", [1, 40, 43, 60, 100])
def test_a_stream_that_breaks_is_resumed_without_loss_or_repetition(cluster, scheduler, app, after_bytes):
    app_id = app()
    cluster.break_log(pod(cluster, app_id), after_bytes)
    cluster.break_log(pod(cluster, app_id), after_bytes + 37)
    expected = []
    for number in range(8):
        # several lines of one second, one of them twice
        text = f"line {number // 2}\n"
        expected.append(text)
        cluster.write_log(pod(cluster, app_id), text, number // 3)
    follower = Follower(scheduler, app_id)
    follower.wait_for(lambda: len(follower.lines) >= len(expected))
    cluster.end_pod(pod(cluster, app_id), 0)
    assert follower.finish() == expected


def test_the_replacement_is_followed(cluster, scheduler, app):
    app_id = app()
    first = pod(cluster, app_id)
    cluster.write_log(first, "one\n", 1)
    follower = Follower(scheduler, app_id)
    follower.wait_for(lambda: follower.lines == ["one\n"])
    cluster.end_pod(first, 143)
    second = pod(cluster, app_id)
    assert second["metadata"]["name"] != first["metadata"]["name"]
    cluster.start_pod(second)
    cluster.write_log(second, "two\n", 2)
    follower.wait_for(lambda: follower.lines == ["one\n", "two\n"])
    cluster.end_pod(second, 0)
    assert follower.finish() == ["one\n", "two\n"]


def test_a_log_that_kubernetes_removed_is_reported(cluster, scheduler, app):
    app_id = app(nodes=2)
    survivor = pod(cluster, app_id, 1)
    cluster.write_log(survivor, "working\n", 1)
    follower = Follower(scheduler, app_id, k=1)
    follower.wait_for(lambda: follower.lines == ["working\n"])
    cluster.end_pod(pod(cluster, app_id, 0), 1)  # FailJob: the controller deletes pod 1
    lines = follower.finish()
    name = survivor["metadata"]["name"]
    keeps = "; --env MUSTER_LOG_DIR=FOLDER, on a volume, keeps the logs of the next job\n"
    assert lines == [
        "working\n",
        f"[muster] the rest of the log of {name} is lost: Kubernetes has removed the pod{keeps}",
    ]
    again = list(scheduler.log_iter(app_id, "trainer", 1))
    assert again == [
        f"[muster] trainer/1 has no log: it has no pod, or Kubernetes has removed its pods and their logs{keeps}"
    ]


def test_a_log_whose_container_was_removed_is_reported(cluster, scheduler, app):
    """The kubelet reports it with status 200, without a time stamp and without a newline."""
    app_id = app()
    name = pod(cluster, app_id)["metadata"]["name"]
    cluster.logs[name] = [(0, b"unable to retrieve container logs for containerd://4f1c")]
    gone = f"[muster] the rest of the log of {name} is lost: its node has removed the container\n"
    assert list(scheduler.log_iter(app_id, "trainer")) == [gone]


def test_a_waiting_pod_is_reported_with_its_reason(cluster, scheduler, app):
    app_id = app(running=False)
    (line,) = scheduler.log_iter(app_id, "trainer")
    assert "no log yet: " in line


def test_following_begins_before_the_pod_runs(cluster, scheduler, app):
    app_id = app(running=False)
    follower = Follower(scheduler, app_id)
    cluster.write_log(pod(cluster, app_id), "hello\n", 1)
    cluster.start_pod(pod(cluster, app_id))
    follower.wait_for(lambda: follower.lines == ["hello\n"])
    cluster.end_pod(pod(cluster, app_id), 0)
    assert follower.finish() == ["hello\n"]


def test_many_replicas_share_few_connections(cluster, scheduler, app, monkeypatch):
    nodes = 12
    monkeypatch.setattr(logs, "STREAM_LIMIT", 4)
    scheduler._log_reads = threading.BoundedSemaphore(3)
    app_id = app(nodes=nodes)
    followers = [Follower(scheduler, app_id, k) for k in range(nodes)]
    for index in range(nodes):
        cluster.write_log(pod(cluster, app_id, index), f"node {index}\n", index)
    for index, follower in enumerate(followers):
        follower.wait_for(lambda follower=follower, index=index: follower.lines == [f"node {index}\n"])
    assert cluster.streams_most <= 4
    for index in range(nodes):
        cluster.end_pod(pod(cluster, app_id, index), 0)
    for index, follower in enumerate(followers):
        assert follower.finish() == [f"node {index}\n"]


def test_since_and_until(cluster, scheduler, app):
    from datetime import datetime, timezone

    app_id = app()
    for second in range(5):
        cluster.write_log(pod(cluster, app_id), f"{second}\n", second)
    at = [datetime(2026, 1, 1, 0, 0, second, tzinfo=timezone.utc) for second in range(5)]
    assert list(scheduler.log_iter(app_id, "trainer", since=at[2])) == ["2\n", "3\n", "4\n"]
    assert list(scheduler.log_iter(app_id, "trainer", since=at[1], until=at[2])) == ["1\n", "2\n"]


def test_a_log_that_does_not_exist(cluster, scheduler, app):
    from torchx.schedulers.api import Stream

    app_id = app()
    with pytest.raises(SchedulerError, match=r"role 'other'; .*: trainer"):
        scheduler.log_iter(app_id, "other")
    for index in (7, -1):
        with pytest.raises(SchedulerError, match=f"0 to 0, not {index}$"):
            list(scheduler.log_iter(app_id, "trainer", index))
    with pytest.raises(SchedulerError, match="in one log"):
        scheduler.log_iter(app_id, "trainer", streams=Stream.STDERR)
    with pytest.raises(SchedulerError, match="is no app"):
        scheduler.log_iter("team:nope", "trainer")


@pytest.mark.parametrize("how", ["refuses", "is silent"])
def test_a_followed_log_says_that_the_server_is_away_and_answers_again(cluster, scheduler, clock, app, capsys, how):
    """It said nothing while the network was cut, and nothing afterwards."""
    app_id = app()
    follower = Follower(scheduler, app_id)
    cluster.write_log(pod(cluster, app_id), "one\n", 1)
    follower.wait_for(lambda: follower.lines == ["one\n"])
    record, told = clock.sleep, []

    def sleep(seconds):
        record(seconds)
        told.append(capsys.readouterr().err)
        if "does not answer" in told[-1]:
            with cluster.lock:
                cluster.is_silent, cluster.server.is_up = False, True
                cluster.lock.notify_all()

    capsys.readouterr()
    clock.sleep = sleep
    cluster.is_silent, cluster.server.is_up = how == "is silent", how != "refuses"
    cluster.write_log(pod(cluster, app_id), "two\n", 2)
    follower.wait_for(lambda: follower.lines == ["one\n", "two\n"])
    cluster.end_pod(pod(cluster, app_id), 0)
    follower.finish()
    said = re.findall("API server .* (does not answer|answers again)", "".join(told) + capsys.readouterr().err)
    assert (said[0], said[-1]) == ("does not answer", "answers again")  # two threads ask it


def test_a_server_that_fails_ends_the_follower_with_one_line(cluster, scheduler, app):
    app_id = app()
    follower = Follower(scheduler, app_id)
    cluster.write_log(pod(cluster, app_id), "x\n", 1)
    follower.wait_for(lambda: follower.lines == ["x\n"])
    cluster.faults.append(Fault("GET", "", 503, "gone", times=10**6))
    cluster.break_log(pod(cluster, app_id), 0)
    cluster.end_pod(pod(cluster, app_id), 143)
    with pytest.raises(EngineError, match="503 gone"):
        follower.finish()
