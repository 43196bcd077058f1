"""Joins pieces of output and splits them at newlines.

It also reads logs whose bytes have positions, and counts their readers. It does not use `io.TextIOWrapper`, which
blocks until it has a whole line: readers of a log that grows look at the rest, too.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

from muster.schedulers.timestamps import Timestamp

READERS_LIMIT_S: Final = 5.0
"""How long `close` of a scheduler waits for threads that still read logs of apps that have ended.

On a busy machine they may need seconds for the last lines. A caller that has left an iterator of lines unfinished waits
that long, once.
"""

CHUNK_BYTES: Final = 65536
PARTIAL_S: Final = 0.5
"""An unterminated line is shown after this time: a prompt, or the last output of a process that hangs."""
WAIT_S: Final = 1.0
_LINE_BYTES: Final = 16 << 20
"""A longer line comes in pieces of about this size."""


class TimedLine(str):
    """A line whose time is known, so that lines of several logs can be sorted."""

    __slots__ = ("at_s",)

    at_s: float
    """When its end was written, in seconds since the epoch, by the clock of what writes the log."""

    def __new__(cls, text: str, at_s: float) -> "TimedLine":  # noqa: PYI034  # `Self` is of Python 3.11
        """Add the time to a line."""
        line = super().__new__(cls, text)
        line.at_s = at_s
        return line


def add_time(text: str, stamp: Timestamp | None) -> str:
    """Add the time of its record to a line. None: it is not known."""
    return text if stamp is None else TimedLine(text, stamp[0] + stamp[1] / 1e9)


class LineSplitter:
    """Splits bytes at newlines. A newline is never part of another UTF-8 character, so lines can be decoded singly."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._rest_bytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the lines that end in this piece, with their newline, and what is too long to wait for its newline."""
        first, *more = piece.split(b"\n")
        self._pieces.append(first)
        lines = []
        for rest in more:
            lines.append(b"".join(self._pieces) + b"\n")
            self._pieces, self._rest_bytes = [rest], 0
        self._rest_bytes += len(self._pieces[-1])
        if self._rest_bytes >= _LINE_BYTES:
            lines.append(self.take_rest())
        return lines

    def has_rest(self) -> bool:
        """Return whether the beginning of a line waits for its end."""
        return any(self._pieces)

    def has_carriage_return(self) -> bool:
        """Return whether that beginning is a progress bar, which is drawn anew on one line."""
        return any(b"\r" in piece for piece in self._pieces)

    def take_rest(self) -> bytes:
        """Return the beginning of a line without its end, or nothing. It is not returned again."""
        rest = b"".join(self._pieces)
        self._pieces, self._rest_bytes = [], 0
        return rest


class Readers:
    """Counts the readers of logs, so that the last lines are shown before the command ends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._active = 0

    def count_reader(self, lines: Iterator[str]) -> Iterator[str]:
        """Yield the same lines, and count a reader from the first line until the last or the iterator's close."""
        with self._changed:
            self._active += 1
        try:
            yield from lines
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def wait_until_idle(self) -> None:
        """Wait until there are no readers, at most `READERS_LIMIT_S`."""
        with self._changed:
            self._changed.wait_for(lambda: self._active == 0, READERS_LIMIT_S)


class ByteSource(Protocol):
    """One log of one replica: a file of this machine, or one that a command reads elsewhere. It only grows.

    A source that knows no times need not define `find_offset` and `find_time`.

    A log whose records have times instead, such as an engine's, is read with `adapter.log_position`.
    """

    def find_size(self) -> int | None:
        """Return how many bytes there are. None: the replica was not started yet."""
        ...

    def read(self, offset: int, limit_bytes: int) -> bytes:
        """Return what is there from a position on, at most `limit_bytes`. b"": nothing (yet)."""
        ...

    def find_offset(self, time_s: float, *, after: bool) -> int | None:
        """Return the position of the first byte written at this time or later, or, `after`, later than it.

        Args:
            time_s: seconds since the epoch, by the clock of what writes the log.
            after: whether bytes written at that very time do not count.

        Returns:
            None: none was, or times are not known.
        """
        del time_s, after
        return None

    def find_time(self, offset: int) -> float | None:
        """Return when the byte at a position was written, by the same clock. None: it is not known.

        Args:
            offset: not before that of the last call.
        """
        del offset
        return None

    def wait(self, limit_s: float) -> None:
        """Return when the log may have grown or its app may have ended, at the latest after `limit_s`."""
        ...

    def close(self) -> None:
        """Release what it holds: nothing more is read. Idempotent."""
        return


