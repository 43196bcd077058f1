"""When a holder starts the agent that waits for the next run, by a clock of the test's own."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster._shared.contract import Env
from muster._shared.holds.connection import SOCKET
from muster.agent.hold import holder as holder_module
from muster.agent.hold import waiting
from muster.agent.hold.agents import WaitingAgent
from muster.agent.hold.holder import Holder
from muster.agent.hold.listening import close_all

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
        self.started_s: list[float] = []
        self.events: list[tuple[float, Callable[[], object]]] = []
        self.calls: dict[Any, Callable[[], object]] = {}
        self.hear_signals: Callable[[bytes], object] = bool
        self.connection, self.client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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

    def write_state(self, _content: object) -> None:
        return

    # as `Original`

    def has_ended(self) -> bool:
        return False

    def start_waiting(self) -> Waiting:
        self.started_s.append(self.now_s)
        return Waiting()

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

    def send_run(self) -> None:
        fd = os.memfd_create("order")
        os.write(fd, json.dumps({"env": {}}).encode())
        self.holder._handle(self.connection, {"run": "main-1"}, [fd])

    def send_claim(self) -> None:
        self.holder._handle(self.connection, {"claim": "main-1"}, [])

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
    made.connection.close()
    made.client.close()


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
    """With both cores busy, `muster hold --default off` returned while an agent that it had killed still ran."""
    with subprocess.Popen(["sleep", "0.3"]) as below:
        live = [[], [below.pid]]
        monkeypatch.setattr(waiting.processes, "kill_descendants", lambda _root: live.pop())
        waiting._end_descendants(os.getpid())
        assert below.poll() is not None
    assert live == []
