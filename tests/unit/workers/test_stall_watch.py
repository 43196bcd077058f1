"""A template, or a store's process, that owes an answer and stands still: killed after a limit, and the job goes on."""

import json
import os
import signal
import socket
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing

import pytest
from doubles.clocks import HandClock
from doubles.node_bench import BenchLoop, FakeChildren, JumpingSelector

from muster._shared import processes
from muster.agent.errors import SpawnError
from muster.agent.runtime.loop import Loop
from muster.agent.workers import stall_watch
from muster.agent.workers.image import ImageStarter
from muster.agent.workers.spec import Program, ProgramKind, WorkerSpec
from muster.agent.workers.warm import store_handle
from muster.agent.workers.warm.starter import TemplateStarter
from muster.agent.workers.warm.store import DROP, HOST, SERVES
from muster.agent.workers.warm.store_handle import StoreHandle
from muster.agent.workers.warm.template_handle import TemplateHandle, TemplateOptions

TEMPLATE, INTERMEDIATE, WORKER = 900, 901, 902
PROGRAM = Program(kind=ProgramKind.SCRIPT, target="main.py")
SPECS = [WorkerSpec(local_rank=rank, program=PROGRAM, env={}) for rank in (0, 1)]
READY = {"ready": {"modules": [], "pid": TEMPLATE, "memory": {}}}


class FakeCold:
    """In place of `cold.CommandStarter`: each start succeeds."""

    def start(self, specs: Sequence[WorkerSpec], on_started: Callable[[int, int], None], _failed: object) -> None:
        for spec in specs:
            on_started(spec.local_rank, 1000 + spec.local_rank)

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass


class World:
    """A loop with a clock of its own, and what the machine's processes do in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = HandClock()
        self.loop: Loop = BenchLoop(self.clock)
        self.loop._selector.close()
        self.loop._selector = JumpingSelector(self.clock)
        self.children = FakeChildren()
        self.killed: list[int] = []
        self.runs = True
        """Whether the watched processes have run since the last look."""
        self.looks = 0
        self.others: Container[int] = ()
        monkeypatch.setattr(stall_watch, "read_activity", self.read)
        monkeypatch.setattr(processes, "send_signal", self.send)

    def read(self, root: int, others: Container[int]) -> stall_watch.Activity:
        self.others = others
        self.looks += 1
        count = str(self.looks if self.runs else 0)
        return {root: (count,), INTERMEDIATE: ("0",)}

    def send(self, pids: Sequence[int], signum: int) -> None:
        assert signum == signal.SIGKILL
        self.killed += pids

    def turn_for(self, seconds: float) -> None:
        due = []
        self.loop.call_later(seconds, lambda: due.append(True))
        while not due:
            self.loop.turn()


class Agent:
    """A starter with a template whose messages the test writes."""

    def __init__(self, world: World, kind: type[TemplateStarter] = TemplateStarter) -> None:
        self.world = world
        self.notices: list[str] = []
        self.started: dict[int, int] = {}
        self.failed: dict[int, SpawnError] = {}
        self.prepared: list[bool] = []
        self.workers: list[socket.socket] = []
        """The other ends of the parked workers' sockets."""
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        template = object.__new__(TemplateHandle)
        template._loop, template._control, template.pid, template.pending_sockets = world.loop, ours, TEMPLATE, []
        template.started_s, template._stderr_fd = world.clock.now_s(), os.memfd_create("stderr")
        self.starter = kind(
            world.loop,
            world.children,  # type: ignore[arg-type]
            FakeCold(),  # type: ignore[arg-type]
            TemplateOptions(program=PROGRAM, nproc=2, env={}),
            on_notice=self.notices.append,
            on_record=lambda *_args, **_detail: None,
            early=template,
        )
        self.starter.prepare(lambda: None, lambda: self.prepared.append(True))

    def say(self, **message: object) -> None:
        self.theirs.send(json.dumps(message).encode())
        self.world.turn_for(0.01)

    def answer(self) -> None:
        """As a template that has forked what was requested."""
        data, fds, *_ = socket.recv_fds(self.theirs, 4096, 100)
        self.workers += [socket.socket(fileno=fd) for fd in fds]
        count = json.loads(data)["fork"]
        self.say(asked=count, forked=[WORKER + rank for rank in range(count)], error="", duration_s=0.0)

    def start(self) -> None:
        self.starter.start(SPECS, self.started.__setitem__, self.failed.__setitem__)

    def close(self) -> None:
        self.starter.close()
        for one in (self.theirs, *self.workers):
            one.close()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(monkeypatch)
    with closing(made.loop):
        yield made


@pytest.fixture
def agent(world: World) -> Iterator[Agent]:
    with closing(Agent(world)) as made:
        yield made


def test_an_import_that_stands_still_is_ended_and_workers_start_cold(world: World, agent: Agent) -> None:
    agent.say(importing="slow_module")
    agent.start()
    world.turn_for(20)
    world.runs = False
    world.turn_for(59)
    assert (world.killed, agent.notices, agent.started, agent.prepared) == ([], [], {}, [])
    world.turn_for(4)
    assert world.killed == [TEMPLATE, INTERMEDIATE]
    assert ["60 s" in each and "slow_module" in each for each in agent.notices] == [True]
    assert (sorted(agent.started), agent.prepared) == ([0, 1], [True])


def test_an_import_that_runs_may_take_any_time_and_one_line_says_what_takes_it(world: World, agent: Agent) -> None:
    agent.say(importing="slow_module")
    agent.start()
    world.turn_for(59)
    assert agent.notices == []
    world.turn_for(5000)
    assert ["slow_module for 60 s" in each for each in agent.notices] == [True]
    assert (world.killed, agent.started) == ([], {})


