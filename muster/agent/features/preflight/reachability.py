"""Whether this node can connect to MASTER_ADDR. It may block."""

import errno
import os
import socket
import time

from muster.agent.runtime.ports import encode_host

_EACH_S = 3.0
_PAUSE_S = 0.5
_OTHER_PORT = 1
"""tcpmux's port, on which hardly any machine listens. If it refuses a connection, the host was reached."""
_OTHER_S = 1.0


def find_obstacle(host: str, port: int, limit_s: float) -> str | None:
    """Return why no address of the host answers within the limit; None if one does, even by refusing.

    Whether a process listens on the port does not matter, because a cold start's store begins later. A network may fail
    for a moment, so this tries again until the limit.

    Another port of the host is tried first, because the program of rank 0 may count connections to its own port. If a
    firewall drops packets for the other port, the program's port is tried as well.
    """
    until_s = time.monotonic() + limit_s
    while True:
        if _try_once(host, _OTHER_PORT, min(_OTHER_S, limit_s)) is None:
            return None
        obstacle = _try_once(host, port, min(_EACH_S, max(0.1, until_s - time.monotonic())))
        if obstacle is None or time.monotonic() + _PAUSE_S >= until_s:
            return obstacle
        time.sleep(_PAUSE_S)


def _try_once(host: str, port: int, limit_s: float) -> str | None:
    try:
        addresses = socket.getaddrinfo(encode_host(host), port, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"its name is not resolved: {error.strerror or error}"
    obstacle = "it has no address"
    for family, kind, proto, _, address in addresses:
        with socket.socket(family, kind, proto) as probe:
            probe.settimeout(limit_s / len(addresses))
            code = probe.connect_ex(address)
        if code in (0, errno.ECONNREFUSED, errno.ECONNRESET):
            return None
        obstacle = "no answer" if code in (errno.EAGAIN, errno.ETIMEDOUT) else os.strerror(code)
    return obstacle
