"""What one of torch's handlers finds after its rendezvous has been closed: it may block for as long as it likes."""

import os
from collections.abc import Iterator

import pytest

from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.interface import Notice, RendezvousEvent
from muster.agent.rendezvous.torch_handlers.messages import Command
from muster.agent.rendezvous.torch_handlers.rendezvous import TorchRendezvous
from muster.agent.runtime.loop import Loop

FOUND = Notice(text="found")


class FakeThread:
    """Does nothing."""

    def start(self) -> None:
        """Nothing."""

    def send_command(self, command: Command) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def posted() -> list[RendezvousEvent]:
    return []


@pytest.fixture
def rendezvous(loop: Loop, posted: list[RendezvousEvent]) -> Iterator[TorchRendezvous]:
    config = RendezvousConfig(
        backend="c10d-torch", run_id="run", host="localhost", port=1, node_index=0, min_nodes=1, max_nodes=1
    )
    rendezvous = TorchRendezvous(config, loop=loop, post=posted.append, make_thread=lambda _owner: FakeThread())
    yield rendezvous
    rendezvous.close()


def test_a_finding_is_handled_on_the_loop(
    loop: Loop, rendezvous: TorchRendezvous, posted: list[RendezvousEvent]
) -> None:
    rendezvous.post_finding(FOUND)
    assert posted == []
    loop.turn()
    assert posted == [Notice(text="found")]


def test_a_late_finding_is_written_to_no_descriptor_that_was_opened_since(
    loop: Loop, rendezvous: TorchRendezvous, posted: list[RendezvousEvent]
) -> None:
    rendezvous.close()
    pipes = [os.pipe() for _ in range(8)]  # they get the lowest numbers that are free
    try:
        rendezvous.post_finding(FOUND)
        loop.turn()
        for read_fd, _ in pipes:
            os.set_blocking(read_fd, False)
            with pytest.raises(BlockingIOError):
                os.read(read_fd, 1)
    finally:
        for fd in (fd for pipe in pipes for fd in pipe):
            os.close(fd)
    assert posted == []
