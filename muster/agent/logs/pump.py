"""Moves one stream of one worker from its pipe to its file, to the console, and to the tail kept for the report."""

import os
from collections.abc import Callable, Sequence

from muster.agent.logs.console import Feed
from muster.agent.logs.files import LogFile
from muster.agent.logs.lines import LineAssembler
from muster.agent.runtime.loop import Loop, Timer

_READ_BYTES = 256 << 10
_PIPE_BYTES = 1 << 20
_TAIL_BYTES = 64 << 10
_END_BYTES = 512
"""How much is kept of every stream, for its last line."""
_PAUSE_S = 0.002
"""Pause before a busy stream is read again, so that bytes gather: one read of 100 KiB costs as much as one of 8 KiB."""
_BUSY_BYTES = 4 << 10
_BUSY_S = 0.004
"""A stream is busy if the last read was this short a time ago or returned that much. With -u it comes line by line."""


def open_pipe() -> tuple[int, int]:
    """Open a pipe for a worker's output, as large as allowed; return a non-blocking read end and a write end.

    Source: fcntl(2), F_SETPIPE_SZ; /proc/sys/fs/pipe-max-size and pipe-user-pages-soft limit it.

    Raises:
        OSError: too many open files.
    """
    import fcntl

    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    resize = getattr(fcntl, "F_SETPIPE_SZ", None)  # Linux, Python 3.10+
    size = _PIPE_BYTES
    while resize is not None and size > 64 << 10:
        try:
            fcntl.fcntl(read_fd, resize, size)
            break
        except OSError:
            size >>= 2
    return read_fd, write_fd


class LineFilter:
    """Copies the lines of one stream that contain any of the strings (`--duplicate-stdout-filters`).

    Several filters share one file, which the router closes.
    """

    def __init__(self, *, prefix: bytes, needles: Sequence[str], file: LogFile) -> None:
        self._prefix = prefix
        self._needles = tuple(needle.encode("utf-8", "surrogateescape") for needle in needles)
        self._file = file
        self._lines = LineAssembler(b"")

    def push(self, chunk: bytes) -> None:
        """Take the next bytes of the stream."""
        self._pick(self._lines.push(chunk))

    def finish(self) -> None:
        """End the stream: its unterminated last line counts."""
        self._pick(self._lines.finish())

    def _pick(self, lines: bytes) -> None:
        # Few chunks match, and one search is far cheaper than splitting.
        if not any(needle in lines for needle in self._needles):
            return
        picked = [line for line in lines[:-1].split(b"\n") if any(needle in line for needle in self._needles)]
        if picked:
            self._file.write(b"".join(self._prefix + line + b"\n" for line in picked))


class StreamPump:
    """Reads one pipe until its end. Owns the read end, its file and its feed; `close` releases them.

    Runs on the loop of the pump thread. `bytes_seen`, `end` and `tail` may be read from another thread.
    """

    def __init__(
        self,
        *,
        loop: Loop,
        read_fd: int,
        file: LogFile | None,
        feed: Feed | None,
        open_fallback_feed: Callable[[], Feed | None],
        line_filter: LineFilter | None,
        keeps_tail: bool,
        on_end: Callable[["StreamPump"], None],
    ) -> None:
        self._loop = loop
        self._read_fd: int | None = read_fd
        self._file = file
        self._feed = feed
        self._open_fallback_feed = open_fallback_feed
        self._line_filter = line_filter
        self._keeps_tail = keeps_tail
        self._on_end = on_end
        self.read_s = float("-inf")
        """When the stream was last read. Other threads may read this as well."""
        self.bytes_seen = 0
        self.end = b""
        """The last few bytes of the stream."""
        self.tail = b""
        """Many more of the last bytes, if they are kept."""

    def start(self) -> None:
        """Start reading."""
        if self._read_fd is not None:
            self._loop.watch_readable(self._read_fd, self._read)

    def read_rest(self) -> None:
        """Read what is there now, at most the size of a pipe, because more can only come from a live writer."""
        for _ in range(1 + _PIPE_BYTES // _READ_BYTES * 2):
            if not self._read_chunk():
                return

    def close(self) -> None:
        """Read what is there, print the unterminated last line, and release everything. Idempotent."""
        if self._read_fd is None:
            return
        self.read_rest()
        self._finish()

    def _read(self) -> None:
        count = self._read_chunk()
        if count is None:
            self._finish()
            return
        now_s = self._loop.clock.now_s()
        busy = count > _BUSY_BYTES or now_s - self.read_s < _BUSY_S
        self.read_s = now_s
        if busy and self._read_fd is not None:
            self._loop.unwatch_readable(self._read_fd)
            self._loop.call_later(_PAUSE_S, self.start)

    def _read_chunk(self) -> int | None:
        """Read once and pass the bytes on. Return how many, 0 for nothing now, or None at the end of the stream."""
        if self._read_fd is None:
            return 0
        try:
            chunk = os.read(self._read_fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not chunk:
            return None
        self.bytes_seen += len(chunk)
        self.end = chunk[-_END_BYTES:] if len(chunk) >= _END_BYTES else (self.end + chunk)[-_END_BYTES:]
        if self._keeps_tail:
            self.tail = chunk[-_TAIL_BYTES:] if len(chunk) >= _TAIL_BYTES else (self.tail + chunk)[-_TAIL_BYTES:]
        self._store(chunk)
        if self._line_filter is not None:
            self._line_filter.push(chunk)
        return len(chunk)

    def _store(self, chunk: bytes) -> None:
        file = self._file
        if file is None:
            if self._feed is not None:
                self._feed.offer(chunk)
            return
        written = file.write(chunk)
        if file.fd is not None:
            if self._feed is not None:
                self._feed.offer(chunk, file.fd, file.size_bytes)
            return
        # The disk is full: the rest goes only to the console.
        self._file = None
        if self._feed is not None:
            self._feed.offer(chunk)
        else:
            self._feed = self._open_fallback_feed()
            if self._feed is not None:
                self._feed.offer(chunk[written:])

    def _finish(self) -> None:
        if self._read_fd is None:
            return
        self._loop.unwatch(self._read_fd)
        os.close(self._read_fd)
        self._read_fd = None
        if self._line_filter is not None:
            self._line_filter.finish()
        if self._feed is not None:
            self._feed.end()
        if self._file is not None:
            self._file.close()
        self._on_end(self)


class PumpGroup:
    """The pumps of a round, all on one loop. Calls back when the last one has ended."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._open: set[StreamPump] = set()
        self._on_finished: Callable[[], None] | None = None
        self._limit: Timer | None = None

    def add(self, pump: StreamPump) -> None:
        """Start a pump."""
        self._open.add(pump)
        pump.start()

    def remove(self, pump: StreamPump) -> None:
        """Remove a pump whose stream has ended."""
        self._open.discard(pump)
        if not self._open and self._on_finished is not None:
            on_finished, self._on_finished = self._on_finished, None
            if self._limit is not None:
                self._limit.cancel()
            on_finished()

    def finish(self, limit_s: float, on_finished: Callable[[], None]) -> None:
        """Call back when every stream has ended. After `limit_s`, end the rest.

        A stream continues if a process that outlived the worker holds its pipe.
        """
        self._on_finished = on_finished
        if self._open:
            self._limit = self._loop.call_later(limit_s, self.close)
        else:
            self._on_finished = None
            on_finished()

    def close(self) -> None:
        """End every stream now, after reading what its pipe holds."""
        for pump in list(self._open):
            pump.close()
