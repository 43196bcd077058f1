"""What a holder decides: which run has the node, when the next agent starts, when it is idle; by a clock of its own."""

import json
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster._shared.contract import Env, HoldKey
from muster._shared.holder_socket import SOCKET
from muster.agent.hold import holder as holder_module
from muster.agent.hold import waiting
from muster.agent.hold.holder import Holder, WaitingAgent
from muster.agent.hold.listening import Listener, close_all

ENDS_S = 3.0
"""When the guard of the first run ends."""


class Waiting(WaitingAgent):
    """An agent without processes. What is given to it stays in its connection."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours)

    def receive(self) -> dict[str, object]:
        self.pid, self.is_ready = 1, True
        return {}

    def end(self) -> None:
        super().end()
        self.theirs.close()

    def collect(self) -> int:
        self.end()
        return 0


class World:
    """What a holder waits for: its loop, the original and a client. Time passes only where the holder waits."""

    control = "the original's connection"
    pid = -1

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sockets: list[socket.socket] = []
        self.started_s: list[float] = []
        self.events: list[tuple[float, Callable[[], object]]] = []
        self.calls: dict[Any, Callable[[], object]] = {}
        self.hear_signals: Callable[[bytes], object] = bool
        self.connection, self.client = self.connect()
        self.state: dict[str, Any] = {}
        self.agents: list[Waiting] = []
        self.holder: Holder

    # as `Listener`

    def wait(self, limit_s: float) -> None:
        due_s, call = self.events[0]
        if due_s > self.now_s + limit_s:
            self.now_s += limit_s
            return
        self.now_s = due_s
        del self.events[0]
        call()

    def watch(self, one: object, call: Callable[[], object]) -> None:
        self.calls[one] = call

    def unwatch(self, one: object) -> None:
        self.calls.pop(one, None)

    def watch_signals(self, _signums: object, call: Callable[[bytes], object]) -> None:
        self.hear_signals = call

    def write_state(self, content: dict[str, Any]) -> None:
        self.state = content

    # as `Original`

    def has_ended(self) -> bool:
        return False

    def start_waiting(self) -> Waiting:
        self.started_s.append(self.now_s)
        self.agents.append(Waiting())
        return self.agents[-1]

    def end(self) -> None:
        return

    # what happens

    def hold(self, *more: tuple[float, Callable[[], object]]) -> None:
        """Hold the node for 9 s: a run begins, and ends at `ENDS_S`."""
        run = ((1.0, self.be_ready), (2.0, self.send_run), (ENDS_S, self.end_run))
        self.events = [*run, *more, (9.0, lambda: self.hear_signals(bytes([signal.SIGTERM])))]
        self.holder.run()

    def be_ready(self) -> None:
        assert self.holder._waiting is not None
        self.calls[self.holder._waiting.control]()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """The holder's end of a client's connection, and the client's."""
        made = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in made:
            each.setblocking(False)
        self.sockets += made
        return made

    def send_run(self, connection: socket.socket | None = None, name: str = "main-1", **order: object) -> None:
        fd = os.memfd_create("order")
        os.write(fd, json.dumps({"env": {}, **order}).encode())
        self.holder._handle(connection or self.connection, {"run": name}, [fd])

    def send_claim(self) -> None:
        self.holder._handle(self.connection, {"claim": "main-1"}, [])

    def begin(self) -> None:
        """Have an agent wait, without the loop."""
        self.holder._start_waiting()
        self.be_ready()

    def end_run(self) -> None:
        self.holder._handle_end()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    monkeypatch.setenv(Env.LOG_DIR, str(tmp_path))
    for name in ("Listener", "Original"):
        monkeypatch.setattr(holder_module, name, lambda *_: made)
    monkeypatch.setattr(holder_module, "time", SimpleNamespace(monotonic=lambda: made.now_s, time=lambda: 0.0))
    monkeypatch.setattr(holder_module.processes, "become_subreaper", bool)
    made.holder = Holder(0, 1000.0, [])
    Path(made.holder._folder, SOCKET).touch()
    yield made
    for _, _, fds in made.holder._queue:
        close_all(fds)
    for each in made.sockets:
        each.close()
    for agent in made.agents:
        agent.end()


def test_the_end_of_a_command_has_the_cpus_before_the_next_agent(world: World) -> None:
    world.hold()
    assert json.loads(world.client.recv(1000)) == {"exit": 0}
    first_s, next_s = world.started_s
    assert first_s == 0.0
    assert ENDS_S + 0.1 <= next_s <= ENDS_S + 0.2


