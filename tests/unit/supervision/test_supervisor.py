"""The supervisor's loop with a driver that runs nothing: what is recorded when, and what a restart keeps."""

import os
import sys
from dataclasses import replace

import pytest
from supervised_apps import make_folder

from muster.schedulers.adapter.supervised import _list_replicas
from muster.schedulers.supervision import decisions
from muster.schedulers.supervision.app_folder import ProcessId
from muster.schedulers.supervision.decisions import ReplicaEnded
from muster.schedulers.supervision.driver import EventQueue, StartError
from muster.schedulers.supervision.machine import Machine
from muster.schedulers.supervision.state import ReplicaId, SupervisedRole
from muster.schedulers.supervision.supervisor import Supervisor, watch_requests
from muster.schedulers.wording.reasons import Code

FIRST, SECOND = ReplicaId("r", 0), ReplicaId("r", 1)


class FakeDriver:
    """Fulfils the contract of `ReplicaDriver`; the test posts the ends."""

    def __init__(self, folder):
        self.folder = folder
        self.done = []
        self.refused = {}
        self.adoptable = set()
        self.hosts = []
        """Where the next replicas start; none: on this machine."""
        self.recorded_at_start = []

    def start(self, replica, start_number):
        self.recorded_at_start.append(self.folder.read_record().app.replicas[replica].status.value)
        if replica in self.refused:
            raise self.refused[replica]
        self.done.append(f"start {replica} {start_number}")
        return {"number": start_number, **({"host": self.hosts.pop(0)} if self.hosts else {})}

    def adopt(self, replica, handle):
        self.done.append(f"adopt {replica} {handle['number']}")
        return replica in self.adoptable

    def stop(self, replica, *, is_interrupt):
        self.done.append(f"interrupt {replica}" if is_interrupt else f"stop {replica}")

    def suspend(self, *, suspended):
        self.done.append("suspend" if suspended else "continue")

    def kill(self, replica):
        self.done.append(f"kill {replica}")

    def close(self, *, succeeded):
        self.done.append(f"close {succeeded}")


class Bench:
    """A supervisor with a clock that the test sets."""

    def __init__(self, tmp_path, **role):
        plan = SupervisedRole(**({"name": "r", "replicas": 2, "runs_agent": True} | role))
        self.folder = make_folder(tmp_path / "app", roles=(plan,), grace_s=10.0, details={"secret": 1})
        self.spec = self.folder.read_spec()
        self.now_s = 0.0
        self.boot()

    def boot(self):
        self.event_queue = EventQueue(now_s=lambda: self.now_s)
        self.driver = FakeDriver(self.folder)
        self.supervisor = Supervisor(self.folder, self.spec, self.event_queue, self.driver)
        return self

    def begin(self):
        self.supervisor.begin()
        self.drain()
        return self

    def drain(self):
        while (event := self.event_queue.pop()) is not None:
            self.supervisor.handle_event(event)

    def end(self, replica, exit_code):
        self.supervisor.handle_event(ReplicaEnded(replica=replica, exit_code=exit_code))
        self.drain()

    def advance(self, seconds):
        self.now_s += seconds
        self.event_queue.run_once()
        self.drain()

    def record(self):
        return self.folder.read_record()


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path, max_retries=1)
    yield made
    made.event_queue.close()


def test_a_start_is_on_disk_before_it_happens(bench):
    bench.begin()
    assert bench.driver.recorded_at_start == ["running", "running"]
    assert bench.record().handles == {FIRST: {"number": 1}, SECOND: {"number": 1}}


def test_a_second_start_has_its_own_handle(bench):
    bench.begin().end(SECOND, 137)
    assert bench.driver.done[-1] == "start r/1 2"
    assert bench.record().handles[SECOND] == {"number": 2}
    assert bench.record().app.num_restarts == 1


def test_the_end_is_on_disk_only_after_the_driver_has_closed(bench):
    bench.begin()
    bench.end(FIRST, 0)
    bench.end(SECOND, 0)
    assert bench.supervisor.ended
    assert bench.record().app.app_state == "RUNNING", "at the recorded end the logs are complete"
    bench.supervisor.close()
    assert bench.driver.done[-1] == "close True"
    assert bench.record().app.app_state == "SUCCEEDED"
    assert bench.record().ended_s is not None
    assert bench.folder.read_spec().details == {}


def test_the_hosts_of_replicas_stay_known_after_the_end(bench):
    bench.driver.hosts = ["a", "b", "c"]
    bench.begin().end(SECOND, 137)
    assert bench.record().find_hosts() == {FIRST: "a", SECOND: "c"}
    bench.end(FIRST, 0)
    bench.end(SECOND, 0)
    bench.supervisor.close()
    record = bench.record()
    assert record.find_hosts() == record.hosts == {FIRST: "a", SECOND: "c"}
    assert [each.hostname for each in _list_replicas(record, is_lost=False)] == ["a", "c"]


def test_the_hosts_of_replicas_stay_known_after_a_reboot(bench, monkeypatch):
    bench.driver.hosts = ["a", "b"]
    bench.begin()
    monkeypatch.setattr(Machine, "shows_pids_of", lambda *_: False)
    bench.boot().driver.hosts = ["c"]
    assert bench.supervisor.record.find_hosts() == {FIRST: "a", SECOND: "b"}
    bench.begin()
    assert bench.record().find_hosts() == {FIRST: "c", SECOND: "b"}, "one retry: the other one ended there"


