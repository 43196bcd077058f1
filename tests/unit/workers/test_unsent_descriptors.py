"""Descriptors that cannot be sent to a forked process, or do not arrive: the agent learns of it and waits for nothing.

The kernel limits how many descriptors the processes of one user may have under way (ETOOMANYREFS), and how many a
process may have open.
"""

import errno
import os
import socket
from collections import deque

import pytest

from muster.agent.errors import SpawnError
from muster.agent.workers.spec import Program, ProgramKind, WorkerSpec
from muster.agent.workers.warm.forking import wait_for_release
from muster.agent.workers.warm.store_handle import StoreHandle
from muster.agent.workers.warm.template_handle import TemplateHandle, release_worker

TOO_MANY = "Too many references: cannot splice"
SPEC = WorkerSpec(local_rank=0, program=Program(kind=ProgramKind.SCRIPT, target="main.py"), env={})


class EndedError(Exception):
    """In place of `os._exit`."""


@pytest.fixture
def sending_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ETOOMANYREFS, TOO_MANY)

    monkeypatch.setattr(socket, "send_fds", fail)


@pytest.fixture
def pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def build_handle(control: socket.socket) -> TemplateHandle:
    handle = object.__new__(TemplateHandle)
    handle._control, handle.pending_sockets = control, []
    return handle


@pytest.mark.usefixtures("sending_fails")
def test_a_request_that_cannot_be_sent_is_not_waited_for(pair: tuple[socket.socket, socket.socket]) -> None:
    handle = build_handle(pair[0])
    assert f"for 2 workers: {TOO_MANY}" in handle.request_forks(2)
    assert handle.pending_sockets == []


def test_a_template_that_is_dying_is_left_to_its_end(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].close()
    handle = build_handle(pair[0])
    assert (handle.request_forks(2), handle.pending_sockets) == (None, [])


@pytest.mark.usefixtures("sending_fails")
def test_a_release_that_cannot_be_sent_starts_the_worker_otherwise(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(SpawnError, match=TOO_MANY):
        release_worker(pair[0], SPEC)
    assert pair[1].recv(1) == b""  # the parked worker ends


@pytest.mark.usefixtures("sending_fails")
def test_a_store_whose_socket_cannot_be_sent_leaves_no_process_waiting(pair) -> None:
    handle = object.__new__(StoreHandle)
    handle._listener = pair[0]
    control, parked = socket.socketpair()
    with parked, pytest.raises(OSError, match=TOO_MANY):
        handle.hand_over(control, 1)
    with parked:
        assert control.fileno() < 0


@pytest.mark.parametrize(
    ("message", "count", "code"),
    [(b"", 0, 0), (b"!", 1, 1), (b"!", 2, 1), (b"host", 0, 1)],
    ids=["not needed", "one of three", "two of three", "no socket of the store"],
)
def test_a_worker_that_does_not_get_its_descriptors_has_failed(message, count, code, pair, monkeypatch) -> None:
    """It was released, but has run no line of the program: that is no success."""
    codes: deque[int] = deque()

    def end(status: int) -> None:
        codes.append(status)
        raise EndedError

    monkeypatch.setattr(os, "_exit", end)
    agent, parked = pair
    if message:
        socket.send_fds(agent, [message], [1] * count)
    agent.shutdown(socket.SHUT_WR)
    with pytest.raises(EndedError):
        wait_for_release(parked, lambda _words: None)
    assert list(codes) == [code]


def test_a_worker_with_its_descriptors_is_released(pair: tuple[socket.socket, socket.socket]) -> None:
    agent, parked = pair
    spec_fd = release_worker(agent, SPEC)
    assert spec_fd is not None
    spec = wait_for_release(parked, lambda _words: None)
    assert spec.program.target == "main.py"
    for fd in (spec_fd, spec.stdout_fd, spec.stderr_fd):
        os.close(fd)