@pytest.mark.parametrize("come", [World.send_run, World.send_claim], ids=["run", "claim"])
def test_a_run_that_comes_meanwhile_gets_its_agent_at_once(world: World, come: Callable[[World], None]) -> None:
    came_s = ENDS_S + 0.01
    world.hold((came_s, lambda: come(world)))
    assert world.started_s == [0.0, came_s]


def test_a_guard_that_is_released_ends_after_all_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With both cores busy, `muster release` returned while an agent that it had killed still ran."""
    with subprocess.Popen(["sleep", "0.3"]) as below:
        live = [[], [below.pid]]
        monkeypatch.setattr(waiting.processes, "kill_descendants", lambda _root: live.pop())
        waiting._end_descendants(os.getpid())
        assert below.poll() is not None
    assert live == []


def test_a_client_that_ends_while_the_guard_of_its_run_ends(tmp_path: Path) -> None:
    control, guard = socket.socketpair()
    client, _other = socket.socketpair()
    holder = object.__new__(Holder)
    facts = {"_connection": client, "_is_cold": False, "_claim": None, "_queue": deque(), "_members": []}
    waiting = SimpleNamespace(control=control, end=control.close)
    vars(holder).update(facts, _loop=Listener(str(tmp_path), holder._handle), _waiting=waiting)
    holder._loop.watch(client, bool)
    holder._lose_client(client)  # the guard has closed its connection already, so nothing watches it any more
    assert (control.fileno(), client.fileno(), holder._connection) == (-1, -1, None)
    guard.close()
    _other.close()
    holder._loop._socket.close()
    holder._loop._selector.close()


REFUSED = {"refused": "this hold runs one now; with -cfg wait=true a run waits for it", "run": "one"}


def read(client: socket.socket) -> Any:
    return json.loads(client.recv(1000))


def test_a_claim_keeps_others_off_until_it_ends(world: World) -> None:
    """A run from another machine claims the node before its files travel."""
    world.begin()
    (one, client), (two, other) = world.connect(), world.connect()
    world.holder._handle(one, {"claim": "one"}, [])
    assert read(client) == {"claimed": "one"}
    assert [world.state[key] for key in (HoldKey.STATE, HoldKey.RUN, HoldKey.IDLE_SINCE_S)] == ["busy", "one", None]
    world.holder._handle(two, {"claim": "two"}, [])
    assert read(other) == REFUSED
    world.send_run(two, "two")
    assert read(other) == REFUSED
    world.holder._lose_client(one)
    assert world.state[HoldKey.STATE] == "ready"
    world.holder._handle(two, {"claim": "two"}, [])
    assert read(other) == {"claimed": "two"}
    world.send_run(two, "two")
    assert world.agents[0].theirs.recv(4) == b"!", "its own order is that of the claim"
    assert world.state[HoldKey.RUN] == "two"


def test_one_run_at_a_time_and_one_that_ends_makes_room(world: World) -> None:
    world.begin()
    (one, _), (two, other) = world.connect(), world.connect()
    world.send_run(one, "one")
    world.send_run(two, "two")
    assert read(other) == REFUSED
    world.holder._handle(two, {"signal": signal.SIGINT}, [])
    assert read(other) == {"exit": 130}, "its signals are not those of the run"
    world.holder._lose_client(one)
    world.send_run(two, "two")
    assert [each[1] for each in world.holder._queue] == ["two"], "it waits for the next agent"
    with pytest.raises(BlockingIOError):
        read(other)
    world.end_run()
    world.begin()
    assert (world.state[HoldKey.RUN], [*world.holder._queue]) == ("two", [])
    assert world.agents[1].theirs.recv(4) == b"!"


def test_a_run_that_comes_before_an_agent_waits_for_it_and_an_agent_that_is_killed_then_is_replaced(
    world: World,
) -> None:
    world.holder._start_waiting()
    world.send_run()
    assert world.state[HoldKey.STATE] == "starting"
    world.agents[0].theirs.close()
    world.be_ready()
    assert (world.state[HoldKey.RUN], len(world.holder._queue)) == ("", 1)
    world.end_run()
    world.begin()
    assert world.agents[1].theirs.recv(4) == b"!"


def test_signals_are_those_of_the_runs_client_and_a_release_stops_the_run_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[list[int], int]] = []
    monkeypatch.setattr(holder_module.processes, "send_signal", lambda pids, signum: sent.append((pids, signum)))
    world.begin()
    world.send_run()
    world.holder._handle(world.connection, {"signal": signal.SIGINT}, [])
    world.holder._stop(bytes([signal.SIGTERM]))
    assert sent == [([1], signal.SIGINT), ([1], signal.SIGTERM)]
    assert world.holder._code is None
    world.end_run()
    assert (world.holder._code, read(world.client)) == (143, {"exit": 0})


def test_what_an_order_of_another_machine_does_not_say_is_added(world: World) -> None:
    """Its limits, priority and CPUs are those of the node; its variables and its folder are its own."""
    world.begin()
    world.send_run(args=["main.py"], cwd="/its/own")
    fds = socket.recv_fds(world.agents[0].theirs, 4, 4)[1]
    order = json.loads(os.pread(fds[0], 100_000, 0))
    close_all(list(fds))
    assert (order["args"], order["cwd"], order["env"]) == (["main.py"], "/its/own", {})
    assert order["cpus"] == sorted(os.sched_getaffinity(0))
    assert order["nice"] == os.getpriority(os.PRIO_PROCESS, 0)
    assert {"umask", "limits"} <= order.keys()


def test_what_its_agent_cannot_become_starts_cold(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder_module.facts, "find_difference", lambda *_: "Seccomp is not the hold's")
    world.begin()
    world.send_run(facts={})
    assert read(world.client) == {"cold": "Seccomp is not the hold's"}
    world.holder._lose_client(world.connection)
    assert world.state[HoldKey.STATE] == "ready"


@pytest.mark.parametrize(
    ("driven", "cold"), [({}, "MUSTER_STOPS_TOGETHER is not the hold's"), ({"driven": "/folder"}, None)], ids=str
)
def test_what_a_guard_reads_at_its_start_is_the_holds(
    world: World, monkeypatch: pytest.MonkeyPatch, driven: dict[str, str], cold: str | None
) -> None:
    """A program's job is started by no adapter."""
    monkeypatch.setenv(Env.STOPS_TOGETHER, "1")
    world.begin()
    facts = {**world.holder._facts}
    world.send_run(command=world.holder._prefix, limits={}, nice=0, facts=facts, **driven)
    if cold is None:
        assert world.agents[0].theirs.recv(4) == b"!"
    else:
        assert read(world.client) == {"cold": cold}