def read_lines(
    source: ByteSource,
    has_ended: Callable[[], bool],
    *,
    pattern: "re.Pattern[str] | None" = None,
    since_s: float | None = None,
    until_s: float | None = None,
    follow: bool = False,
) -> Iterator[str]:
    """Read lines as they come. See `PluginScheduler.read_log`.

    Args:
        source: the log, which is closed at the end.
        has_ended: whether the app has ended and its logs are complete. It is called only when there is nothing to read.
        pattern: only lines in which this is found. None: all.
        since_s: seconds since the epoch. None: from the beginning.
        until_s: seconds since the epoch. None: to the end.
        follow: whether to wait for more until the app has ended.

    Returns:
        Lines with their newline. A last line without one comes as it is, and so does a progress bar (text with a
        carriage return) each time it is drawn. Bytes that are not UTF-8 come as U+FFFD. Lines that are not followed
        have their times (`TimedLine`) as far as the source knows them.
    """
    try:
        reader = _Reader(source, since_s, until_s)
        for line in reader.read(has_ended, follow=follow):
            text = line.decode(errors="replace")
            at_s = None if follow else source.find_time(max(0, reader.end_offset - 1))
            if pattern is None or pattern.search(text):
                yield text if at_s is None else TimedLine(text, at_s)
    finally:
        source.close()


class _Reader:
    """Reads one log once."""

    def __init__(self, source: ByteSource, since_s: float | None, until_s: float | None) -> None:
        self._source = source
        self._since_s = since_s
        self._until_s = until_s
        self._offset: int | None = None
        """The offset of the next byte. None: the log does not exist yet."""
        self.end_offset = 0
        """The offset after the line that was yielded last."""
        self._drops_line = False
        """Whether reading began in the middle of a line, or just before one."""

    def read(self, has_ended: Callable[[], bool], *, follow: bool) -> Iterator[bytes]:
        """Yield lines. See `read_lines`."""
        lines, last_read_s, complete = LineSplitter(), time.monotonic(), False
        while True:
            data = self._read_next()
            if data:
                yield from self._count_bytes(lines.feed(data))
                last_read_s = time.monotonic()
                continue
            waited = time.monotonic() - last_read_s >= PARTIAL_S
            if lines.has_rest() and (lines.has_carriage_return() or complete or waited):
                yield from self._count_bytes([lines.take_rest()])
            if complete:
                return
            # Before the last read, which gets all.
            is_past = self._until_s is not None and time.time() > self._until_s
            complete = not follow or is_past or has_ended()
            if not complete:
                self._source.wait(PARTIAL_S if lines.has_rest() else WAIT_S)

    def _read_next(self) -> bytes:
        if self._offset is None and not self._begin():
            return b""
        assert self._offset is not None  # noqa: S101  # for mypy
        limit = CHUNK_BYTES
        if self._until_s is not None:
            end = self._source.find_offset(self._until_s, after=True)
            limit = CHUNK_BYTES if end is None else max(0, min(CHUNK_BYTES, end - self._offset))
        data = self._source.read(self._offset, limit) if limit else b""
        self._offset += len(data)
        return data

    def _begin(self) -> bool:
        """Find the first position. False: the log does not exist yet."""
        size = self._source.find_size()
        if size is None:
            return False
        self._offset = 0
        if self._since_s is not None:
            found = self._source.find_offset(self._since_s, after=False)
            self._offset = size if found is None else found
            if self._offset:  # within a line: leave out its rest
                self._offset -= 1
                self._drops_line = True
        self.end_offset = self._offset
        return True

    def _count_bytes(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the lines of the log, without the first one if it is to be left out."""
        for line in lines:
            self.end_offset += len(line)
            if not self._drops_line:
                yield line
            self._drops_line = False
