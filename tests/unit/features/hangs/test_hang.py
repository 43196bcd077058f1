"""The hang watch on the test's own clock."""

import random
from collections.abc import Callable, Mapping

import pytest
from doubles.clocks import HandClock

from muster.agent.features.hangs.sessions import ProcessKey, Reading
from muster.agent.features.hangs.watch import Activity, HangWatch
from muster.agent.runtime.loop import Loop

NOTHING = Reading(cpu_s=0.0, written_bytes=0)


class World:
    """One watch over two workers of one process each, limit 10 s."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.loop = Loop(self.clock)
        self.captured = {0: 0, 1: 0}
        one = Reading(cpu_s=1.0, written_bytes=1000)
        self.processes: dict[int, dict[ProcessKey, Reading]] = {0: {(10, 1): one}, 1: {(20, 1): one}}
        self.progress_ns: dict[int, int | None] = {0: None, 1: None}
        self.collectives: dict[int, tuple[int, ...] | None] = {0: None, 1: None}
        self.has_answered = True
        self.launches: dict[int, tuple[int, ...] | None] = {0: None, 1: None}
        self.silent_s = 0.0
        self.reports: list[str | None] = []
        self.answers: list[Callable[[], None]] = []
        self.answers_at_once = True
        self.still: list[float] = []
        self.watch = HangWatch(self.loop, limit_s=10.0, read=self.read, on_idle=self.note, on_still=self.still.append)

    def note(self, text: str | None, is_urgent: bool) -> None:
        assert not is_urgent
        self.reports.append(text)

    def read(self, _idle_s: float, silent_s: float, then: Callable[[Mapping[int, Activity]], None]) -> None:
        self.silent_s = silent_s
        found = {
            rank: Activity(
                captured_bytes=self.captured[rank],
                processes=dict(processes),
                progress_ns=self.progress_ns[rank],
                collectives=self.collectives[rank],
                has_answered=self.has_answered,
                launches=self.launches[rank],
            )
            for rank, processes in self.processes.items()
        }
        self.answers.append(lambda: then(found))
        if self.answers_at_once:
            self.answer()

    def answer(self) -> None:
        """What was read last arrives."""
        self.answers.pop()()

    def pass_s(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.clock.at_s += 1.0
            self.loop.turn(0.0)

    def act(self, key: ProcessKey, *, cpu_s: float = 0.0, written_bytes: int = 0) -> None:
        """Process `key` of the worker of local rank 0 or 1 (ids from 10 or 20 on) works; starts it if necessary."""
        processes = self.processes[key[0] // 10 - 1]
        old = processes.get(key, NOTHING)
        processes[key] = Reading(cpu_s=old.cpu_s + cpu_s, written_bytes=(old.written_bytes or 0) + written_bytes)

    def end(self, key: ProcessKey, *, waited_for_by: ProcessKey | None = None) -> None:
        """Process `key` ends; the process that waits for it gets its counters."""
        reading = self.processes[key[0] // 10 - 1].pop(key)
        if waited_for_by is not None:
            self.act(waited_for_by, cpu_s=reading.cpu_s, written_bytes=reading.written_bytes or 0)

    @property
    def idle_s(self) -> list[int]:
        """The idle times in the reports."""
        return [int(line.split(" for ")[1].split(" s ")[0]) for line in self.reports if line is not None]


@pytest.fixture
def world() -> World:
    return World()


def test_idleness_is_reported_at_the_limit_and_at_each_further_one(world: World) -> None:
    world.pass_s(10)
    assert world.reports == []
    world.pass_s(2)
    assert world.idle_s == [10]
    world.pass_s(10)
    assert world.idle_s == [10, 20]


@pytest.mark.parametrize("life", [{"cpu_s": 1.0}, {"written_bytes": 1}])
@pytest.mark.parametrize("key", [(20, 1), (21, 7)], ids=["worker", "child"])
def test_one_active_worker_keeps_the_group_active(life: dict[str, float], key: ProcessKey, world: World) -> None:
    for _ in range(5):
        world.pass_s(6)
        world.act(key, **life)  # type: ignore[arg-type]
    assert world.reports == []


def test_captured_output_is_activity_where_the_kernel_does_not_count_writes(world: World) -> None:
    world.processes = {0: {}, 1: {}}
    for _ in range(5):
        world.pass_s(6)
        world.captured[1] += 1
    assert world.reports == []
    world.pass_s(12)
    assert ["no output captured" in each for each in world.reports] == [True]


def test_children_that_start_work_and_end_are_activity(world: World) -> None:
    """None of them exists at two checks; what one check finds, or the parent gets, counts."""
    for number in range(30):
        world.act((21, number), cpu_s=0.3)
        world.pass_s(1)
        world.end((21, number))
    assert world.reports == []
    for number in range(30):
        world.act((22, number), written_bytes=1)
        world.end((22, number), waited_for_by=(20, 1))
        world.pass_s(1)
    assert world.reports == []


def test_a_child_that_ends_does_not_hide_what_others_write(world: World) -> None:
    """The sum over the session stays the same."""
    world.act((21, 1), written_bytes=500)
    world.pass_s(9)
    world.end((21, 1))
    world.act((20, 1), written_bytes=500)
    world.pass_s(9)
    assert world.reports == []


@pytest.mark.parametrize("waited_for_by", [None, (20, 1)])
def test_a_child_that_ends_is_activity_at_most_once(waited_for_by: ProcessKey | None, world: World) -> None:
    world.act((21, 1), cpu_s=50.0, written_bytes=500)
    world.pass_s(5)
    world.end((21, 1), waited_for_by=waited_for_by)
    world.pass_s(13)
    assert world.idle_s == [10]


def test_children_that_do_nothing_are_not_activity(world: World) -> None:
    """A shell loop around `sleep 1`: processes come and go for ever."""
    for number in range(13):
        world.act((21, number))
        world.pass_s(1)
        world.end((21, number), waited_for_by=(20, 1))
    assert world.idle_s == [10]


def test_a_reused_process_id_is_another_process(world: World) -> None:
    world.act((21, 1), written_bytes=500)
    world.pass_s(9)
    world.end((21, 1))
    world.act((21, 2), written_bytes=400)
    world.pass_s(9)
    assert world.reports == []


def test_the_cpu_time_of_background_threads_is_not_activity(world: World) -> None:
    for _ in range(12):
        world.pass_s(1)
        world.act((10, 1), cpu_s=0.002)
    assert len(world.reports) == 1


def test_activity_after_idleness_is_reported(world: World) -> None:
    world.pass_s(12)
    world.act((10, 1), written_bytes=5)
    world.pass_s(1)
    assert world.reports[-1] is None
    world.pass_s(30)
    assert len(world.reports) > 2


def test_the_report_names_what_was_measured(world: World) -> None:
    world.pass_s(12)
    assert ["and nothing written" in each for each in world.reports] == [True]
    hidden = World()
    hidden.processes[1][22, 1] = Reading(cpu_s=1.0, written_bytes=None)
    hidden.pass_s(12)
    assert ["and no output" in each for each in hidden.reports] == [True]


def test_processes_with_unreadable_writes_are_judged_by_the_rest(world: World) -> None:
    world.processes[1][22, 1] = Reading(cpu_s=1.0, written_bytes=None)
    for _ in range(3):
        world.pass_s(6)
        world.processes[1][22, 1] = Reading(cpu_s=world.processes[1][22, 1].cpu_s + 1.0, written_bytes=None)
    assert world.reports == []
    world.pass_s(12)
    assert world.idle_s == [10]


def test_without_workers_nothing_is_idle(world: World) -> None:
    world.processes = {}
    world.pass_s(40)
    assert world.reports == []


def test_there_is_no_verdict_while_activity_cannot_be_read(world: World) -> None:
    """A disk with stack files that does not answer; one reading at a time waits for it."""
    world.pass_s(5)
    world.answers_at_once = False
    world.pass_s(30)
    assert (world.reports, len(world.answers)) == ([], 1)
    world.answers_at_once = True
    world.answer()
    world.pass_s(3)
    assert world.reports == []  # they may have waited for the same disk
    world.pass_s(5)
    assert world.idle_s == [10]


def test_a_reading_that_arrives_after_the_end_changes_nothing(world: World) -> None:
    world.answers_at_once = False
    world.pass_s(30)
    world.watch.close()
    world.answer()
    assert world.reports == []


def test_a_rank_that_has_done_steps_is_not_active_by_output_and_cpu_time(world: World) -> None:
    """It loops for ever, or a thread of it prints."""
    world.progress_ns = {0: 1, 1: 1}
    for _ in range(13):
        world.pass_s(1)
        world.act((20, 1), cpu_s=1.0, written_bytes=100)
    assert ["step for 10 s" in each for each in world.reports] == [True]
    world.progress_ns[0] = 2
    world.pass_s(2)
    assert world.reports[1:] == [None]


def test_each_rank_is_judged_by_the_strongest_sign_of_its_own(world: World) -> None:
    world.progress_ns[0], world.collectives[0] = 1, (4, 3)
    for _ in range(13):
        world.pass_s(1)
        world.act((20, 1), cpu_s=1.0)
    assert world.reports == []
    world.progress_ns[1] = 1
    world.pass_s(13)
    assert ["no collective and" in each for each in world.reports] == [True]


def test_ranks_that_wait_for_nccl_with_the_cpu_are_idle_by_what_its_monitor_says(world: World) -> None:
    """Without steps and collectives CPU time counts, but not where ranks have launched different numbers."""
    for _ in range(5):
        world.act((10, 1), cpu_s=1.0)
        world.pass_s(1)
    assert (world.silent_s, world.reports) == (4.0, [])
    world.launches = {0: (6, 5, 6), 1: (5, 5, 6)}
    for _ in range(12):
        world.act((10, 1), cpu_s=1.0)
        world.pass_s(1)
    assert world.idle_s == [10], "the first report is no movement, and ends no pause"
    world.launches = {0: (6, 6, 6), 1: (6, 6, 6)}
    world.pass_s(1)
    assert world.reports[-1] is None


def test_a_first_answer_that_was_late_is_no_movement(world: World) -> None:
    """On a busy machine a worker's server may not answer for a minute."""
    world.has_answered = False
    world.pass_s(12)
    world.has_answered, world.collectives = True, {0: (3, 2), 1: (2, 2)}
    world.pass_s(3)
    assert (world.idle_s, world.watch._still.for_s) == ([10], 14.0)
    world.collectives[1] = (3, 3)
    world.pass_s(1)
    assert (world.reports[-1], world.watch._still.for_s) == (None, 0.0)


