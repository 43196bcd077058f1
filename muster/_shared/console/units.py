"""Cuts what ranks write into units, and says which units are alike. Pure.

A unit is a line, a traceback or a Python warning. Lines are alike when they are equal after digits, hexadecimal numbers
and paths are masked (`Masks`). Tracebacks and warnings are compared without what `_OWN` matches. A finished
progress bar, a very long line and one with NUL bytes are like no other.
"""

import re
from collections.abc import Iterator

_LONG_BYTES = 4096
_CACHE_LIMIT = 1024
_WARNING_ROWS = 8
_BLOCK_ROWS = 2000

LINE, WARNING, TRACEBACK, ALONE = range(4)
"""The kinds of a unit. `ALONE` is like no other."""

# -- what is alike ----------------------------------------------------------------------------------------------------

_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_MASKED = re.compile(
    rb"0[xX][0-9a-fA-F]+"
    rb"|/[^\s\"'`,;:()\[\]{}<>|]*"  # a path, from its first slash
    rb"|[-+]?0+(?:\.0+)?(?:[eE][-+]?0+)?(?![0-9a-zA-Z])"
    rb"|\b(?=[a-fA-F]*0)[0-9a-fA-F]{4,}\b"  # a digest has a digit
    rb"|0+"
)
"""In a line whose digits are all 0. No alternative is tried twice over the same bytes: it is linear."""


class Masks:
    """Masks lines, and remembers those of the last forms, because in most lines only digits change."""

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}

    def mask(self, zeroed: bytes) -> bytes:
        """Return the mask of a line whose digits are zeros."""
        mask = self._known.get(zeroed)
        if mask is None:
            if len(self._known) >= _CACHE_LIMIT:
                self._known.clear()
            mask = self._known[zeroed] = _MASKED.sub(b"#", zeroed)
        return mask


# -- units ------------------------------------------------------------------------------------------------------------

_RANK_PREFIX = re.compile(rb"^\[rank\d+\]: ?", re.MULTILINE)
"""Source: torch/distributed/distributed_c10d.py, the exception hook that init_process_group installs."""
_OWN = re.compile(_RANK_PREFIX.pattern + rb"|\[[0-9a-fA-F]*[.:][0-9a-fA-F.:]+\]:\d+", re.MULTILINE)
"""What is a rank's own in a traceback: the rank, and the address of a peer in gloo's errors."""
_TRACEBACK_HEADS = (b"Traceback (most recent call last):", b"  + Exception Group Traceback ", b"Fatal Python error: ")
_CHAINS = (b"During handling of the above exception", b"The above exception was the direct cause")
_BODY = (b" ", b"\t", b"File ", b"Thread 0x", b"Current thread 0x", b"Extension modules:")
"""How rows of a traceback begin, and those of the stacks of a fatal error."""
_FIRST_BYTES = b"T Fd["


def begins_warning(row: bytes) -> bool:
    """Return whether it is the first row of a warning as Python's `warnings` writes it: `PATH:LINE: CATEGORY: TEXT`."""
    location, _, rest = row.partition(b": ")
    return location.rpartition(b":")[2].isdigit() and rest.partition(b": ")[0].endswith(b"Warning")


def _begins_traceback(row: bytes) -> bool:
    return row[:1] in _FIRST_BYTES and _RANK_PREFIX.sub(b"", row, 1).startswith(_TRACEBACK_HEADS)


class Unit:
    """Rows of one speaker that belong together."""

    __slots__ = ("key", "kind", "since_s", "text")

    def __init__(self, kind: int, key: bytes, text: bytes, since_s: float) -> None:
        self.kind = kind
        self.key = key
        """Equal units have equal keys."""
        self.text = text
        r"""Whole lines, with their `\n`."""
        self.since_s = since_s
        """When its first row was said."""


