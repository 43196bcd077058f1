"""What a program that runs on a node, and the process here that stands for the node, have in common.

`OutputPipes` reads the output of a command, there and here.

The program arrives as a text, for any Python, and nothing of muster need be installed there: it imports this module,
`folders` and `processes`, which go before it, and the standard library.
"""

import base64
import contextlib
import fcntl
import os
import select
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

FRAME = struct.Struct("!cI")
"""Kind, which is no newline, and the length of what follows."""
FRAME_LIMIT_BYTES = 1 << 24
"""A longer frame ends the connection: the other side may be hostile."""
_FILE_LIMIT_BYTES = 1 << 23
"""For one frame. Of a file that only grows the next one has more."""
_NAMES_LIMIT = 1000
GROWING = ("events.jsonl",)
REPLACED = ("status.json", "report.json", "checkpoint.json")
"""Files of an agent's run that are copied; `_shared.contract.LogNames`."""
ERROR_NAME = "error.json"
_PROGRAM = """\
import sys, types
for name, text in {modules!r}.items():
    sys.modules[name] = types.ModuleType(name)
    exec(text, sys.modules[name].__dict__)
{source}
{call}
"""


@cache
def build_program(path: str, call: str) -> str:
    """Return the source of a program with this module, `folders` and `processes`.

    Args:
        path: of the program.
        call: its last line.
    """
    from muster._shared import folders, processes  # where this is a program on a node, it has no package

    files = {folders.__name__: folders.__file__, processes.__name__: processes.__file__, __name__: __file__}
    modules = {name: Path(file).read_text() for name, file in files.items()}
    text = _PROGRAM.format(modules=modules, source=Path(path).read_text(), call=call)
    packed = base64.b64encode(zlib.compress(text.encode()))  # a pipe that is not read yet takes 64 KiB
    return f"import base64, zlib\nexec(zlib.decompress(base64.b64decode({packed!r})).decode())\n"


def pack(kind: bytes, content: bytes = b"") -> bytes:
    """Return a frame."""
    return FRAME.pack(kind, len(content)) + content


class FrameReader:
    """Cuts a stream of bytes into frames of at most `limit_bytes`."""

    def __init__(self, limit_bytes: int = FRAME_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._rest = bytearray()

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


class ChangedFiles:
    """The files of an agent's run, and the replica's error file, as frames: `keep_file` is the other side.

    Args:
        folder: has the error file, and in `log` what the agent writes.
        kind: of the frames.
    """

    def __init__(self, folder: str, kind: bytes) -> None:
        self._folder, self._kind = Path(folder), kind
        self._seen: dict[str, tuple[int, int]] = {}
        self._sent: Mapping[str, int] = {}

    def rewind(self, received: Mapping[str, int]) -> None:
        """Send what the other side lacks of files that grow: its disk was full, or another connection had it.

        Args:
            received: bytes that it has.
        """
        for name, count in self._sent.items():
            if received.get(name, 0) < count:
                self._seen.pop(name, None)
        self._sent = received

    def read(self) -> bytes:
        """Return frames with what was written since the last call."""
        frames = b""
        for path in [*self._folder.glob("log/*/*"), self._folder / ERROR_NAME]:
            name = "/".join(path.relative_to(self._folder).parts[1:]) or ERROR_NAME
            if path.name not in (*GROWING, *REPLACED) and name != ERROR_NAME:
                continue
            begin = self._sent.get(name, 0) if path.name in GROWING else -1
            with contextlib.suppress(OSError):
                status = path.stat()
                if not stat.S_ISREG(status.st_mode):
                    continue
                if self._seen.get(name) == (mark := (status.st_mtime_ns, status.st_size)):
                    continue
                with path.open("rb") as file:
                    file.seek(max(0, begin))
                    content = file.read(_FILE_LIMIT_BYTES)
                if begin < 0 or len(content) < _FILE_LIMIT_BYTES:
                    self._seen[name] = mark
                if begin >= 0:
                    content = content[: content.rfind(b"\n") + 1]  # other nodes write to the same file
                    self._sent = {**self._sent, name: begin + len(content)}
                frames += pack(self._kind, f"{name}\0{begin}\0".encode() + content)
        return frames


def keep_file(content: bytes, replica_dir: str, role_dir: str, kept: dict[str, int]) -> None:
    """Write what `ChangedFiles` has packed.

    Args:
        content: of the frame.
        replica_dir: folder of what is the replica's.
        role_dir: folder of what is in the folder of the agent's run.
        kept: how many bytes are here of each file that grows. What does not follow them comes again.
    """
    told, begin, data = content.split(b"\0", 2)
    name = told.decode()
    parts = name.split("/")
    if ".." in parts or len(parts) > 2 or parts[-1] not in (*GROWING, *REPLACED, ERROR_NAME):
        return
    if len(kept) >= _NAMES_LIMIT and name not in kept:
        return
    count = kept.setdefault(name, 0)
    path = Path(replica_dir if len(parts) == 1 else role_dir, *parts)
    with contextlib.suppress(OSError):  # a full disk costs what people see, and not the replica
        path.parent.mkdir(parents=True, exist_ok=True)
        if parts[-1] not in GROWING:
            made = path.with_name(f".{path.name}.{os.getpid()}")
            made.write_bytes(data)
            made.replace(path)
        elif int(begin) == count:
            with path.open("ab", buffering=0) as file:
                while data:
                    kept[name] += (written := file.write(data))
                    data = data[written:]


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
