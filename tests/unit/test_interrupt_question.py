"""What follows each answer to the question at Ctrl-C."""

import subprocess
from types import SimpleNamespace

import pytest

from muster._contract import AskKind, AskOutcome
from muster.agent.control import question
from muster.agent.control.question import REQUEST, InterruptQuestion, Then, choose_next, parse_choice
from muster.agent.rendezvous.consensus.actions import Answer


@pytest.mark.parametrize(
    ("asked", "outcome", "then"),
    [
        (AskKind.PAUSE, AskOutcome.DONE, Then.PERSON),
        (AskKind.PAUSE, AskOutcome.REFUSED, Then.INTERRUPT),
        (AskKind.PAUSE, AskOutcome.LATE, Then.INTERRUPT),
        (AskKind.PAUSE, AskOutcome.LOST, Then.INTERRUPT),
        (AskKind.RESUME, AskOutcome.DONE, AskKind.STOP),
        (AskKind.RESUME, AskOutcome.REFUSED, AskKind.STOP),  # the pause has ended by itself
        (AskKind.STOP, AskOutcome.DONE, Then.END),
        (AskKind.STOP, AskOutcome.REFUSED, AskKind.CHECKPOINT),
        (AskKind.STOP, AskOutcome.LATE, Then.INTERRUPT),
        (AskKind.CHECKPOINT, AskOutcome.DONE, Then.INTERRUPT),
        (AskKind.CHECKPOINT, AskOutcome.REFUSED, Then.INTERRUPT),
    ],
)
def test_what_follows_an_answer(asked, outcome, then):
    assert choose_next(asked, outcome, continues=False) is then


@pytest.mark.parametrize("outcome", AskOutcome)
def test_a_job_that_is_to_continue_does(outcome):
    assert choose_next(AskKind.RESUME, outcome, continues=True) is Then.GO_ON


@pytest.mark.parametrize(
    ("typed", "choice"),
    [("\n", "y"), ("", "y"), ("Yes\n", "y"), ("n\n", "n"), (" NO ", "n"), ("c", "c"), ("continue\n", "c"), ("q", None)],
)
def test_what_was_typed(typed, choice):
    assert parse_choice(typed) == choice


def test_without_a_process_that_reads_ctrl_c_has_its_ordinary_effect(monkeypatch):
    def fail(*_args, **_kwargs):
        raise BlockingIOError("no processes left")

    monkeypatch.setattr(subprocess, "Popen", fail)
    monkeypatch.setattr(question.os, "isatty", lambda _fd: True)
    calls = []
    logs = SimpleNamespace(
        print_line=lambda _line: None,
        hold_console=lambda: calls.append("hold"),
        release_console=lambda: calls.append("release"),
        is_console_held=True,
    )
    asked = InterruptQuestion(
        None, logs, ask=lambda *request: calls.append(request[1]), interrupt=lambda: calls.append("interrupt")
    )
    assert asked.handle_interrupt(may_ask=True)
    asked.handle_answer((REQUEST,), Answer(outcome=AskOutcome.DONE, line="all ranks wait"))
    assert calls == [AskKind.PAUSE, "hold", "release", "interrupt"]
