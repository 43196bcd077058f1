"""Threads beside the loop: what waits is worked off, and a call that hangs delays nobody."""

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.agent.runtime import loop
from muster.agent.runtime.loop import SideThread


class Printer:
    """Its thread moves what waits to `done`; `gate` holds each step up, as a device that hangs."""

    def __init__(self) -> None:
        self.thread = SideThread(self.run, "printer")
        self.waiting: list[int] = []
        self.done: list[int] = []
        self.gate = threading.Event()

    def put(self, number: int) -> bool:
        with self.thread.changed:
            self.waiting.append(number)
        return self.thread.wake()

    def run(self) -> None:
        changed = self.thread.changed
        while True:
            with changed:
                changed.wait_for(lambda: self.thread.is_closing or self.waiting)
                if not self.waiting:
                    return
            self.gate.wait()
            with changed:
                self.done.append(self.waiting.pop(0))


def test_what_waits_is_done_before_the_end() -> None:
    printer = Printer()
    printer.gate.set()
    assert all(printer.put(number) for number in range(3))
    printer.thread.close(60.0)
    printer.thread.close(60.0)
    assert printer.done == [0, 1, 2]


@pytest.mark.parametrize("limit_s", [0.0, 0.01])
def test_a_call_that_hangs_delays_neither_callers_nor_the_end(limit_s: float) -> None:
    printer = Printer()
    assert printer.put(1)
    assert printer.put(2)
    printer.thread.close(limit_s)
    assert not printer.done
    printer.gate.set()
    printer.thread.close(60.0)
    assert printer.done == [1, 2]


def test_the_thread_starts_with_the_first_that_finds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    printer, start, failures = Printer(), loop.start_thread, [RuntimeError("can't start new thread")]

    def fail_once(run: Callable[[], None], name: str) -> threading.Thread:
        if failures:
            raise failures.pop()
        return start(run, name)

    monkeypatch.setattr(loop, "start_thread", fail_once)
    printer.gate.set()
    assert not printer.put(1)
    assert not printer.thread.is_started
    assert printer.put(2)
    printer.thread.close(60.0)
    assert printer.done == [1, 2]


def test_no_other_module_of_the_agent_starts_threads() -> None:
    """But for the owner of torch's handler: see the docstring of the loop."""
    agent = Path(loop.__file__).parents[1]
    pattern = re.compile(r"threading\.(Thread|Timer)\b\)?[(:]|PoolExecutor|start_new_thread")
    starts = {path.relative_to(agent).as_posix() for path in agent.rglob("*.py") if pattern.search(path.read_text())}
    assert starts == {"runtime/loop.py", "rendezvous/torch_handlers/thread.py"}