def test_what_cannot_be_started_ends_the_app(bench):
    bench.driver.refused[SECOND] = StartError("no such file")
    bench.begin()
    assert bench.driver.done == ["start r/0 1", "stop r/0"]
    [reason] = bench.supervisor.record.app.reasons
    [cause] = reason.causes
    assert (reason.code, reason.replica, cause.code, cause.text) == (
        *(Code.NEVER_STARTED, "r/1"),
        *(Code.COULD_NOT_START, "no such file"),
    )


def test_one_grace_period_on_the_given_clock(bench):
    bench.begin()
    bench.supervisor.handle_event(decisions.CancelRequested())
    assert bench.driver.done[-2:] == ["stop r/0", "stop r/1"]
    bench.end(FIRST, 143)
    bench.advance(10.0)
    assert bench.driver.done[-1] == "kill r/1"


def test_a_replica_that_even_a_kill_does_not_end_does_not_keep_the_supervisor(bench):
    bench.begin()
    bench.supervisor.handle_event(decisions.KillRequested())
    assert bench.driver.done[-1] == "kill r/1"
    assert not bench.supervisor.ended
    bench.advance(600.0)
    assert bench.supervisor.ended
    bench.supervisor.close()
    assert bench.record().app.app_state == "CANCELLED"


def test_a_successor_adopts_and_counts_what_is_gone(bench):
    bench.begin()
    bench.event_queue.close()
    bench.boot()
    bench.driver.adoptable = {FIRST}
    bench.begin()
    assert bench.driver.done == ["adopt r/0 1", "adopt r/1 1", "start r/1 2"]


def test_a_successor_handles_a_request_made_without_a_supervisor(bench):
    bench.begin()
    bench.event_queue.close()
    bench.folder.write_request("cancel")
    bench.boot()
    bench.driver.adoptable = {FIRST}
    bench.begin()
    assert bench.driver.done[2:4] == ["stop r/0", "stop r/1"]
    assert not [step for step in bench.driver.done if step.startswith("start")]
    bench.end(FIRST, 143)
    assert bench.supervisor.ended


@pytest.mark.parametrize(("word", "done"), [("cancel", "stop"), ("interrupt", "interrupt")])
def test_a_request_says_whether_it_is_a_ctrl_c(bench, word, done):
    watch_requests(bench.folder, bench.event_queue, bench.driver)
    bench.begin()
    assert bench.folder.send_request(word)
    bench.advance(0.0)
    assert bench.driver.done[2:] == [f"{done} r/0", f"{done} r/1"]


def test_a_word_that_is_no_request_ends_nothing_and_none_is_cut(bench):
    watch_requests(bench.folder, bench.event_queue, bench.driver)
    bench.begin()
    for word in ("drain:", "drain:nan", "drain:inf", "resize:x:r", "resize:r", "é"):
        assert bench.folder.send_request(word)
    for _ in range(1500):
        assert bench.folder.send_request("continue")
    assert bench.folder.send_request("drain:3000")
    bench.advance(0.0)
    assert bench.driver.done[2:] == ["continue"] * 1500
    assert bench.folder.read_record().app.is_draining
    bench.advance(2999.0)
    assert not [step for step in bench.driver.done if step.startswith("stop")]


def test_a_successor_starts_nothing_when_the_owner_is_gone(bench):
    bench.begin()
    bench.event_queue.close()
    bench.boot()
    bench.event_queue.post(decisions.CancelRequested())
    bench.begin()
    assert bench.driver.done == ["adopt r/0 1", "adopt r/1 1", "stop r/0", "stop r/1"]
    assert bench.supervisor.ended


def test_a_full_disk_ends_no_job(bench, monkeypatch, capfd):
    bench.begin()
    with open("/dev/full", "w", buffering=1) as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", full)  # the supervisor's log is on that disk, too
        refuse_to_record(bench, patch)
        bench.supervisor.handle_event(decisions.CancelRequested())
    assert bench.driver.done[-2:] == ["stop r/0", "stop r/1"]
    assert "cannot write" in capfd.readouterr().err
    bench.end(FIRST, 0)
    assert bench.record().app.replicas[FIRST].status.value == "succeeded"


def refuse_to_record(bench, patch):
    def refuse(record):
        raise OSError(28, "No space left on device")

    patch.setattr(bench.folder, "write_record", refuse)


def test_timers_come_in_time_and_only_once(bench):
    seen = []
    bench.event_queue.set_timer("a", 1.0, lambda: seen.append("never"))
    bench.event_queue.set_timer("a", 2.0, lambda: seen.append("a"))
    bench.event_queue.set_timer("b", 1.0, lambda: seen.append("b"))
    bench.event_queue.set_timer("c", 1.0, lambda: seen.append("c"))
    bench.event_queue.clear_timer("c")
    bench.now_s = 1.5
    bench.event_queue.run_once()
    assert seen == ["b"]
    bench.event_queue.set_timer("now", 0.0, lambda: None)
    bench.now_s = 2.5
    bench.event_queue.run_once()
    assert seen == ["b", "a"]


def test_a_supervisor_that_adopts_everything_records_itself(bench):
    """Else whoever looks at the app would find it lost."""
    bench.begin()
    bench.folder.write_record(replace(bench.folder.read_record(), supervisor=None))
    bench.boot()
    bench.driver.adoptable = {FIRST, SECOND}
    bench.supervisor.begin()
    assert bench.folder.read_record().supervisor == ProcessId.of(os.getpid())
    assert [line for line in bench.driver.done if line.startswith("start")] == []
