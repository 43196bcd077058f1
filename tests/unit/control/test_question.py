"""The question at the terminal: when the reader starts, what it passes on, and what is left afterwards."""

import os
import subprocess
from types import SimpleNamespace

import pytest

from muster.agent.control.question import TerminalQuestion


class Terminal:
    """The agent's console and loop, and a process that reads what `typed` is written to."""

    def __init__(self, monkeypatch, *, is_held: bool) -> None:
        self.calls = []
        self.timers = []
        self.is_console_held = is_held
        self.watched = {}
        read_fd, self.typed = os.pipe()
        self.reader = SimpleNamespace(
            stdout=os.fdopen(read_fd, "rb", 0),
            kill=lambda: self.calls.append("kill"),
            wait=lambda: self.calls.append("wait"),
        )
        monkeypatch.setattr(subprocess, "Popen", self.start)
        loop = SimpleNamespace(
            call_later=lambda _delay_s, call: self.timers.append(call) or SimpleNamespace(cancel=self.timers.clear),
            watch_readable=self.watched.__setitem__,
            unwatch=self.watched.pop,
        )
        self.question = TerminalQuestion(loop, self, self.calls.append)

    def print_line(self, _line):
        self.calls.append("print")

    def hold_console(self):
        self.calls.append("hold")

    def release_console(self):
        self.calls.append("release")

    def start(self, *_args, start_new_session, **_more):
        assert start_new_session, "the agent's is in the background of its terminal, and must not read there"
        self.calls.append("start")
        return self.reader

    def close(self):
        os.close(self.typed)
        self.reader.stdout.close()


@pytest.fixture
def open_terminal(monkeypatch):
    opened = []

    def open_one(*, is_held=True):
        opened.append(Terminal(monkeypatch, is_held=is_held))
        return opened[-1]

    yield open_one
    for terminal in opened:
        terminal.close()


def test_what_was_typed_is_passed_on_when_the_console_is_free_again(open_terminal):
    terminal = open_terminal()
    terminal.question.ask()
    assert terminal.calls == ["print", "hold", "start"]
    os.write(terminal.typed, b"c\n")
    [read] = terminal.watched.values()
    read()
    assert terminal.calls[3:] == ["kill", "wait", "release", "c\n"]
    assert terminal.watched == {}


def test_nothing_is_read_before_the_console_is_held(open_terminal):
    """Workers' output would come between the question and its answer."""
    terminal = open_terminal(is_held=False)
    terminal.question.ask()
    assert terminal.calls == ["print", "hold"]
    terminal.is_console_held = True
    terminal.timers.pop()()
    assert terminal.calls == ["print", "hold", "start"]


def test_a_question_that_ends_before_the_console_is_held_reads_nothing(open_terminal):
    terminal = open_terminal(is_held=False)
    terminal.question.ask()
    terminal.question.close()
    assert terminal.timers == []
    assert terminal.calls == ["print", "hold", "release"]


def test_without_a_process_that_reads_it_says_so(open_terminal, monkeypatch):
    def fail(*_args, **_kwargs):
        raise BlockingIOError("no processes left")

    terminal = open_terminal()
    monkeypatch.setattr(subprocess, "Popen", fail)
    terminal.question.ask()
    assert terminal.calls == ["print", "hold", "release", None]
