"""Addresses: resolve names without blocking the loop, and check which are local.

An address is local if it can be bound. Host names are never compared: a machine's own name for itself and the
resolver's agree too rarely.
"""

import os
import socket
from collections import deque
from collections.abc import Callable

from muster._shared.records import record
from muster.agent.rendezvous.transport.links import Cause, LinkEnd
from muster.agent.runtime.loop import Loop

Address = tuple[int, str]
"""Address family and numeric host."""


def parse_numeric(host: str) -> Address | None:
    """The address of a numeric host; None for a name."""
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
    """An address as people write it: IPv4 through an IPv6 socket loses its prefix."""
    return host.removeprefix("::ffff:") if "." in host else host


class FixedPort:
    """A MASTER_PORT that the caller named. It is not reserved: between rounds the agents themselves listen there."""

    def __init__(self, port: int) -> None:
        self.port = port

    def close(self) -> None:
        """Do nothing: nothing is reserved."""


@record
class Resolved:
    """The addresses of a host, or why there are none."""

    addresses: tuple[Address, ...] = ()
    failure: LinkEnd | None = None


OnAnswer = Callable[[Resolved], None]
LOOPBACK: tuple[Address, ...] = ((int(socket.AF_INET), "127.0.0.1"), (int(socket.AF_INET6), "::1"))
"""What localhost means."""


class Resolver:
    """Resolves names in short-lived threads, so that a slow name server cannot delay a heartbeat. Close it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._answers: deque[tuple[OnAnswer, Resolved]] = deque()
        self._read_fd = self._write_fd = -1

    def resolve(self, host: str, on_answer: OnAnswer) -> None:
        """Call `on_answer` on the loop, always."""
        numeric = parse_numeric(host)
        if numeric is not None:
            self._loop.call_soon(lambda: on_answer(Resolved(addresses=(numeric,))))
        elif host == "localhost":
            self._loop.call_soon(lambda: on_answer(Resolved(addresses=LOOPBACK)))
        else:
            try:
                self._start_thread(host, on_answer)
            except (OSError, RuntimeError) as error:  # no descriptor, or no thread, is left
                failed = _build_fault(host, error)
                self._loop.call_soon(lambda: on_answer(failed))

    def _start_thread(self, host: str, on_answer: OnAnswer) -> None:
        import threading  # only where a name is given

        if self._read_fd < 0:
            self._read_fd, self._write_fd = os.pipe()  # pipe2 is Linux's alone
            os.set_blocking(self._read_fd, False)
            os.set_blocking(self._write_fd, False)
            self._loop.watch_readable(self._read_fd, self._deliver_answers)
        # The thread gets its own copy of the write end: it may answer after this resolver has closed.
        answer_fd = os.dup(self._write_fd)
        thread = threading.Thread(target=self._run, args=(host, on_answer, answer_fd), daemon=True, name="resolve")
        try:
            thread.start()
        except RuntimeError:
            os.close(answer_fd)
            raise

    def _run(self, host: str, on_answer: OnAnswer, answer_fd: int) -> None:
        try:
            resolved = Resolved(addresses=tuple(resolve(host)))
        except (OSError, UnicodeError):
            resolved = Resolved(failure=LinkEnd(reason="the host name does not resolve"))
        except Exception as error:  # noqa: BLE001 (the loop must learn of it: a thread's error is lost)
            resolved = _build_fault(host, error)
        self._answers.append((on_answer, resolved))
        try:
            os.write(answer_fd, b"\0")
        except OSError:
            self._answers.clear()  # closed meanwhile: no answer is wanted
        finally:
            os.close(answer_fd)

    def _deliver_answers(self) -> None:
        try:
            os.read(self._read_fd, 4096)
        except BlockingIOError:
            return
        while self._answers:
            on_answer, resolved = self._answers.popleft()
            on_answer(resolved)

    def close(self) -> None:
        """Drop answers that are still to come. Idempotent."""
        if self._read_fd >= 0:
            self._loop.unwatch(self._read_fd)
            os.close(self._read_fd)
            os.close(self._write_fd)
            self._read_fd = self._write_fd = -1


def _build_fault(host: str, error: Exception) -> Resolved:
    reason = f"cannot resolve {host!r}: {type(error).__name__}: {error}"
    return Resolved(failure=LinkEnd(reason=reason, cause=Cause.FAULT))
