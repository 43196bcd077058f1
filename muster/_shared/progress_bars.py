"""The live rows at the bottom of a terminal: one per worker with an unfinished line, often a progress bar. Pure."""

import os
from collections.abc import Callable, Sequence


class ProgressBars:
    """Counts the rows at the bottom, to erase them before lines are printed above."""

    def __init__(self, size: Callable[[], os.terminal_size]) -> None:
        self._size = size
        self._rows = 0

    def erase(self) -> bytes:
        """The bytes that erase the rows and leave the cursor where they began."""
        rows, self._rows = self._rows, 0
        if not rows:
            return b""
        # Row by row: where rows begin at the top of a terminal, tmux keeps what "erase below" erases as scroll-back.
        return b"\r\x1b[K" + b"\x1b[A\x1b[K" * (rows - 1)

    def draw(self, rows: Sequence[bytes]) -> bytes:
        """The bytes that draw as many rows at the bottom as fit, and how many do not; call `erase` first."""
        columns, lines = self._size()
        room = max(1, lines - 1)
        shown = list(rows[:room])
        if 1 < room < len(rows):
            shown[-1] = b"... and %d more" % (len(rows) - room + 1)
        self._rows = len(shown)
        return b"\n".join(fit_row(row, max(1, columns - 1)) for row in shown)


def fit_row(row: bytes, columns: int) -> bytes:
    """Cut a row so that it does not wrap: removes colours and other escapes, counts wide characters twice."""
    text = _strip_escapes(row.decode("utf-8", "replace")) if b"\x1b" in row else row.decode("utf-8", "replace")
    text = "".join(c if c.isprintable() else " " for c in text.replace("\t", "    "))
    if text.isascii():
        return text[:columns].encode()
    from unicodedata import combining, east_asian_width

    width = 0
    for index, character in enumerate(text):
        width += 0 if combining(character) else 2 if east_asian_width(character) in "WF" else 1
        if width > columns:
            return text[:index].encode()
    return text.encode()


def _strip_escapes(text: str) -> str:
    import re

    return re.sub(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|.)?", "", text)