def test_a_template_that_stands_still_when_asked_to_fork_is_ended(world: World, agent: Agent) -> None:
    agent.say(**READY)
    agent.answer()
    agent.start()
    world.runs = False
    world.turn_for(500)
    assert (len(agent.started), world.killed) == (2, [])  # it owes nothing
    agent.start()
    world.turn_for(9)
    assert world.killed == []
    world.turn_for(4)
    assert world.killed == [TEMPLATE, INTERMEDIATE]
    agent.start()  # no template follows
    assert set(agent.started.values()) == {1000, 1001}
    assert [" 10 s " in each for each in agent.notices] == [True]


def test_successors_that_are_forked_early_are_watched_too(world: World, agent: Agent) -> None:
    agent.say(**READY)
    agent.answer()
    agent.start()
    agent.starter.park(2)
    world.runs = False
    world.turn_for(13)
    assert {WORKER, WORKER + 1} <= set(world.others)  # they are not the template's any more
    assert world.killed == [TEMPLATE, INTERMEDIATE]
    agent.start()
    assert set(agent.started.values()) == {1000, 1001}


def test_a_fork_that_runs_may_take_any_time(world: World, agent: Agent) -> None:
    agent.say(**READY)
    agent.start()
    world.turn_for(1000)
    agent.answer()
    assert (agent.started, world.killed, agent.notices) == ({0: WORKER, 1: WORKER + 1}, [], [])


def test_nothing_is_looked_at_while_the_template_owes_no_answer(world: World, agent: Agent) -> None:
    agent.say(**READY)
    agent.answer()
    looks = world.looks
    world.turn_for(100)
    assert world.looks == looks


def test_time_in_which_the_agent_did_not_run_either_does_not_count(world: World, agent: Agent) -> None:
    """The container was paused, or the whole job stopped by signals."""
    agent.say(importing="slow_module")
    world.runs = False
    for _ in range(20):
        world.clock.at_s += 3600
        world.turn_for(1)
    assert world.killed == []


def test_workers_that_have_no_cold_start_fail_with_the_reason(world: World) -> None:
    """Forks of the program that started the job."""
    with closing(Agent(world, ImageStarter)) as agent:
        agent.say(**READY)
        agent.start()
        world.runs = False
        world.turn_for(13)
        assert [" 10 s " in str(agent.failed[rank]) for rank in (0, 1)] == [True, True]
        before = str(agent.failed.pop(0))
        agent.start()
        assert str(agent.failed[0]) == before
        assert (agent.started, world.killed) == ({}, [TEMPLATE, INTERMEDIATE])


class Store:
    """A store's handle, and the other ends of the processes it was handed to."""

    def __init__(self, world: World) -> None:
        self.events: list[str] = []
        self.controls: list[socket.socket] = []
        self.handle = StoreHandle(
            world.loop,
            world.children,  # type: ignore[arg-type]
            addr="127.0.0.1",
            port=0,
            on_stalled=lambda: self.events.append("stalled"),
            on_lost=self.events.append,
        )

    def hand_over(self, pid: int) -> None:
        ours, theirs = socket.socketpair()
        assert self.handle.hand_over(ours, pid)
        self.controls.append(theirs)

    def start_cold(self, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
        def spawn(spec: WorkerSpec, keep_fds: list[int]) -> int:
            self.controls.append(socket.socket(fileno=os.dup(keep_fds[0])))
            return pid

        monkeypatch.setattr(store_handle, "spawn", spawn)
        self.handle.start_cold(TemplateOptions(program=PROGRAM, nproc=2, env={}))

    def close(self) -> None:
        self.handle.close()
        for control in self.controls:
            control.close()


@pytest.fixture
def store(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(os, "kill", lambda pid, _signum: world.killed.append(pid))
    with closing(Store(world)) as made:
        yield made


def test_a_store_that_does_not_begin_to_serve_is_replaced_on_the_same_socket(world, store, monkeypatch) -> None:
    store.hand_over(WORKER)
    world.runs = False
    world.turn_for(13)
    assert (world.killed, store.events, store.handle.waits) == ([WORKER, INTERMEDIATE], ["stalled"], True)
    world.children.callbacks[WORKER](-9)  # nothing follows from the end of the one that was replaced
    store.start_cold(WORKER + 1, monkeypatch)
    assert (store.handle.waits, store.events) == (False, ["stalled"])
    world.turn_for(50)
    assert store.events == ["stalled"]
    world.turn_for(15)
    assert ["60 s" in each for each in store.events] == [False, True]


def test_only_a_process_that_serves_is_kept_for_the_next_round(world: World, store: Store) -> None:
    store.hand_over(WORKER)
    assert (store.handle.end_round(), world.killed) == (None, [WORKER])
    with closing(Store(world)) as second:
        second.hand_over(WORKER + 1)
        second.controls[0].send(SERVES)
        world.turn_for(1)
        kept = second.handle.end_round()
        assert kept is not None
        with kept[0]:
            assert (kept[1], second.handle.waits) == (WORKER + 1, False)
            assert [second.controls[0].recv(4) for _ in range(2)] == [HOST, DROP]
    assert world.killed == [WORKER]


def test_a_store_that_serves_owes_no_answer(world: World, store: Store) -> None:
    store.hand_over(WORKER)
    store.controls[0].send(SERVES)
    world.runs = False
    world.turn_for(1000)
    assert (world.killed, store.events) == ([], [])
