"""Goodput: each second of a job in one bucket, against histories of which the truth is known."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from doubles.record_histories import RECORDS
from hypothesis import given
from hypothesis import strategies as st

from muster._shared.goodput import GoodputLedger


@dataclass
class Job:
    """A job on a clock of its own, which counts beside the ledger where its time goes; looked at once a second."""

    ledger: GoodputLedger = field(default_factory=GoodputLedger)
    at_s: float = 100.0
    truth: dict[str, float] = field(default_factory=dict)
    shown: tuple[int, float, str] | None = None
    """What a look would see: steps done, when, and the phase."""
    looked_s: float = 100.0

    def spend(self, bucket: str, for_s: float) -> None:
        """Let time pass, with a look at each whole second."""
        self.truth[bucket] = self.truth.get(bucket, 0.0) + for_s
        until_s = self.at_s + for_s
        while self.looked_s + 1.0 <= until_s:
            self.looked_s += 1.0
            self.look()
        self.at_s = until_s

    def look(self) -> None:
        if self.shown is not None:
            done, at_s, phase = self.shown
            self.ledger.record_steps(done, at_s, is_counted=True, phase=phase)

    def write(self, what: str, **detail: object) -> None:
        self.ledger.follow(what, detail, self.at_s)

    def begin(self) -> "Job":
        self.write("agent_started")
        self.form()
        self.write("workers_started")
        return self

    def form(self, nodes: int = 2) -> None:
        self.shown = None
        self.write("round_formed", nodes=nodes)

    def step(
        self, done: int, step_s: float, *, excess_s: float = 0.0, bucket: str = "productive", why: str = ""
    ) -> None:
        """Do the step that makes `done`."""
        if excess_s:
            self.spend(why, excess_s)
        self.spend(bucket, step_s)
        self.shown = done, self.at_s, ""

    def end_round(self, kind: str, *, hang: bool = False, stop_s: float = 0.0, **more: bool) -> None:
        self.look()
        self.write("round_broken", kind=kind, hang=hang, **more)
        self.spend("stop", stop_s)
        self.write("workers_stopped")
        self.shown = None

    def read(self) -> Mapping[str, float]:
        return self.ledger.read_buckets(self.at_s)


def test_a_scripted_job_with_a_crash_repeated_steps_a_pause_a_hang_and_a_checkpoint_against_the_truth() -> None:
    job = Job()
    job.write("agent_started")
    job.spend("start", 3.0)
    job.spend("waiting", 20.0)
    job.form()
    job.spend("start", 6.0)
    job.write("workers_started")
    job.step(1, 0.5, excess_s=12.0, why="start")
    for done in range(2, 401):
        job.step(done, 0.5)
    # a crash, seen 4 s after the last step
    job.spend("detect", 4.0)
    job.end_round("failure", stop_s=9.0)
    job.spend("round", 2.0)
    job.form()
    job.spend("restart", 5.0)
    job.write("workers_started")
    job.step(301, 0.5, excess_s=11.0, why="restart", bucket="repeated")
    for done in range(302, 401):
        job.step(done, 0.5, bucket="repeated")
    for done in range(401, 601):
        job.step(done, 0.5)
    # a pause after the step 599
    job.write("drain_begun", kind="pause", drain=1)
    job.write("drain_committed", drain=1, step=599)
    job.spend("pause", 5.0)
    job.write("checkpoint_completed", step=595)  # of an earlier step: the pause goes on
    job.spend("pause", 35.0)
    job.write("drain_withdrawn", drain=1, reason="resumed")
    for done in range(601, 701):
        job.step(done, 0.5)
    # the script saves for 15 s
    job.shown = 700, job.at_s, "checkpoint"
    job.spend("checkpoint", 15.0)
    job.shown = 700, job.at_s, ""
    for done in range(701, 801):
        job.step(done, 0.5)
    # a hang of a minute, which ends the round
    job.spend("hang", 45.0)
    job.write("hang_named", text="rank 1 did not enter all_reduce #3")
    job.spend("hang", 15.0)
    job.end_round("failure", hang=True, stop_s=6.0)
    job.spend("round", 3.0)
    job.write("nodes_awaited", reason="1 of 2 nodes are here")
    job.spend("waiting", 30.0)
    job.form()
    job.spend("restart", 5.0)
    job.write("workers_started")
    job.step(801, 0.5, excess_s=11.0, why="restart")
    for done in range(802, 1001):
        job.step(done, 0.5)
    # `muster checkpoint` at the last step of the job, and the end
    job.write("drain_begun", kind="checkpoint", drain=2)
    job.write("drain_committed", drain=2, step=999)
    job.spend("checkpoint", 8.0)
    job.write("checkpoint_completed", step=999)
    job.spend("end", 10.0)
    job.look()
    job.write("job_ended", succeeded=True)
    total_s = sum(job.truth.values())
    found = job.read()
    assert sum(found.values()) == pytest.approx(total_s)
    assert found.keys() == job.truth.keys()
    for bucket, truth_s in job.truth.items():
        assert found[bucket] == pytest.approx(truth_s, abs=0.02 * total_s), bucket
    assert found["productive"] == pytest.approx(job.truth["productive"], rel=0.02)
    goodput = job.ledger.build_goodput(job.at_s)
    assert goodput.fraction == pytest.approx(500 / (total_s - 40.0), abs=0.02)
    assert goodput.pause_s == pytest.approx(40.0, abs=1.5)
    assert job.ledger.time_to_start_s == pytest.approx(41.5, abs=1.0)
    assert job.ledger.failures == {"worker": 1, "hang": 1}


@pytest.mark.parametrize("change", ["joined", "left"])
def test_a_node_that_joins_or_leaves_is_no_failure_and_a_lost_one_is(change: str) -> None:
    job = Job().begin()
    job.step(1, 1.0)
    job.end_round("membership", **{change: True})
    job.form()
    job.step(2, 1.0)
    job.end_round("membership")
    job.form()
    job.step(3, 1.0)
    job.end_round("drained")
    assert job.ledger.failures == {"node": 1}


def test_a_script_that_counts_each_epoch_from_0_repeats_nothing() -> None:
    job = Job().begin()
    for _ in range(5):
        for done in range(1, 21):
            job.step(done, 2.0)
    job.look()
    assert job.read().get("repeated", 0.0) == 0.0
    assert job.read()["productive"] == pytest.approx(200.0, abs=2.0)


def test_the_time_of_a_job_that_runs_is_open_until_the_next_step() -> None:
    job = Job().begin()
    for done in range(1, 11):
        job.step(done, 1.0)
    job.look()
    job.at_s += 30.0
    assert job.read()["unfinished"] == 30.0
    goodput = job.ledger.build_goodput(job.at_s)
    assert (goodput.productive_s, goodput.lost_s) == (10.0, ())


@given(RECORDS, st.booleans())
def test_the_buckets_sum_up_to_the_wall_clock_whatever_happens(history: list, has_ended: bool) -> None:
    ledger, at_s = GoodputLedger(), 50.0
    ledger.follow("agent_started", {}, at_s)
    for after_s, entry in history:
        at_s += after_s
        if len(entry) == 2:
            ledger.follow(entry[0], entry[1], at_s)
        else:
            done, ago_s, is_counted, phase = entry
            ledger.record_steps(done, at_s - ago_s, is_counted=is_counted, phase=phase)
        assert sum(ledger.read_buckets(at_s).values()) == pytest.approx(at_s - 50.0, abs=1e-6)
        assert all(each >= 0 for each in ledger.read_buckets(at_s).values())
    if has_ended:
        ledger.follow("job_ended", {}, at_s)
        assert sum(ledger.read_buckets(at_s + 100.0).values()) == pytest.approx(at_s - 50.0, abs=1e-6)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_node_that_leaves_a_job_that_is_being_stopped_is_no_failure(is_stopped: bool) -> None:
    """After Ctrl-C the last lines told of a lost node."""
    job = Job().begin()
    if is_stopped:
        job.write("signal", name="SIGINT", guard_died=False)
    job.write("round_broken", kind="membership", reason="node 1 (vm) left: Ctrl-C (SIGINT)", joined=False, hang=False)
    assert job.ledger.failures == ({} if is_stopped else {"node": 1})
    job.form()
    job.write("round_broken", kind="membership", reason="node 1 was lost", joined=False, hang=False)
    assert job.ledger.failures["node"] == (1 if is_stopped else 2), "of a round that was formed after the signal"


@pytest.mark.parametrize(("after_s", "lost"), [(0.5, {}), (9.0, {"node": 1})])
def test_a_node_that_left_just_before_this_one_was_stopped_is_no_failure(after_s: float, lost: dict) -> None:
    """A scheduler that cancels a job stops its nodes one after the other."""
    job = Job().begin()
    job.write("round_broken", kind="membership", reason="node 1 (vm) left: SIGTERM", joined=False, hang=False)
    job.spend("stop", after_s)
    job.write("signal", name="SIGTERM", guard_died=False)
    assert job.ledger.failures == lost