def test_after_three_agents_that_could_not_wait_runs_start_cold(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Waiting, "receive", lambda _self: None)
    world.begin()  # starts the second one, and so on
    while world.holder._failed < 3:
        world.be_ready()
    assert (world.state[HoldKey.STATE], len(world.started_s)) == ("cold", 3)
    world.send_run()
    assert read(world.client) == {"cold": "no agent can wait here"}


@pytest.mark.parametrize(("index", "logs_here", "ends_s"), [(0, "1", 31.0), (0, "", 31.0), (1, "", 51.0)])
def test_a_node_that_is_idle_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: World, index: int, logs_here: str, ends_s: float
) -> None:
    """On several machines the others are later than node 0, which a run claims first."""
    monkeypatch.setenv(Env.LOGS_HERE, logs_here)
    world.holder = Holder(index, 30.0, [])
    Path(world.holder._folder, SOCKET).touch()
    world.events = [(1.0, world.be_ready), (1000.0, bool)]
    assert world.holder.run() == 0
    assert ends_s <= world.now_s <= ends_s + 0.5
    assert world.state[HoldKey.STATE] == "ended"


def test_a_claim_keeps_the_hold_and_its_end_begins_the_time_anew(world: World) -> None:
    world.holder._idle_s = 30.0
    one, _ = world.connect()
    world.events = [
        (1.0, world.be_ready),
        (20.0, lambda: world.holder._handle(one, {"claim": "one"}, [])),
        (60.0, lambda: world.holder._lose_client(one)),
        (1000.0, bool),
    ]
    assert world.holder.run() == 0
    assert 90.0 <= world.now_s <= 90.5


def test_a_run_keeps_the_hold_and_its_end_begins_the_time_anew(world: World) -> None:
    world.holder._idle_s = 1.5
    world.events = [
        *((0.5, world.be_ready), (1.0, world.send_run), (4.0, world.end_run), (4.2, world.be_ready)),
        (4.9, lambda: world.send_run(world.connect()[0], "two")),  # is not refused
        (8.0, world.end_run),
        (8.2, world.be_ready),
        (1000.0, bool),
    ]
    assert world.holder.run() == 0
    assert 8.2 + 1.5 <= world.now_s <= 8.2 + 2.0
