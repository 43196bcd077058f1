"""Process groups are let go of only when their threads have put everything down: on files of /proc as they read."""

import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from muster.agent.workers.hooks import groups as group_hook

NEXT_WORK = "202 0x7f01 0x189 0x0 0x0 0x0 0xffffffff 0x7f02 0x7f03"
INTERPRETER = "202 0x7f01 0x89 0x0 0x7f04 0x0 0xffffffff 0x7f02 0x7f03"
MUTEX = "202 0x7f01 0x80 0x2 0x0 0x0 0xffffffff 0x7f02 0x7f03"
PEER = "232 0x8 0x7f01 0x1 0xffffffffffffffff 0x0 0x0 0x7f02 0x7f03"


class Group:
    """Stands for torch's: it must be hashable and no more."""


class World:
    """The threads of this process, and what each does next; each pause takes a second."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {"1": "python"}
        self.waits: dict[str, Iterator[str]] = {}
        self.now_s = 0.0
        self.paused: list[float] = []

    def add(self, thread: str, *waits: str, name: str = "pt_gloo_runloop") -> None:
        """Start a thread; its last wait goes on for ever."""
        self.names[thread] = name
        self.waits[thread] = itertools.chain(waits, itertools.repeat(waits[-1]))

    def read(self, thread: str, name: str) -> str:
        return self.names[thread] if name == "comm" else next(self.waits[thread])

    def sleep(self, pause_s: float) -> None:
        self.paused.append(pause_s)
        self.now_s += 1.0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(group_hook, "_list_threads", lambda: set(world.names))
    monkeypatch.setattr(group_hook, "_read_about_thread", world.read)
    monkeypatch.setattr(group_hook, "_FUTEX", {os.uname().machine: 202})
    monkeypatch.setattr(group_hook.time, "sleep", world.sleep)
    monkeypatch.setattr(group_hook.time, "monotonic", lambda: world.now_s)
    return world


@pytest.fixture
def groups(world: World) -> Any:
    return group_hook._Groups({})


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        (NEXT_WORK, True),
        (INTERPRETER, False),
        (MUTEX, False),
        (PEER, False),
        ("running", False),
        ("", True),  # it has ended
    ],
)
def test_a_thread_is_idle_while_it_waits_for_its_next_collective(world: World, words: str, idle: bool) -> None:
    world.add("7", words)
    assert group_hook._is_idle("7") is idle


def test_a_group_is_kept_until_its_threads_are_idle(world: World, groups: Any) -> None:
    group = Group()
    world.add("7", "running", INTERPRETER, MUTEX, NEXT_WORK)
    world.add("8", NEXT_WORK)
    groups[group] = {}
    del groups[group]
    assert not groups
    assert (len(world.paused), next(world.waits["7"])) == (3, NEXT_WORK)


def test_only_the_threads_of_the_group_are_waited_for(world: World, groups: Any) -> None:
    """Another group's collective may wait for what this rank does next."""
    first, second = Group(), Group()
    world.add("7", PEER)
    groups[first] = {}
    world.add("8", NEXT_WORK)
    groups[second] = {}
    del groups[second]
    assert list(groups) == [first]
    assert world.paused == []


def test_threads_of_other_kinds_are_not_waited_for(world: World, groups: Any) -> None:
    world.add("6", PEER, name="python")
    world.add("7", NEXT_WORK)
    groups[Group()] = {}
    groups.clear()
    assert (len(groups), world.paused) == (0, [])


def settle_after(groups: Any, error: BaseException) -> None:
    """As `destroy_process_group` in a `finally`."""
    try:
        raise error
    finally:
        groups.settle()


@pytest.mark.parametrize("error", [ValueError("expected"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_failing_program_waits_a_while_and_then_nothing_destroys_the_group(world, groups, error) -> None:
    group = Group()
    world.add("7", PEER)
    groups[group] = {}
    before = sys.getrefcount(group)
    with pytest.raises(type(error)):
        settle_after(groups, error)
    assert sys.getrefcount(group) == before  # the table of threads no longer has it: this one is for ever
    assert world.now_s == pytest.approx(group_hook._FAILING_LIMIT_S)
    pauses = len(world.paused)
    groups.clear()  # waits no second time
    assert len(world.paused) == pauses


def test_a_program_that_ends_well_waits_for_its_collectives(world: World, groups: Any) -> None:
    world.add("7", *[PEER] * 500, NEXT_WORK)
    groups[Group()] = {}
    with pytest.raises(SystemExit):
        settle_after(groups, SystemExit(0))
    assert len(world.paused) == 500


def test_a_program_that_has_called_sys_exit_is_failing(world: World, groups: Any) -> None:
    world.add("7", PEER)
    groups[Group()] = {}
    groups.has_failed = True
    groups.settle()
    assert world.now_s == pytest.approx(group_hook._FAILING_LIMIT_S)


@pytest.mark.parametrize("known", [{}, {os.uname().machine: 202}], ids=["another processor", "no such file"])
def test_threads_that_cannot_be_seen_get_a_moment(world, groups, monkeypatch, known) -> None:
    def refuse(_thread: str, name: str) -> str:
        if name == "syscall" and known:
            raise FileNotFoundError
        return "pt_gloo_runloop" if name == "comm" else NEXT_WORK

    monkeypatch.setattr(group_hook, "_FUTEX", known)
    monkeypatch.setattr(group_hook, "_read_about_thread", refuse)
    world.add("7", NEXT_WORK)
    groups[Group()] = {}
    groups.clear()
    assert world.paused == [group_hook._UNSEEN_S]


def test_a_fork_waits_for_nothing(world: World, groups: Any) -> None:
    world.add("7", PEER)
    groups[Group()] = {}
    groups.owner_pid = 1
    groups.clear()
    assert (len(groups), world.paused) == (0, [])
