"""Joins pieces of output and splits them at newlines; counts those that read lines.

Not `io.TextIOWrapper`: it blocks until it has a whole line, and readers of a log that grows look at the rest, too.
"""

import threading
from collections.abc import Iterator
from typing import Final

READERS_LIMIT_S: Final = 1.0
"""How long `close` of a scheduler waits for threads that still read logs of apps that have ended."""


class LineSplitter:
    """Splits bytes at newlines. A newline is never part of another UTF-8 character, so lines can be decoded singly."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that end in this piece, with their newline."""
        first, *more = piece.split(b"\n")
        self._pieces.append(first)
        lines = []
        for rest in more:
            lines.append(b"".join(self._pieces) + b"\n")
            self._pieces = [rest]
        return lines

    def has_rest(self) -> bool:
        """Whether the beginning of a line waits for its end."""
        return any(self._pieces)

    def has_carriage_return(self) -> bool:
        """Whether that beginning is a progress bar, which is drawn anew on one line."""
        return any(b"\r" in piece for piece in self._pieces)

    def take_rest(self) -> bytes:
        """The beginning of a line without its end, or nothing; it is not returned again."""
        rest = b"".join(self._pieces)
        self._pieces = []
        return rest


class Readers:
    """Counts the readers of logs, so that the last lines are shown before the command ends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._active = 0

    def count_reader(self, lines: Iterator[str]) -> Iterator[str]:
        """Yields the same lines; counts a reader from the first line until the last or the iterator's close."""
        with self._changed:
            self._active += 1
        try:
            yield from lines
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def wait_until_idle(self, limit_s: float = READERS_LIMIT_S) -> None:
        """Wait until there are no readers, at most `limit_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._active == 0, limit_s)
