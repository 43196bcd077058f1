"""The head start of global rank 0's warm worker: it runs alone until its store listens or a short limit has passed.

A worker that connects to the store too early is refused, and torch's client then sleeps for 0.25 to 0.75 s: many times
what a warm restart takes. Forked workers reach that point within the same few milliseconds: without a head start about
every second restart lost that time (torch 2.13, two cores).
"""

import socket
from collections.abc import Callable

from muster.agent.runtime.loop import Loop

POLL_INTERVAL_S = 0.001
LIMIT_S = 0.1
"""The longest head start. A program that opens no store, or opens it late, loses no more than that; one that opens it
late still opens it in the right order if its ranks differ by less."""


def is_listening(port: int) -> bool:
    """True when a process on this machine listens on the TCP port, or when that cannot be found out.

    Binds the same address with SO_REUSEADDR: the kernel refuses it next to a listener, but not next to a socket that
    only holds the port (`ports.PortReservation`). A process that binds without SO_REUSEADDR, which TCPStore never
    does, could be refused during these microseconds. Listeners for IPv6 alone are not seen.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError:
        return True
    return False


class HeadStart:
    """Runs from its construction until it calls back or is closed."""

    def __init__(self, loop: Loop, port: int, on_end: Callable[[], None]) -> None:
        """Start polling.

        Args:
            loop: the agent's.
            port: where the worker with the head start will listen.
            on_end: called once on the loop, when it listens or LIMIT_S have passed; never before this returns.
        """
        self._loop = loop
        self._port = port
        self._on_end = on_end
        self._until_s = loop.clock.now_s() + LIMIT_S
        self._timer = loop.call_later(POLL_INTERVAL_S, self._poll)

    def _poll(self) -> None:
        if self._loop.clock.now_s() >= self._until_s or is_listening(self._port):
            self._on_end()
        else:
            self._timer = self._loop.call_later(POLL_INTERVAL_S, self._poll)

    def close(self) -> None:
        """Stop without calling back. Idempotent."""
        self._timer.cancel()
