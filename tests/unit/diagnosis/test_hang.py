"""The hang watch on a clock of the test's own."""

import pytest

from muster.agent.diagnosis.hang import Activity, HangWatch, ProcessKey, Reading
from muster.agent.runtime.loop import Loop


class HandClock:
    """Moves when told."""

    def __init__(self) -> None:
        self.at_s = 100.0

    def now_s(self) -> float:
        return self.at_s

    def boottime_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return self.at_s


NOTHING = Reading(cpu_s=0.0, written_bytes=0)


class World:
    """One watch over two workers of one process each, limit 10 s."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.loop = Loop(self.clock)
        self.captured = {0: 0, 1: 0}
        one = Reading(cpu_s=1.0, written_bytes=1000)
        self.processes: dict[int, dict[ProcessKey, Reading]] = {0: {(10, 1): one}, 1: {(20, 1): one}}
        self.told: list[str | None] = []
        self.watch = HangWatch(self.loop, limit_s=10.0, read=self.read, on_idle=self.told.append)

    def read(self) -> dict[int, Activity]:
        return {
            rank: Activity(captured_bytes=self.captured[rank], processes=dict(processes))
            for rank, processes in self.processes.items()
        }

    def pass_s(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.clock.at_s += 1.0
            self.loop.turn(0.0)

    def act(self, key: ProcessKey, *, cpu_s: float = 0.0, written_bytes: int = 0) -> None:
        """Process `key` of the worker of local rank 0 or 1 (ids from 10 or 20 on) works; it is started if need be."""
        processes = self.processes[key[0] // 10 - 1]
        old = processes.get(key, NOTHING)
        processes[key] = Reading(cpu_s=old.cpu_s + cpu_s, written_bytes=(old.written_bytes or 0) + written_bytes)

    def end(self, key: ProcessKey, *, waited_for_by: ProcessKey | None = None) -> None:
        """Process `key` ends; whoever waits for it gets its counters."""
        reading = self.processes[key[0] // 10 - 1].pop(key)
        if waited_for_by is not None:
            self.act(waited_for_by, cpu_s=reading.cpu_s, written_bytes=reading.written_bytes or 0)

    @property
    def idle_s(self) -> list[int]:
        """For how long each report says that nothing has happened."""
        return [int(line.split(" for ")[1].split(" s ")[0]) for line in self.told if line is not None]


def test_idleness_is_told_at_the_limit_and_at_each_further_one() -> None:
    world = World()
    world.pass_s(10)
    assert world.told == []
    world.pass_s(2)
    assert world.idle_s == [10]
    world.pass_s(10)
    assert world.idle_s == [10, 20]


@pytest.mark.parametrize("life", [{"cpu_s": 1.0}, {"written_bytes": 1}])
@pytest.mark.parametrize("key", [(20, 1), (21, 7)], ids=["worker", "child"])
def test_one_worker_that_lives_keeps_the_group_alive(life: dict[str, float], key: ProcessKey) -> None:
    world = World()
    for _ in range(5):
        world.pass_s(6)
        world.act(key, **life)  # type: ignore[arg-type]
    assert world.told == []


def test_captured_output_is_life_where_the_kernel_does_not_say_what_is_written() -> None:
    world = World()
    world.processes = {0: {}, 1: {}}
    for _ in range(5):
        world.pass_s(6)
        world.captured[1] += 1
    assert world.told == []
    world.pass_s(12)
    assert world.told == ["hung: no output captured for 10 s (--hang-timeout)"]


def test_children_that_come_work_and_go_are_life() -> None:
    """None of them is there at two looks; what is seen at one look, or handed to the parent, counts."""
    world = World()
    for number in range(30):
        world.act((21, number), cpu_s=0.3)
        world.pass_s(1)
        world.end((21, number))
    assert world.told == []
    for number in range(30):
        world.act((22, number), written_bytes=1)
        world.end((22, number), waited_for_by=(20, 1))
        world.pass_s(1)
    assert world.told == []


def test_a_child_that_ends_hides_nothing_that_others_write() -> None:
    """The sum over the session stays the same."""
    world = World()
    world.act((21, 1), written_bytes=500)
    world.pass_s(9)
    world.end((21, 1))
    world.act((20, 1), written_bytes=500)
    world.pass_s(9)
    assert world.told == []


@pytest.mark.parametrize("waited_for_by", [None, (20, 1)])
def test_a_child_that_ends_is_life_at_most_once(waited_for_by: ProcessKey | None) -> None:
    world = World()
    world.act((21, 1), cpu_s=50.0, written_bytes=500)
    world.pass_s(5)
    world.end((21, 1), waited_for_by=waited_for_by)
    world.pass_s(13)
    assert world.idle_s == [10]


def test_children_that_do_nothing_are_no_life() -> None:
    """A shell loop around `sleep 1`: processes come and go for ever."""
    world = World()
    for number in range(13):
        world.act((21, number))
        world.pass_s(1)
        world.end((21, number), waited_for_by=(20, 1))
    assert world.idle_s == [10]


def test_a_process_id_that_is_used_again_is_another_process() -> None:
    world = World()
    world.act((21, 1), written_bytes=500)
    world.pass_s(9)
    world.end((21, 1))
    world.act((21, 2), written_bytes=400)
    world.pass_s(9)
    assert world.told == []


def test_the_cpu_time_of_background_threads_is_no_life() -> None:
    world = World()
    for _ in range(12):
        world.pass_s(1)
        world.act((10, 1), cpu_s=0.002)
    assert len(world.told) == 1


def test_returning_life_is_told() -> None:
    world = World()
    world.pass_s(12)
    world.act((10, 1), written_bytes=5)
    world.pass_s(1)
    assert world.told[-1] is None
    world.pass_s(30)
    assert len(world.told) > 2


def test_the_report_names_what_was_looked_at() -> None:
    world = World()
    world.pass_s(12)
    share = "under 0.5% of a core counts as none"
    assert world.told == [f"hung: no CPU time used and nothing written for 10 s (--hang-timeout; {share})"]
    hidden = World()
    hidden.processes[1][22, 1] = Reading(cpu_s=1.0, written_bytes=None)
    hidden.pass_s(12)
    assert hidden.told == [f"hung: no CPU time used and no output captured for 10 s (--hang-timeout; {share})"]


def test_processes_that_may_not_be_asked_what_they_write_are_judged_by_the_rest() -> None:
    world = World()
    world.processes[1][22, 1] = Reading(cpu_s=1.0, written_bytes=None)
    for _ in range(3):
        world.pass_s(6)
        world.processes[1][22, 1] = Reading(cpu_s=world.processes[1][22, 1].cpu_s + 1.0, written_bytes=None)
    assert world.told == []
    world.pass_s(12)
    assert world.idle_s == [10]


def test_new_workers_begin_anew() -> None:
    world = World()
    world.pass_s(9)
    world.watch.reset()
    world.pass_s(9)
    assert world.told == []


def test_without_workers_nobody_is_idle() -> None:
    world = World()
    world.processes = {}
    world.pass_s(40)
    assert world.told == []
