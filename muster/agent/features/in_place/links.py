"""Connections from the agent to processes whose script can take part in several rounds."""

import os
import socket
import struct
from typing import Final

from muster._shared.records import record

_PEER: Final = struct.Struct("3i")


@record
class Link:
    """A connection to a process whose script can take part in several rounds."""

    pid: int
    socket: socket.socket


def connect(pid: int) -> Link | None:
    """Connect to a process that listens; None if it does not (yet), or if another process has taken its name."""
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        one.setblocking(False)
        one.connect(f"\0muster-{pid}")
        peer, uid, _gid = _PEER.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if (peer, uid) == (pid, os.geteuid()):
            return Link(pid=pid, socket=one)
    except OSError:
        pass
    one.close()
    return None
