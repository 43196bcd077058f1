"""Timers of the loop."""

import gc
import weakref

import pytest

from muster.agent.runtime.loop import Loop, Timer


class Peer:
    """Holds the timer that calls it back."""

    def __init__(self, loop: Loop) -> None:
        self.calls = 0
        self.timer: Timer = loop.call_later(0.0, self.call)

    def call(self) -> None:
        self.calls += 1


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_what_a_timer_calls_is_freed_at_once_when_it_is_over(is_cancelled: bool) -> None:
    loop = Loop()
    gc.disable()
    try:
        peer = Peer(loop)
        if is_cancelled:
            peer.timer.cancel()
        loop.turn(0.0)
        assert peer.calls == (not is_cancelled)
        freed = weakref.ref(peer)
        del peer
        assert freed() is None
    finally:
        gc.enable()
        loop.close()
