"""What a program that runs on a node, and the process here that stands for the node, have in common.

`OutputPipes` reads the output of a command, there and here.

The program arrives as a text, for any Python, and nothing of muster need be installed there: it imports this module,
which goes before it, and the standard library.
"""

import contextlib
import fcntl
import os
import select
import struct
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

FRAME = struct.Struct("!cI")
"""Kind, which is no newline, and the length of what follows."""
GROWING = ("events.jsonl",)
REPLACED = ("status.json", "report.json", "checkpoint.json")
"""Files of an agent's run that are copied; `_shared.contract.LogNames`."""
ERROR_NAME = "error.json"
_PROGRAM = """\
import sys, types
sys.modules[{name!r}] = types.ModuleType({name!r})
exec({own!r}, sys.modules[{name!r}].__dict__)
{source}
{call}
"""


@cache
def build_program(path: str, call: str) -> str:
    """Return the source of a program with this module.

    Args:
        path: of the program.
        call: its last line.
    """
    own, source = Path(__file__).read_text(), Path(path).read_text()
    return _PROGRAM.format(name=__name__, own=own, source=source, call=call)


def pack(kind: bytes, content: bytes = b"") -> bytes:
    """Return a frame."""
    return FRAME.pack(kind, len(content)) + content


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield (kind, content) of the frames that are complete; newlines between them are skipped."""
        self._rest += data
        while len(rest := self._rest.lstrip(b"\n")) >= FRAME.size:
            kind, length = FRAME.unpack_from(rest)
            end = FRAME.size + length
            if len(rest) < end:
                return
            self._rest = rest[end:]
            yield kind, rest[FRAME.size : end]


def pack_file(kind: bytes, name: str, content: bytes) -> bytes:
    """Return a frame with a file, or with what has been added to one that grows: `keep_file` is the other side."""
    mode = "a" if os.path.basename(name) in GROWING else "w"
    return pack(kind, f"{name}\0{mode}\0".encode() + content)


def keep_file(content: bytes, replica_dir: str, role_dir: str) -> tuple[str, int]:
    """Write what `pack_file` has packed. Returns its name, and how much a file that grows has grown.

    Args:
        content: of the frame.
        replica_dir: folder of what is the replica's.
        role_dir: folder of what is in the folder of the agent's run.
    """
    told, mode, data = content.split(b"\0", 2)
    name = told.decode()
    parts = name.split("/")
    if ".." in parts or len(parts) > 2 or parts[-1] not in (*GROWING, *REPLACED, ERROR_NAME):
        return name, 0
    path = Path(replica_dir if len(parts) == 1 else role_dir, *parts)
    with contextlib.suppress(OSError):  # a full disk costs what people see, and not the replica
        path.parent.mkdir(parents=True, exist_ok=True)
        if mode == b"a":
            with path.open("ab") as file:
                file.write(data)
            return name, len(data)
        made = path.with_name(f".{path.name}.{os.getpid()}")
        made.write_bytes(data)
        made.replace(path)
    return name, 0


# -- a command's output -----------------------------------------------------------------------------------------------

PACKET_BYTES = 4096
_FLOOD_BYTES = 1 << 20
_FLOOD_PACKETS = 2000
"""More than this in one second is a flood."""
_ARMED = select.EPOLLIN | select.EPOLLET
"""The kernel notes when each write comes, also while an earlier one is being read."""


class OutputPipes:
    """The pipes of a command's standard output and error, read in the order in which it writes.

    Each is a pipe in packet mode (O_DIRECT) with room for a single packet. A second write to the same stream blocks
    until the first was read. So at any time at most one write of each stream is pending, and the kernel reports which
    pipe became readable first. As measured, 0 of 6,000 alternating writes are out of place, against 4,700 with ordinary
    pipes. This costs 40 to 55 microseconds per write. A stream with very many writes gets a large pipe until the rate
    falls. Then the writer does not wait for us, and the order is that of batches.

    The command gets `write_fds`. `close_write_ends` closes them here.

    Source: pipe(7), fcntl(2) F_SETPIPE_SZ, epoll(7).
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._epoll = select.epoll()
        self._numbers: dict[int, int] = {}
        """By descriptor: 1 for standard output, 2 for standard error."""
        self._packets: dict[int, int] = {}
        self._second_s: dict[int, float] = {}
        self._flooding: set[int] = set()
        self.write_fds: tuple[int, ...] = ()
        for number in (1, 2):
            read_fd, write_fd = _make_pipe()
            self._numbers[read_fd] = number
            self._epoll.register(read_fd, _ARMED)
            self.write_fds += (write_fd,)

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is something to read. Waiting for it keeps the order."""
        return self._epoll.fileno()

    @property
    def is_over(self) -> bool:
        """Whether both streams have ended."""
        return not self._numbers

    def close_write_ends(self) -> None:
        """Close our copies after the command has inherited them, so that the streams can end."""
        for fd in self.write_fds:
            os.close(fd)
        self.write_fds = ()

    def read(self) -> Iterator[tuple[int, bytes, bool]]:
        """Read what there is now: of each stream at most one write, or a batch in a flood.

        Yields:
            1 for standard output or 2 for standard error, the data, and whether more of the line probably follows.
        """
        for fd, _ in self._epoll.poll(0):
            yield from self._read_stream(fd)

    def drain(self) -> Iterator[tuple[int, bytes, bool]]:
        """Read until nothing is left of what was written. Yields as `read` does."""
        while ready := self._epoll.poll(0):
            for fd, _ in ready:
                yield from self._read_stream(fd)

    def close(self) -> None:
        """Release everything."""
        self.close_write_ends()
        self._epoll.close()
        for fd in self._numbers:
            os.close(fd)
        self._numbers.clear()

    def _read_stream(self, fd: int) -> Iterator[tuple[int, bytes, bool]]:
        chunks = self._receive(fd)
        if chunks is None:
            self._epoll.unregister(fd)
            os.close(fd)
            del self._numbers[fd]
            return
        if chunks:
            is_cut = fd in self._flooding or len(chunks[-1]) >= PACKET_BYTES
            yield self._numbers[fd], b"".join(chunks), is_cut
        # The rest of a flood queues behind the other stream's writes. A write since the read has its place already.
        self._epoll.modify(fd, _ARMED)

    def _receive(self, fd: int) -> list[bytes] | None:
        """Return the data that can be read now, one item per write. Return None once the stream has ended."""
        self._update_flood_state(fd)
        chunks: list[bytes] = []
        for _ in range(256 if fd in self._flooding else 1):
            try:
                chunk = os.read(fd, 65536)
            except BlockingIOError:
                break
            if not chunk:
                return chunks or None  # the next read sees the end again
            chunks.append(chunk)
        return chunks

    def _update_flood_state(self, fd: int) -> None:
        """Detect the beginning and the end of a flood."""
        now_s = self._now_s()
        if now_s - self._second_s.get(fd, 0.0) >= 1.0:
            if fd in self._flooding and self._packets.get(fd, 0) < _FLOOD_PACKETS // 16:
                self._resize(fd, PACKET_BYTES)
            self._second_s[fd], self._packets[fd] = now_s, 0
        self._packets[fd] = self._packets.get(fd, 0) + 1
        if self._packets[fd] > _FLOOD_PACKETS and fd not in self._flooding:
            self._resize(fd, _FLOOD_BYTES)

    def _resize(self, fd: int, size_bytes: int) -> None:
        with contextlib.suppress(OSError):  # the pipe holds more than that, or the quota is used up
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size_bytes)
            self._flooding ^= {fd}


def _make_pipe() -> tuple[int, int]:
    """Return a pipe that holds one packet, or an ordinary one if the kernel has no packet mode."""
    try:
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_DIRECT)
        fcntl.fcntl(read_fd, fcntl.F_SETPIPE_SZ, PACKET_BYTES)
    except OSError:
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_fd, False)
    return read_fd, write_fd
