"""The hang watch on a clock of the test's own."""

import pytest

from muster.agent.diagnosis.hang import Activity, HangWatch
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


class World:
    """One watch over two workers, limit 10 s."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.loop = Loop(self.clock)
        self.activity = {0: Activity(cpu_s=1.0, output_bytes=0), 1: Activity(cpu_s=1.0, output_bytes=0)}
        self.told: list[float] = []
        self.watch = HangWatch(self.loop, limit_s=10.0, read=lambda: self.activity, on_idle=self.told.append)

    def pass_s(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.clock.at_s += 1.0
            self.loop.turn(0.0)

    def act(self, local_rank: int, *, cpu_s: float = 0.0, output_bytes: int = 0) -> None:
        old = self.activity[local_rank]
        new = Activity(cpu_s=old.cpu_s + cpu_s, output_bytes=old.output_bytes + output_bytes)
        self.activity = {**self.activity, local_rank: new}


def test_idleness_is_told_at_the_limit_and_at_each_further_one() -> None:
    world = World()
    world.pass_s(10)
    assert world.told == []
    world.pass_s(2)
    assert [round(idle_s) for idle_s in world.told] == [10]
    world.pass_s(10)
    assert [round(idle_s) for idle_s in world.told] == [10, 20]


@pytest.mark.parametrize("life", [{"cpu_s": 1.0}, {"output_bytes": 1}, {"cpu_s": -0.5}])
def test_one_worker_that_lives_keeps_the_group_alive(life: dict[str, float]) -> None:
    world = World()
    for _ in range(5):
        world.pass_s(6)
        world.act(1, **life)  # type: ignore[arg-type]
    assert world.told == []


def test_the_cpu_time_of_background_threads_is_no_life() -> None:
    world = World()
    for _ in range(12):
        world.pass_s(1)
        world.act(0, cpu_s=0.002)
    assert len(world.told) == 1


def test_returning_life_is_told() -> None:
    world = World()
    world.pass_s(12)
    world.act(0, output_bytes=5)
    world.pass_s(1)
    assert world.told[-1] == 0.0
    world.pass_s(30)
    assert len(world.told) > 2


def test_new_workers_begin_anew() -> None:
    world = World()
    world.pass_s(9)
    world.watch.reset()
    world.pass_s(9)
    assert world.told == []


def test_without_workers_nobody_is_idle() -> None:
    world = World()
    world.activity = {}
    world.pass_s(40)
    assert world.told == []