class _Block:
    """The rows of one speaker that may be the beginning of a warning or a traceback."""

    __slots__ = ("has_exception", "kind", "rows", "since_s")

    def __init__(self, kind: int, row: bytes, since_s: float) -> None:
        self.kind = kind
        self.rows = [row]
        """The rows since the last part that was printed: a traceback may be written slowly."""
        self.since_s = since_s
        self.has_exception = False
        """The traceback's exception was among the rows: the next one may belong to another unit."""

    def takes(self, row: bytes, *, is_same_write: bool) -> bool:
        """Return whether the row belongs to the block."""
        if self.kind == WARNING:
            return len(self.rows) < _WARNING_ROWS and not begins_warning(row) and not _begins_traceback(row)
        text = _RANK_PREFIX.sub(b"", row, count=1)
        if text.startswith(_TRACEBACK_HEADS):
            self.has_exception = False
        elif text and not text.startswith(_BODY):
            if self.has_exception:
                # Below the exception, rows may have any form.
                return is_same_write or text.startswith(_CHAINS) or text is not row
            self.has_exception = True
        return len(self.rows) < _BLOCK_ROWS

    @property
    def is_whole(self) -> bool:
        """Whether no row follows: a warning ends with its line of source."""
        return self.kind == WARNING and self.rows[-1].startswith(b"  ")


class Units:
    """Cuts the whole lines of one speaker into units."""

    __slots__ = ("_block", "_holds_tracebacks", "_masks")

    def __init__(self, masks: Masks, *, holds_tracebacks: bool) -> None:
        self._masks = masks
        self._holds_tracebacks = holds_tracebacks
        self._block: _Block | None = None

    @property
    def holds_rows(self) -> bool:
        """Whether rows are held, which may be the beginning of a unit."""
        return self._block is not None and bool(self._block.rows)

    @property
    def since_s(self) -> float:
        """When the rows that are held were said."""
        return 0.0 if self._block is None else self._block.since_s

    @property
    def held(self) -> bytes:
        """The rows that are held, without what is the rank's own."""
        return b"" if self._block is None else _OWN.sub(b"", b"\n".join(self._block.rows))

    def cut(self, lines: bytes, now_s: float) -> Iterator[Unit]:
        r"""Return the units that are whole now.

        Args:
            lines: whole lines, which end in `\n`.
            now_s: the time.
        """
        is_same_write = False
        for row, zeroed in zip(lines[:-1].split(b"\n"), lines.translate(_ZEROS).split(b"\n"), strict=False):
            block = self._block
            if block is not None:
                if block.takes(row, is_same_write=is_same_write):
                    is_same_write = True
                    block.since_s = block.since_s if block.rows else now_s
                    block.rows.append(row)
                    if block.is_whole:
                        yield from self.end_block()
                    continue
                yield from self.end_block()
            kind = self._find_block(row)
            if kind is not None:
                self._block = _Block(kind, row, now_s)
                is_same_write = True
            elif len(row) > _LONG_BYTES or b"\r" in row.rstrip(b"\r") or b"\0" in row:
                yield Unit(ALONE, b"", row + b"\n", now_s)
            else:
                yield Unit(LINE, self._masks.mask(zeroed), row + b"\n", now_s)

    def _find_block(self, row: bytes) -> int | None:
        if b"Warning: " in row and begins_warning(row):
            return WARNING
        return TRACEBACK if self._holds_tracebacks and _begins_traceback(row) else None

    def end_block(self, *, may_go_on: bool = False) -> Iterator[Unit]:
        """Return the rows that are held, as units.

        Args:
            may_go_on: they have been held long enough. What follows of a traceback is then a traceback, too.
        """
        block, self._block = self._block, None
        if block is None:
            return
        if may_go_on and block.kind == TRACEBACK:
            self._block = _Block(TRACEBACK, b"", 0.0)
            self._block.rows, self._block.has_exception = [], block.has_exception
        rows = block.rows
        if block.kind == WARNING and not block.is_whole:
            rows = rows[:1]  # the rest may be another's
        if rows:
            text = b"\n".join(rows) + b"\n"
            yield Unit(block.kind, b"\0" + _OWN.sub(b"", text), text, block.since_s)
        for row in block.rows[len(rows) :]:
            yield Unit(LINE, self._masks.mask(row.translate(_ZEROS)), row + b"\n", block.since_s)
