"""Where the agents of a job listen for requests, and how a request is signed."""

import hmac
import os
import socket
from typing import Annotated

from muster._shared.contract import AskKind
from muster._shared.fields import Limit, Range
from muster._shared.holder_socket import read_peer
from muster._shared.records import record

LEAST_LIMIT_S = 1.0
MOST_LIMIT_S = 86400.0
LINE_LIMIT_BYTES = 4096
"""Limit on a greeting or a request."""

_PREFIX = "muster-control-"
_SOCKETS = "/proc/net/unix"

LimitSeconds = Annotated[float, Range(least=LEAST_LIMIT_S, most=MOST_LIMIT_S)]
_Hex = Annotated[str, Limit(most=128)]


@record
class Greeting:
    """The agent's first line."""

    nonce: _Hex


@record
class SignedRequest:
    """The answer to the greeting: a person's request."""

    kind: AskKind
    limit_s: LimitSeconds
    """How long the ranks may take to do what is asked."""
    signature: _Hex


def build_address(token: str, pid: int) -> bytes:
    """Build the abstract name of one agent's socket, which takes at most 73 of the 107 bytes of a name."""
    salt = os.urandom(8).hex()
    return f"\0{_PREFIX}{salt}-{_compute_mac(token, salt)}-{pid}".encode()


def list_addresses(token: str) -> list[bytes]:
    """Return the sockets of the job's agents on this machine, or in this container.

    Return none on systems without abstract names. Any user can make sockets whose names have blanks and line feeds, and
    so any line of the list. A line that ends like a name of ours is tried, and its agent must prove itself.
    """
    try:
        with open(_SOCKETS, encoding="utf-8", errors="replace", newline="\n") as file:
            names = {words[-1] for words in map(str.split, file) if words}
    except OSError:  # no such file, or hidden
        return []
    return [b"\0" + name[1:].encode() for name in sorted(names) if _is_named(name, token)]


def _is_named(name: str, token: str) -> bool:
    """Return whether an agent with this token has made the name.

    Each name has its own salt, which hides equal tokens.
    """
    salt, _, rest = name.removeprefix(f"@{_PREFIX}").partition("-")
    return name.startswith(f"@{_PREFIX}") and rest.startswith(f"{_compute_mac(token, salt)}-")


def _compute_mac(token: str, salt: str) -> str:
    return hmac.new(token.encode(), f"address {salt}".encode(), "sha256").hexdigest()[:32]


def sign(token: str, nonce: str, kind: AskKind, limit_s: float) -> str:
    """Return the signature of a request."""
    return hmac.new(token.encode(), f"{nonce} {kind.value} {limit_s!r}".encode(), "sha256").hexdigest()


def is_same_user(peer: socket.socket) -> bool:
    """Return whether the other process belongs to this user or to root. Source: unix(7), SO_PEERCRED."""
    return read_peer(peer) in (os.geteuid(), 0)
