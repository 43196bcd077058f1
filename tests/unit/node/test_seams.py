"""Histories of one node through the real supervisor, loop, pool, stack collector, hang watch and signal watch.

See `doubles.node_bench` for what is replaced.
"""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from doubles.node_bench import Bench, open_bench
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.agent.rendezvous.interface import BreakKind, GlobalRank0Started

Build = Callable[..., Bench]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Build]:
    with ExitStack() as stack:
        yield lambda **config: stack.enter_context(open_bench(monkeypatch, tmp_path, **config))


@pytest.fixture
def bench(build: Build) -> Bench:
    """One node of two workers; its first round forms as soon as it has joined."""
    made = build()
    made.on("join", None, made.form)
    return made


def send_to_self(signum: int) -> Callable[[], None]:
    """A real signal, through the agent's real handler and wake-up descriptor."""
    return lambda: os.kill(os.getpid(), signum)


def fail_for_good(bench: Bench, number: int = 1) -> None:
    """The leader's answer to a failure: no attempt is left."""
    bench.on("failed", number, lambda: bench.break_round(number, BreakKind.FINAL))
    bench.on("stopped", number, lambda: bench.end_job(succeeded=False))


def test_a_job_that_succeeds(bench: Bench) -> None:
    bench.on("started", 1, lambda: [bench.at(5.0, lambda rank=rank: bench.end_worker(rank, 0)) for rank in (0, 1)])
    bench.on("succeeded", 1, lambda: bench.end_job(succeeded=True))
    assert bench.run() == 0
    assert bench.names() == [("join", None), ("started", 1), ("succeeded", 1), ("closed", None)]
    assert bench.lines == []
    [last] = bench.last_lines
    assert last.startswith("succeeded after ")
    assert "; no restarts; " in last
    assert [record.what for record in bench.records] == [
        "agent_started",
        "round_formed",
        "workers_started",
        "worker_exited",
        "worker_exited",
        "job_ended",
        "workers_stopped",
        "agent_ended",
    ]
    assert {record.round for record in bench.records[1:]} == {1}


def test_an_agent_that_was_started_again_says_since_when_it_counts(build: Build) -> None:
    """Node 0 said "goodput 93 %; no restarts" of a job that had lost it."""
    bench = build(counts_since="incarnation 2 of this node")
    bench.on("join", None, bench.form)
    bench.on("started", 1, lambda: bench.at(1.0, send_to_self(signal.SIGTERM)))
    assert bench.run() == 128 + signal.SIGTERM
    assert any("since incarnation 2" in each for each in bench.lines)
    assert "no restarts since" in bench.last_lines[0]


def test_a_failure_restarts_all_workers(bench: Bench) -> None:
    bench.on("started", 1, lambda: bench.end_worker(1, 7))
    bench.on("failed", 1, bench.break_round)
    bench.on("stopped", 1, lambda: bench.form(2, attempt=1))
    bench.on("started", 2, lambda: [bench.end_worker(rank, 0) for rank in (0, 1)])
    bench.on("succeeded", 2, lambda: bench.end_job(succeeded=True))
    assert bench.run() == 0
    assert bench.names("failed", "stopped", "started") == [
        ("started", 1),
        ("failed", 1),
        ("stopped", 1),
        ("started", 2),
    ]
    [[failure]] = bench.details("failed")
    assert (failure.global_rank, failure.exit_code, failure.stopped_by_us) == (1, 7, False)
    [[[late], stacks]] = bench.details("stopped")
    assert (late.global_rank, late.signal, late.stopped_by_us, stacks) == (0, "SIGTERM", True, ())
    assert bench.signals == [(0, signal.SIGTERM)]
    assert bench.lines == ["why; restart 1 of 3"]
    assert "1 restart of the" in bench.last_lines[0]
    assert bench.starter.parked == 1
    restarts = [process.spec.env["TORCHELASTIC_RESTART_COUNT"] for process in bench.processes]
    assert restarts == ["0", "0", "1", "1"]


