"""A request that creates something is waited for, also when a signal interrupts it."""

import signal
import threading

import pytest

from muster.schedulers.docker.sdk import complete


def test_an_interrupt_is_raised_when_the_engine_has_answered():
    created = []

    def create():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        threading.Event().wait(0.1)  # the main thread has its KeyboardInterrupt by now
        created.append("c")

    with pytest.raises(KeyboardInterrupt):
        complete(create)
    assert created == ["c"]


def test_the_engines_answer_is_the_callers():
    assert complete(lambda: "c") == "c"
    with pytest.raises(ZeroDivisionError):
        complete(lambda: 1 // 0)
