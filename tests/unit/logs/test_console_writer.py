"""The console is held back while a debugger has the terminal, and never longer."""

import os
from types import SimpleNamespace

import pytest

from muster.agent.logs.console_writer import ConsoleWriter
from muster.agent.logs.lines import AgentLine, Hold
from muster.agent.runtime.loop import SideThread, SystemClock


@pytest.fixture
def console(monkeypatch):
    """A console whose thread's part the test calls itself, and the descriptor that it prints to."""
    read_fd, write_fd = os.pipe()
    monkeypatch.setattr(SideThread, "wake", lambda _self: False)
    writer = ConsoleWriter(
        is_terminal=False, size_fd=write_fd, backlog_bytes=1000, bar_interval_s=1.0, clock=SystemClock()
    )
    yield writer, SimpleNamespace(fd=write_fd), read_fd
    os.close(read_fd)
    os.close(write_fd)


def test_a_release_while_the_last_lines_are_printed_is_not_lost(console, monkeypatch):
    """A worker may ask for the terminal and end before the console has come to that."""
    writer, source, read_fd = console
    with writer.changed:
        writer.put(source, AgentLine(data=b"before\n"))
        writer.put(source, Hold())
        writer.put(source, AgentLine(data=b"after\n"))
    batch = writer._wait_batch()
    with writer.changed:
        writer.release()
    writer._print(batch)

    def wait() -> None:
        raise AssertionError("it would wait for ever")

    monkeypatch.setattr(writer.changed, "wait", wait)
    writer._wait_released()
    assert not writer.is_held
    writer._print(writer._wait_batch())
    assert os.read(read_fd, 100) == b"before\nafter\n"


def test_nothing_is_printed_until_the_release(console, monkeypatch):
    writer, source, read_fd = console
    with writer.changed:
        writer.put(source, Hold())
        writer.put(source, AgentLine(data=b"after\n"))
    writer._print(writer._wait_batch())
    seen = []

    def wait() -> None:
        seen.append(writer.is_held)
        writer.release()

    monkeypatch.setattr(writer.changed, "wait", wait)
    writer._wait_released()
    assert seen == [True]
    assert not writer.is_held
    writer._print(writer._wait_batch())
    assert os.read(read_fd, 100) == b"after\n"