def test_workers_that_ignore_the_signal_are_killed_after_the_grace_period(build: Build) -> None:
    bench = build(shutdown_timeout_s=12.0)
    bench.on("join", None, bench.form)

    def ignore_and_signal() -> None:
        for rank in (0, 1):
            del bench.worker(rank).ends_with[signal.SIGTERM]
        bench.at(1.0, send_to_self(signal.SIGTERM))

    bench.on("started", 1, ignore_and_signal)
    assert bench.run() == 143
    assert bench.signals == [(rank, signum) for signum in (signal.SIGTERM, signal.SIGKILL) for rank in (0, 1)]
    assert bench.details("leaving") == ["received SIGTERM"]
    since_s = {record.what: record.monotonic_s for record in bench.records}
    assert since_s["workers_stopped"] - since_s["signal"] == pytest.approx(12.0, abs=0.1)


def test_no_descriptors_for_a_workers_output(bench: Bench) -> None:
    """It is a failure of that worker; none was started, and no descriptor of the others stays open."""
    bench.logs.no_descriptors_for = 1
    fail_for_good(bench)
    assert bench.run() == 1
    [[failure]] = bench.details("failed")
    assert (failure.local_rank, "Too many open files" in failure.reason) == (1, True)
    assert bench.processes == []
    assert bench.names("failed", "stopped") == [("failed", 1), ("stopped", 1)]


def test_stacks_are_printed_on_request_while_a_stop_collects_them(bench: Bench) -> None:
    """Both share one dump: with a second signal the texts of the two could not be told apart."""
    bench.on("started", 1, lambda: (bench.break_round(1, stacks=True), send_to_self(signal.SIGUSR2)()))
    bench.on("stopped", 1, lambda: bench.end_job(succeeded=False))
    assert bench.run() == 1
    [[_, stacks]] = bench.details("stopped")
    assert [(stack.local_rank, stack.text) for stack in stacks] == [(rank, "Thread 0x1\n  in train") for rank in (0, 1)]
    assert bench.lines.count("  Thread 0x1") == 1
    for rank in (0, 1):
        assert Path(bench.worker(rank).spec.stack_file or "").read_text() == "Thread 0x1\n  in train\n"


def test_a_request_for_stacks_without_workers_does_nothing(build: Build) -> None:
    bench = build()
    bench.at(1.0, send_to_self(signal.SIGUSR2))
    bench.at(2.0, send_to_self(signal.SIGINT))
    assert bench.run() == 130
    assert bench.lines == ["stopping"]
    assert bench.lines_muted


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_after_a_signal_the_last_line_says_where_the_logs_are(bench: Bench, signum: int) -> None:
    bench.on("started", 1, lambda: bench.at(1.0, send_to_self(signum)))
    assert bench.run() == 128 + signum
    [last] = bench.last_lines
    assert last.startswith("stopped after ")
    assert "no log files" in last or "logs: " in last


def test_a_worker_that_gives_no_stacks_delays_a_stop_by_a_limited_time(bench: Bench) -> None:
    def give_none() -> None:
        bench.worker(0).stack_text = ""
        bench.break_round(1, stacks=True)

    bench.on("started", 1, give_none)
    bench.on("stopped", 1, lambda: bench.end_job(succeeded=False))
    assert bench.run() == 1
    [[_, stacks]] = bench.details("stopped")
    assert [stack.local_rank for stack in stacks] == [1]
    broken, stopped = (next(r for r in bench.records if r.what == what) for what in ("round_broken", "workers_stopped"))
    assert 2.0 <= stopped.monotonic_s - broken.monotonic_s <= 2.6


def test_the_guards_fencing_is_no_failure(bench: Bench) -> None:
    def fence() -> None:
        bench.lease.fencings += 1
        for rank in (0, 1):
            bench.end_worker(rank, -9)

    bench.on("started", 1, lambda: bench.at(3.0, fence))
    bench.on("stopped", 1, lambda: bench.end_job(succeeded=False))
    assert bench.run() == 1
    assert bench.names("failed") == []
    assert bench.details("stopped") == [((), ())]
    assert ["lost contact" in each for each in bench.lines] == [True]


