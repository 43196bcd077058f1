"""Addresses: resolve names without blocking the loop, and check which are local.

An address is local if it can be bound. Host names are never compared: a machine's own name for itself and the
resolver's agree too rarely.
"""

import socket
from collections.abc import Callable

from muster._shared.records import record
from muster.agent.rendezvous.transport.links import Cause, LinkEnd
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.ports import encode_host

Address = tuple[int, str]
"""Address family and numeric host."""


def parse_numeric(host: str) -> Address | None:
    """Return the address of a numeric host; None for a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host.partition("%")[0])
        except (OSError, ValueError):
            continue
        return family, host
    return None


def resolve(host: str) -> list[Address]:
    """Return all addresses of a host, in the resolver's order. This may block for seconds.

    Raises:
        OSError: the name does not resolve.
    """
    found = socket.getaddrinfo(encode_host(host), None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((int(family), str(address[0])) for family, _, _, _, address in found))


def is_bindable(address: Address) -> bool:
    """Return whether the address belongs to this machine."""
    family, host = address
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether the address is localhost, or only this machine can reach it."""
    return host in {"localhost", "::1"} or host.startswith("127.")


def normalise(host: str) -> str:
    """Return an address as people write it: without the prefix of IPv4 through an IPv6 socket."""
    return host.removeprefix("::ffff:") if "." in host else host


class FixedPort:
    """A MASTER_PORT that the caller named.

    It is not reserved, because between rounds the agents themselves listen there.
    """

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
"""The addresses of localhost."""


class Resolver:
    """Resolves in short-lived threads, so that a slow name server cannot delay a heartbeat. Close it."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._is_closed = False

    def resolve(self, host: str, on_answer: OnAnswer) -> None:
        """Call `on_answer` on the loop, always."""
        numeric = parse_numeric(host)
        if numeric is not None:
            self._loop.call_soon(lambda: on_answer(Resolved(addresses=(numeric,))))
        elif host == "localhost":
            self._loop.call_soon(lambda: on_answer(Resolved(addresses=LOOPBACK)))
        else:
            self._loop.call_in_thread(
                lambda: _resolve_name(host),
                lambda resolved: None if self._is_closed else on_answer(resolved),
                lambda error: _build_fault(host, error),
            )

    def close(self) -> None:
        """Drop answers that are still to come. Idempotent."""
        self._is_closed = True


def _resolve_name(host: str) -> Resolved:
    try:
        return Resolved(addresses=tuple(resolve(host)))
    except (OSError, UnicodeError):
        return Resolved(failure=LinkEnd(reason="the host name does not resolve"))
    except Exception as error:  # noqa: BLE001  # whatever a plug-in of the name service raises: it becomes a line
        return _build_fault(host, error)


def _build_fault(host: str, error: Exception) -> Resolved:
    reason = f"cannot resolve {host!r}: {type(error).__name__}: {error}"
    return Resolved(failure=LinkEnd(reason=reason, cause=Cause.FAULT))
