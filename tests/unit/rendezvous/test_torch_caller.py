"""A handler of the program that drives the agent: what happens while that program does not read its socket."""

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from doubles.rendezvous_links import StandingClock
from doubles.samples import make_failure

from muster.agent.control_socket import ControlSink
from muster.agent.rendezvous.interface import Notice
from muster.agent.rendezvous.torch_handlers.caller import LATE_S, CallerThread
from muster.agent.rendezvous.torch_handlers.messages import COMMANDS, Command, Order, ThreadFinding
from muster.agent.runtime.loop import Loop

LONG = "x" * 200_000


class Program:
    """The other end: reads when the test says so. Keeps what the agent's end finds."""

    def __init__(self) -> None:
        self.clock = StandingClock()
        self.loop = Loop(self.clock)
        self.socket, self.agents = socket.socketpair()
        self.socket.setblocking(False)
        self.found: list[ThreadFinding] = []
        self.thread = CallerThread(self.agents.fileno(), self.loop, self)
        self.thread.start()

    def post_finding(self, finding: ThreadFinding) -> None:
        self.found.append(finding)

    def fill_socket(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self.agents.send(b'{"record":"cut off', socket.MSG_DONTWAIT)

    def read_orders(self) -> list[Order]:
        """Read all that comes until nothing is left to send, as `muster.elastic` reads it."""
        data = b""
        for _ in range(100):
            try:
                data += self.socket.recv(4096)
            except BlockingIOError:
                self.loop.turn(0)
        commands = [COMMANDS.read(one["rendezvous"]) for one in map(read_object, data.split(b"\n")) if one]
        return [command.order for command in commands if command is not None]

    def close(self) -> None:
        self.thread.stop()
        for each in (self.socket, self.agents, self.loop):
            each.close()


def read_object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and "rendezvous" in found else {}


@pytest.fixture
def program() -> Iterator[Program]:
    made = Program()
    yield made
    made.close()


def test_commands_arrive_in_order_once_the_program_reads(program: Program) -> None:
    program.fill_socket()
    for order in (Order.PAUSE, Order.NEXT, Order.DONE):
        program.thread.send_command(Command(order=order))
    assert program.read_orders() == [Order.PAUSE, Order.NEXT, Order.DONE]
    program.thread.send_command(Command(order=Order.AWAIT_END))
    assert program.read_orders() == [Order.AWAIT_END]


def test_a_record_between_two_parts_of_a_command_does_not_break_it(program: Program) -> None:
    """The event log writes to the same socket when it can."""
    program.agents.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least: no command fits
    program.thread.send_command(Command(order=Order.FAIL, reason="x" * 8000, root=None))
    sink = ControlSink(program.agents.fileno())
    program.agents.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
    sink._rest = b'{"record":{}}\n'
    sink._send()
    sink.close()
    assert program.read_orders() == [Order.FAIL]


def test_the_longest_command_fits(program: Program) -> None:
    program.fill_socket()
    root = make_failure(exception=LONG, traceback=LONG, stderr_tail=(LONG,) * 64)
    program.thread.send_command(Command(order=Order.FAIL, reason=LONG, root=root))
    assert program.read_orders() == [Order.FAIL]


def test_one_line_says_that_the_program_does_not_read(program: Program) -> None:
    program.fill_socket()
    program.thread.send_command(Command(order=Order.DONE))
    program.thread.send_command(Command(order=Order.NEXT))
    program.clock.passed_s = LATE_S - 0.1
    program.loop.turn(0)
    assert program.found == []
    program.clock.passed_s = 5 * LATE_S
    program.loop.turn(0)
    (notice,) = program.found
    assert isinstance(notice, Notice)
    assert "nothing for 10 s" in notice.text


def test_no_line_when_it_reads_in_time(program: Program) -> None:
    program.fill_socket()
    program.thread.send_command(Command(order=Order.DONE))
    assert program.read_orders() == [Order.DONE]
    program.clock.passed_s = 5 * LATE_S
    program.loop.turn(0)
    assert program.found == []


def test_a_program_that_has_ended_needs_no_commands(program: Program) -> None:
    program.fill_socket()
    program.thread.send_command(Command(order=Order.NEXT))
    program.socket.close()
    program.loop.turn(0)
    program.thread.send_command(Command(order=Order.DONE))
    program.clock.passed_s = 5 * LATE_S
    program.loop.turn(0)
    assert program.found == []
