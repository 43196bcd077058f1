"""The live rows at the bottom of a terminal: one per worker with an unfinished line, often a progress bar. Pure.

One more row may stand below them, and says how the job is doing.
"""

import os
from collections.abc import Callable, Sequence


class ProgressBars:
    """Counts the rows at the bottom, to erase them before lines are printed above."""

    def __init__(self, size: Callable[[], os.terminal_size]) -> None:
        self._size = size
        self._widths: list[int] = []
        """The widths of the rows that are drawn, in columns."""

    def erase(self) -> bytes:
        """Return the bytes that erase the rows and leave the cursor where they began."""
        widths, self._widths = self._widths, []
        if not widths:
            return b""
        # A terminal made narrower has wrapped them.
        columns = self._size()[0]
        rows = sum(max(1, -(-width // columns)) for width in widths)
        # tmux keeps what "erase below" erases as scroll-back.
        return b"\r\x1b[K" + b"\x1b[A\x1b[K" * (rows - 1)

    def draw(self, rows: Sequence[bytes], status: bytes = b"") -> bytes:
        """Return the bytes that draw as many rows at the bottom as fit, and how many do not. Call `erase` first.

        Args:
            rows: of the workers.
            status: the last row. b"": there is none.
        """
        columns, lines = self._size()
        room = max(1, lines - (2 if status else 1))
        shown = list(rows[:room])
        if 1 < room < len(rows):
            shown[-1] = b"... and %d more" % (len(rows) - room + 1)
        if status:
            shown.append(status)
        fitted = [fit_row(row, max(1, columns - 1)) for row in shown]
        self._widths = [len(row.decode()) for row in fitted]
        return b"\n".join(fitted)


def fit_row(row: bytes, columns: int) -> bytes:
    """Cut a row so that it does not wrap: removes colours and other escapes, counts wide characters twice."""
    text = row.decode("utf-8", "replace")
    if "\x1b" in text:
        import re

        text = re.sub(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|.)?", "", text)
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
