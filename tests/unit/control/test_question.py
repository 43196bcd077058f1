"""The question at the terminal, when nothing can be typed."""

import subprocess
from types import SimpleNamespace

from muster.agent.control.question import TerminalQuestion


def test_without_a_process_that_reads_it_says_so(monkeypatch):
    def fail(*_args, **_kwargs):
        raise BlockingIOError("no processes left")

    monkeypatch.setattr(subprocess, "Popen", fail)
    calls = []
    logs = SimpleNamespace(
        print_line=lambda _line: None,
        hold_console=lambda: calls.append("hold"),
        release_console=lambda: calls.append("release"),
        is_console_held=True,
    )
    question = TerminalQuestion(None, logs, calls.append)
    question.ask()
    assert calls == ["hold", "release", None]
