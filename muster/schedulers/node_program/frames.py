"""What travels between a program on a node and the process here that stands for the node: frames, and their limits.

A frame is a kind, a length, a content, and a newline, because Slurm passes on whole lines only. Before its first frame
the program writes `MAGIC`: what a login prints before is noise.

The program arrives as a text, for any Python, and nothing of muster need be installed there: it imports this module and
its neighbours, which are sent with it, and the standard library.
"""

import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Final

from muster._shared.processes import READ, WRITE, wait_events

MAGIC: Final = b"\0muster-node\n"


class Kind:
    """What a frame is. OUT and ERR are the numbers of the streams."""

    ALIVE: Final = b"H"
    """Both ways, the second time as an answer."""

    ORDER, INPUT, CLOSED, SIGNAL, SIZE, HELLO, DONE = b"O", b"I", b"C", b"S", b"W", b"L", b"D"
    """What goes to the node. ORDER: JSON, what is to be done. INPUT: of the command, or of a file that is awaited.
    CLOSED: there is no more of it. SIGNAL: a name. SIZE: rows and columns of the terminal. HELLO: JSON, see `keeper`.
    DONE: it has the exit code."""

    READY, OUT, ERR, TAKEN, FILE, EXIT, FAILED = b"R", b"1", b"2", b"T", b"F", b"X", b"E"
    """What comes from it. READY: it runs. TAKEN: how many bytes of input have been used up. FILE: see `run_files`.
    EXIT: the exit code. FAILED: why nothing runs there, or not any more."""

    CLAIMED, WANTED, BUSY, REFUSED = b"K", b"N", b"B", b"U"
    """What comes from a node of a hold, see `held_run`."""


FRAME: Final = struct.Struct("!cI")
"""Kind, which is no newline, and the length of what follows."""
NUMBER: Final = struct.Struct("!I")
FRAME_LIMIT_BYTES: Final = 1 << 24
"""A longer frame ends the connection: the other side may be hostile."""
NOISE_LIMIT_BYTES: Final = 1 << 16
HOLD_DIR: Final = "{muster-hold}"
"""In commands and variables for a node of a hold: its holder's folder."""
LOST: Final = 255
"""Exit code of a link whose node is lost: it is not reached, or has not started the replica."""
STATE_NAME: Final = "link.json"
"""In the replica's folder: what the link keeps, and why the node was lost."""
LOST_S: Final = 40.0
"""After this long without a frame the other side is gone, where the order says nothing else."""
CHUNK_BYTES: Final = 1 << 16


class NodeError(Exception):
    """Nothing can run here. It is one line."""


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, however long that takes, also where another process has made the descriptor non-blocking.

    Raises:
        BrokenPipeError: its reader has gone.
    """
    while data:
        wait_events({fd: WRITE})
        data = data[os.write(fd, data) :]


def pack(kind: bytes, content: bytes = b"") -> bytes:
    """Return a frame."""
    return b"%b%b\n" % (FRAME.pack(kind, len(content)), content)


class FrameReader:
    """Cuts a stream of bytes into frames of at most `limit_bytes`."""

    def __init__(self, limit_bytes: int = FRAME_LIMIT_BYTES) -> None:
        self._rest = bytearray()
        self._limit_bytes = limit_bytes

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield (kind, content) of the frames that are complete; newlines between them are skipped.

        Raises:
            ConnectionError: a frame is too long.
        """
        rest = self._rest
        rest += data
        while True:
            while rest.startswith(b"\n"):
                del rest[0]
            if len(rest) < FRAME.size:
                return
            kind, length = FRAME.unpack_from(rest)
            if length > self._limit_bytes:
                raise ConnectionError(f"it sent a frame of {length} bytes: at most {self._limit_bytes} are allowed")
            end = FRAME.size + length
            if len(rest) < end:
                return
            content = bytes(rest[FRAME.size : end])
            del rest[:end]
            yield kind, content


class Channel:
    """Frames over two descriptors, which it makes non-blocking. Any thread may send, and one receives.

    Args:
        read_fd: frames come from here.
        write_fd: and go there.
        has_noise: `MAGIC` comes before the first frame.
        limit_bytes: of a frame that is received.
    """

    def __init__(
        self, read_fd: int, write_fd: int, *, has_noise: bool = False, limit_bytes: int = FRAME_LIMIT_BYTES
    ) -> None:
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
        self._read_fd, self._write_fd = read_fd, write_fd
        self._noise = b""
        self.has_begun = not has_noise
        self._frames = FrameReader(limit_bytes)
        self._lock = threading.RLock()
        self.pending = bytearray()
        """What could not be written yet."""
        self.is_broken = False
        """The other side reads no more, or this one has closed it."""
        self.heard_s = time.monotonic()

    @property
    def wanted(self) -> Mapping[int, int]:
        """What to wait for: `receive` and `flush` then have something to do."""
        wanted = {self._write_fd: WRITE} if self.pending else {}
        wanted[self._read_fd] = wanted.get(self._read_fd, 0) | READ
        return wanted

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Send a frame, now or when there is room."""
        self.write(pack(kind, content))

    def write(self, data: bytes) -> None:
        """Send bytes, now or when there is room."""
        with self._lock:
            if not self.is_broken:
                self.pending += data
                self.flush()

    def flush(self) -> None:
        """Send what is pending, as far as there is room."""
        with self._lock:
            try:
                while self.pending:
                    del self.pending[: os.write(self._write_fd, self.pending[:CHUNK_BYTES])]
            except BlockingIOError:
                return
            except OSError:
                self.close()

    def close(self) -> None:
        """Send nothing any more."""
        with self._lock:
            self.is_broken = True
            self.pending.clear()

    def receive(self) -> Iterator[tuple[bytes, bytes]] | None:
        """Return the frames that have come. None: no more will come.

        Raises:
            ConnectionError: when a frame is read that is too long.
        """
        try:
            data = os.read(self._read_fd, CHUNK_BYTES)
        except BlockingIOError:
            return iter(())
        except OSError:
            data = b""
        if not data:
            return None
        if not self.has_begun:
            self._noise, found, data = (self._noise + data).partition(MAGIC)
            if not found:
                return iter(()) if len(self._noise) <= NOISE_LIMIT_BYTES else None
            self.has_begun = True
        return self.feed(data)

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Return the frames in bytes that were received otherwise."""
        self.heard_s = time.monotonic()
        return self._frames.feed(data)