def test_a_kill_in_a_round_after_a_fencing_is_a_failure(bench: Bench) -> None:
    """The lease ran out when the workers of round 1 were gone already: none died of it."""

    def fire_late() -> None:
        bench.lease.fencings += 1
        bench.form(2)

    bench.on("started", 1, lambda: bench.break_round(1, BreakKind.MEMBERSHIP))
    bench.on("stopped", 1, fire_late)
    bench.on("started", 2, lambda: bench.end_worker(0, -9))  # the kernel's OOM killer
    fail_for_good(bench, 2)
    assert bench.run() == 1
    [[failure]] = bench.details("failed")
    assert (failure.round, failure.local_rank, failure.signal) == (2, 0, "SIGKILL")


def test_the_store_is_there_before_the_workers_and_until_the_next_round(build: Build) -> None:
    bench = build()
    seen: list[list[int]] = []

    def look() -> None:
        seen.append(list(bench.starter.stores))

    bench.on("join", None, lambda: bench.form(hosts_store=True))
    bench.at(0.0, look)
    bench.on("started", 1, lambda: (look(), bench.break_round(1)))
    bench.on("stopped", 1, lambda: (look(), bench.form(2)))
    bench.on("started", 2, lambda: (look(), bench.at(1.0, send_to_self(signal.SIGTERM))))
    assert bench.run() == 143
    assert seen == [[29500]] * 3 + [[]]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_lost_store_is_reported_once_as_a_failure_of_rank_0(build: Build, is_late: bool) -> None:
    bench = build()

    def lose() -> None:
        bench.starter.lose_store("lost its store: the store's process was ended by SIGKILL")

    bench.on("join", None, lambda: bench.form(hosts_store=True))
    bench.at(1.0 if is_late else 0.0, lose)
    fail_for_good(bench, 1)
    assert bench.run() == 1
    [[failure]] = bench.details("failed")
    assert (failure.global_rank, failure.reason.partition(":")[0]) == (0, "lost its store")
    [(late, _)] = bench.details("stopped")
    assert [each.local_rank for each in late] == ([1] if is_late else [])


def test_a_start_that_is_cancelled_leaves_no_worker(bench: Bench) -> None:
    """The break comes while the starter still makes the workers."""
    bench.starter.start_s = 2.0
    bench.at(1.0, lambda: bench.break_round(1, BreakKind.MEMBERSHIP))
    bench.on("stopped", 1, lambda: bench.at(10.0, lambda: bench.end_job(succeeded=False)))
    assert bench.run() == 1
    assert bench.processes == []
    assert bench.logs.opened == set()


def test_a_disk_that_hangs_keeps_the_agent_from_no_report(bench: Bench) -> None:
    """The agent describes the failure without the error file."""

    def fail() -> None:
        Path(bench.error_file(1)).write_text('{"message": "E: unread"}')
        bench.logs.files.is_hanging = True
        bench.end_worker(1, 7)

    bench.on("started", 1, fail)
    fail_for_good(bench)
    assert bench.run() == 1
    [[failure]] = bench.details("failed")
    assert (failure.local_rank, failure.exit_code, failure.exception) == (1, 7, None)
    [[[late], _]] = bench.details("stopped")
    assert (late.local_rank, late.signal) == (0, "SIGTERM")


def test_an_error_file_is_read(bench: Bench) -> None:
    message = '{"message": {"message": "ValueError: no shard", "extraInfo": {"py_callstack": "Traceback"}}}'
    bench.on("started", 1, lambda: (Path(bench.error_file(1)).write_text(message), bench.end_worker(1, 1)))
    fail_for_good(bench)
    assert bench.run() == 1
    [[failure]] = bench.details("failed")
    assert failure.exception == "ValueError: no shard"


