"""What the template answers when it cannot fork: it never ends of it, because the job would start cold from then on."""

import errno
import os
import socket

import pytest

from muster.agent.workers.warm import forking


@pytest.fixture
def no_descriptors(monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(forking.fork_safety, "find_hazard_now", lambda: None)
    monkeypatch.setattr(os, "pipe", fail)
    monkeypatch.setattr(socket, "socketpair", fail)


@pytest.mark.usefixtures("no_descriptors")
def test_without_descriptors_for_the_pipes_the_request_is_answered():
    answer = forking.fork_batch([], os.getpid())
    assert answer == {"asked": 0, "forked": [], "error": "cannot fork: Too many open files", "duration_s": 0.0}


@pytest.mark.usefixtures("no_descriptors")
def test_without_descriptors_nothing_is_forked_ahead():
    with socket.socket(socket.AF_UNIX) as control:
        assert forking._fork_ahead(control, os.getpid()) is None
