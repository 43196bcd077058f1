"""Addresses: names to numbers without blocking the loop, what is local, and a port nobody can take away.

Whether an address is ours is found out by binding it, never by comparing host names: a machine's own idea of its name
and what the resolver says of it agree too rarely.
"""

import os
import socket
from collections import deque
from collections.abc import Callable

from muster.agent.runtime.loop import Loop

Address = tuple[int, str]
"""Address family and numeric host."""


def parse_numeric(host: str) -> Address | None:
    """The address that a numeric host already is."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host.partition("%")[0])
        except (OSError, ValueError):
            continue
        return family, host
    return None


def resolve(host: str) -> list[Address]:
    """All addresses of a host, in the resolver's order. May block for seconds.

    Raises:
        OSError: the name does not resolve.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((int(family), str(address[0])) for family, _, _, _, address in found))


def is_bindable(address: Address) -> bool:
    """True when the address belongs to this machine."""
    family, host = address
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine can reach, and for the name localhost."""
    return host in {"localhost", "::1"} or host.startswith("127.")


def normalise(host: str) -> str:
    """An address as people write it: IPv4 that came through an IPv6 socket loses its prefix."""
    return host.removeprefix("::ffff:") if "." in host else host


class FixedPort:
    """A MASTER_PORT that the caller named. It is not held: where it is, the agents themselves meet between rounds."""

    def __init__(self, port: int) -> None:
        self.port = port

    def close(self) -> None:
        """Nothing to give back."""


class Resolver:
    """Resolves names in short-lived threads, so that a slow name server cannot delay a heartbeat. Close it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._answers: deque[tuple[Callable[[list[Address]], None], list[Address]]] = deque()
        self._read_fd = self._write_fd = -1

    def resolve(self, host: str, on_answer: Callable[[list[Address]], None]) -> None:
        """Call back on the loop with the addresses, none when the name does not resolve (yet)."""
        numeric = parse_numeric(host)
        if numeric is not None:
            self._loop.call_soon(lambda: on_answer([numeric]))
        elif host == "localhost":
            loopback: list[Address] = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
            self._loop.call_soon(lambda: on_answer(loopback))
        else:
            self._start(host, on_answer)

    def _start(self, host: str, on_answer: Callable[[list[Address]], None]) -> None:
        import threading  # only where a name is given

        if self._read_fd < 0:
            self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self._loop.watch_readable(self._read_fd, self._drain)
        # The thread gets its own copy of the write end: it may answer after this resolver was closed.
        answer_fd = os.dup(self._write_fd)
        threading.Thread(target=self._work, args=(host, on_answer, answer_fd), daemon=True, name="resolve").start()

    def _work(self, host: str, on_answer: Callable[[list[Address]], None], answer_fd: int) -> None:
        try:
            found = resolve(host)
        except (OSError, UnicodeError):
            found = []
        self._answers.append((on_answer, found))
        try:
            os.write(answer_fd, b"\0")
        except OSError:
            self._answers.clear()  # closed meanwhile: nobody waits
        finally:
            os.close(answer_fd)

    def _drain(self) -> None:
        try:
            os.read(self._read_fd, 4096)
        except BlockingIOError:
            return
        while self._answers:
            on_answer, found = self._answers.popleft()
            on_answer(found)

    def close(self) -> None:
        """Stop listening for answers. Idempotent."""
        if self._read_fd >= 0:
            self._loop.unwatch(self._read_fd)
            os.close(self._read_fd)
            os.close(self._write_fd)
            self._read_fd = self._write_fd = -1