def test_a_worker_that_cannot_be_killed_holds_up_no_other_node(build: Build) -> None:
    """After the grace period and the stop limit its node leaves the job, with a code that lets it be replaced."""
    bench = build(shutdown_timeout_s=10.0, kill_limit_s=20.0)
    bench.on("join", None, bench.form)

    def sleep_uninterruptibly() -> None:
        bench.worker(1).ends_with = {}
        bench.break_round(1, BreakKind.MEMBERSHIP)

    bench.on("started", 1, sleep_uninterruptibly)
    assert bench.run() == 69
    assert bench.names("stopped", "leaving", "closed") == [("leaving", None), ("closed", None)]
    pid = bench.worker(1).pid
    assert bench.details("leaving") == [f"cannot end process {pid}"]
    assert f"cannot end process {pid}, " in bench.lines[-1]
    at_s = {record.what: record.monotonic_s for record in bench.records}
    assert at_s["workers_not_ended"] - at_s["round_broken"] == pytest.approx(30.0, abs=0.1)


# -- every history -----------------------------------------------------------------------------------------------------


def steps() -> st.SearchStrategy[Callable[[Bench], object]]:
    """Something that happens to the node. Most of it concerns the newest round, some an older one."""
    age = st.sampled_from([0, 0, 0, 1])
    rank = st.integers(0, 1)
    kind = st.sampled_from(BreakKind)

    def form(attempt: int, *, is_held: bool) -> Callable[[Bench], object]:
        return lambda bench: bench.form(bench.newest + 1, attempt, is_held=is_held)

    def break_round(age: int, kind: BreakKind, *, stacks: bool) -> Callable[[Bench], object]:
        return lambda bench: bench.break_round(bench.newest - age, kind, stacks=stacks)

    def fence(bench: Bench) -> None:
        bench.lease.fencings += 1
        bench.send_signal(bench.list_descendants(0), signal.SIGKILL)

    return st.one_of(
        st.builds(form, st.sampled_from([0, 0, 3]), is_held=st.booleans()),
        st.builds(form, st.just(0), is_held=st.just(value=False)),
        st.builds(break_round, age, kind, stacks=st.booleans()),
        st.builds(lambda n: lambda bench: bench.post(GlobalRank0Started(round_number=bench.newest - n)), age),
        st.builds(lambda r, c: lambda bench: bench.end_worker(r, c), rank, st.sampled_from([0, 0, 1, -9, -11])),
        st.just(fence),
        st.builds(lambda s: lambda bench: send_to_self(s)(), st.sampled_from([signal.SIGUSR2, signal.SIGINT])),
        st.builds(lambda ok: lambda bench: bench.end_job(succeeded=ok), st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.005, 0.05, 1.0, 7.0]), steps()), max_size=20), st.sets(st.integers(0, 1))
)
def test_whatever_happens_the_agent_ends_and_leaves_no_worker(history, deaf) -> None:
    """The bench itself refuses two live workers of one rank, descriptors left open, and a wait without an end."""
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        tempfile.TemporaryDirectory() as folder,
        open_bench(monkeypatch, Path(folder), hang_timeout_s=5.0, restart_backoff_s=1.0) as bench,
    ):
        bench.deaf = deaf
        bench.at(0.0, bench.form)
        at_s = 0.0
        for delay_s, step in history:
            at_s += delay_s
            bench.at(at_s, lambda step=step: step(bench))
        bench.at(at_s + 100.0, send_to_self(signal.SIGTERM))
        code = bench.run()
        assert code in (0, 1, 130, 143)
        assert [process for process in bench.processes if process.is_alive] == []
        assert bench.names()[-1] == ("closed", None)
        assert bench.names("closed") == [("closed", None)]
        started = [number for name, number in bench.names("started")]
        assert started == sorted(set(started), key=lambda number: number or 0)
        reported = [
            (number, failure.local_rank)
            for name, number, detail in bench.calls
            if name in ("failed", "stopped")
            for failure in (detail if name == "failed" else detail[0])
        ]
        assert len(reported) == len(set(reported))
