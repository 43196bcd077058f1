"""Global rank 0's warm worker runs before all others, until its store listens or a moment has passed.

A worker that looks for the store too early is refused, and torch's client then sleeps for a quarter to three quarters
of a second: many times what a warm restart takes. Forked workers reach that point within the same few milliseconds, so
that without a head start about every second restart lost that time (torch 2.13, two cores).
"""

import socket
from collections.abc import Callable

from muster.agent.runtime.loop import Loop

POLL_S = 0.001
LIMIT_S = 0.1
"""The longest head start. A program that opens no store, or opens it late, loses no more than that; and the late one
opens it in the right order if its ranks differ by less."""


def is_listening(port: int) -> bool:
    """True when somebody on this machine listens on the TCP port, or when that cannot be found out.

    Asks the kernel for the same address with SO_REUSEADDR: it is refused next to a listener, not next to those who only
    hold the port (`addresses.PortReservation`), nor do they stop one another. One who binds without SO_REUSEADDR, as
    TCPStore never does, could be refused in the microseconds of the question. Listeners for IPv6 alone are not seen.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError:
        return True
    return False


class HeadStart:
    """Under way from its making until it calls back, or `close`."""

    def __init__(self, loop: Loop, port: int, on_over: Callable[[], None]) -> None:
        """Begin.

        Args:
            loop: the agent's.
            port: where the one in front will listen.
            on_over: called once on the loop, when it does or LIMIT_S have passed; never before this returns.
        """
        self._loop = loop
        self._port = port
        self._on_over = on_over
        self._until_s = loop.clock.now_s() + LIMIT_S
        self._timer = loop.call_later(POLL_S, self._look)

    def _look(self) -> None:
        if self._loop.clock.now_s() >= self._until_s or is_listening(self._port):
            self._on_over()
        else:
            self._timer = self._loop.call_later(POLL_S, self._look)

    def close(self) -> None:
        """There is nobody left to wait. Idempotent."""
        self._timer.cancel()
