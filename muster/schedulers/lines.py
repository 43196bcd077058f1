"""Joins pieces of output and splits them at newlines.

Not `io.TextIOWrapper`: it blocks until it has a whole line, and readers of a log that grows look at the rest, too.
"""


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
