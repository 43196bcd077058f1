"""Where the agents of a job listen for requests, and how a request is signed."""

import hmac
import os
import socket
import struct
from typing import Annotated

from muster._contract import AskKind
from muster.agent.runtime.fields import Limit, Range
from muster.agent.runtime.records import record

LEAST_LIMIT_S = 1.0
MOST_LIMIT_S = 86400.0
LINE_LIMIT_BYTES = 4096
"""Of a greeting or a request."""

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
    """The answer to it: what a person asks for."""

    kind: AskKind
    limit_s: LimitSeconds
    """How long the ranks may take."""
    signature: _Hex


def build_address(token: str, pid: int) -> bytes:
    """The abstract name of the socket of one agent; 56 bytes at most of the 107 that a name may have."""
    return f"\0{_build_prefix(token)}{pid}".encode()


def list_addresses(token: str) -> list[bytes]:
    """The sockets of the job's agents on this machine, or in this container; none where sockets have no abstract names.

    Source: proc(5), /proc/net/unix.
    """
    prefix = f"@{_build_prefix(token)}"
    try:
        with open(_SOCKETS, encoding="utf-8", errors="replace") as file:
            names = {line.split()[-1] for line in file}
    except OSError:  # another system, or one that hides it
        return []
    return [b"\0" + name[1:].encode() for name in sorted(names) if name.startswith(prefix)]


def _build_prefix(token: str) -> str:
    """The same for all agents of a job; it says nothing of the token."""
    return f"{_PREFIX}{hmac.new(token.encode(), b'address', 'sha256').hexdigest()[:32]}-"


def sign(token: str, nonce: str, kind: AskKind, limit_s: float) -> str:
    """The signature of a request."""
    return hmac.new(token.encode(), f"{nonce} {kind.value} {limit_s!r}".encode(), "sha256").hexdigest()


def is_same_user(peer: socket.socket) -> bool:
    """Whether the other process belongs to this user, or to root. Source: unix(7), SO_PEERCRED."""
    size = struct.calcsize("3i")
    _pid, uid, _gid = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return uid in (os.geteuid(), 0)
