"""How a holder is reached: its socket, in a folder that only this user can enter.

Both sides check that the other is the same user's. It is also sent to nodes, as a part of a program.
"""

import contextlib
import os
import socket
import struct

SOCKET = "socket"
"""In the holder's folder."""


def connect(folder: str) -> socket.socket:
    """Connect to the holder of a folder, by a path of any length.

    Raises:
        OSError: there is none (any more).
        PermissionError: another user's process answers, and it gets no secrets.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            made.connect(f"/proc/self/fd/{fd}/{SOCKET}")
        finally:
            os.close(fd)
        if read_peer(made) != os.geteuid():
            raise PermissionError(1, "another user's process answers")
    except OSError:
        made.close()
        raise
    return made


def read_peer(connection: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    _pid, uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def listen(folder: str) -> socket.socket:
    """Listen in a folder. What listened there before is not reachable any more."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET, dir_fd=fd)
        made.bind(f"/proc/self/fd/{fd}/{SOCKET}")
    finally:
        os.close(fd)
    made.listen(64)
    made.setblocking(False)
    return made