def test_the_first_collective_of_a_worker_that_was_seen_without_one_is_movement(world: World) -> None:
    world.has_answered = False
    world.pass_s(6)
    world.has_answered = True
    world.pass_s(6)
    world.collectives[1] = (1, 0)
    world.pass_s(1)
    assert (world.reports[-1], world.watch._still.for_s) == (None, 0.0)


def test_output_ends_a_silence(world: World) -> None:
    world.pass_s(4)
    assert world.silent_s == 3.0
    world.act((20, 1), written_bytes=10)
    world.pass_s(2)
    assert world.silent_s == 1.0


class LoadedNode:
    """Rank 0 waits in a collective, and rank 1 writes now and then; looks are missing, partial, late, or all of it."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)  # a history, no secret
        self.clock = HandClock()
        self.loop = Loop(self.clock)
        self.written = 1_000_000
        self.cpu_s = 1.0
        self.pending: list[tuple[float, Callable[[], None]]] = []
        """Looks that come late, and when."""
        self.still: list[float] = []
        self.reports: list[str | None] = []
        self.watch = HangWatch(
            self.loop,
            limit_s=300.0,
            read=self.read,
            on_idle=lambda what, _is_urgent: self.reports.append(what),
            on_still=self.still.append,
        )

    def read(self, _idle_s: float, _silent_s: float, then: Callable[[Mapping[int, Activity] | None], None]) -> None:
        kind = self.draw.choice(["whole"] * 6 + ["none", "partial", "late", "late and old"])
        if kind in ("whole", "none", "partial"):
            then(self.look(kind))
            return
        old = self.look("whole") if kind == "late and old" else None
        late_s = self.draw.uniform(0.0, 60.0)
        self.pending.append((self.clock.at_s + late_s, lambda: then(old or self.look("whole"))))

    def look(self, kind: str) -> Mapping[int, Activity] | None:
        if kind == "none":
            return None
        seen = kind == "whole"
        readings = [
            Reading(
                cpu_s=self.cpu_s,
                written_bytes=written if seen or self.draw.random() < 0.3 else None,
                loaded_bytes=50_000_000 if seen or self.draw.random() < 0.3 else None,
            )
            for written in (500_000, self.written)
        ]
        return {
            rank: Activity(captured_bytes=7, processes={(10 + rank, 1): readings[rank]}, is_waiting=rank == 0)
            for rank in (0, 1)
        }

    def pass_s(self, seconds: float) -> None:
        until_s = self.clock.at_s + seconds
        while self.clock.at_s < until_s:
            busy = self.draw.random() < 0.01
            # Now and then the agent cannot run, either.
            step_s = self.draw.uniform(5.0, 60.0) if busy else self.draw.uniform(1.0, 5.0)
            self.clock.at_s += step_s
            self.cpu_s += 0.004 * step_s  # watchdog threads
            for each in [each for each in self.pending if each[0] <= self.clock.at_s]:
                self.pending.remove(each)
                each[1]()
            self.loop.turn(0.0)


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in (250, 500, 750))])
def test_a_look_that_missed_something_or_came_late_neither_ends_nor_begins_a_standstill(first: int) -> None:
    for seed in range(first, first + 250):
        node = LoadedNode(seed)
        for _ in range(30):
            node.pass_s(node.draw.uniform(0.5, 8.0))
            node.written += 1
        assert (node.still, node.reports) == ([], []), f"seed {seed}"
        node.pass_s(1200.0)
        assert node.still, f"seed {seed}"
        assert node.reports, f"seed {seed}"
        assert 0.0 not in node.still, f"seed {seed}"
        assert None not in node.reports, f"seed {seed}"
        node.written += 1
        node.pass_s(150.0)
        assert node.reports[-1] is None, f"seed {seed}"
        node.watch.close()
        node.loop.close()
