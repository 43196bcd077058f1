"""`--duplicate-stdout-filters`: copies lines that contain any of the strings to one file for all ranks."""

from collections.abc import Sequence

from muster.agent.logs.files import LogFile
from muster.agent.logs.lines import LineAssembler


class LineFilter:
    """Copies matching lines of one stream. Several filters share one file; the router closes it."""

    def __init__(self, *, prefix: bytes, needles: Sequence[str], file: LogFile) -> None:
        self._prefix = prefix
        self._needles = tuple(needle.encode("utf-8", "surrogateescape") for needle in needles)
        self._file = file
        self._lines = LineAssembler(b"")

    def push(self, chunk: bytes) -> None:
        """The stream's next bytes."""
        self._pick(self._lines.push(chunk))

    def finish(self) -> None:
        """The stream has ended: its unterminated last line counts."""
        self._pick(self._lines.finish())

    def _pick(self, lines: bytes) -> None:
        # Most chunks match nothing: one search over a whole chunk is far cheaper than splitting it.
        if not any(needle in lines for needle in self._needles):
            return
        picked = [line for line in lines[:-1].split(b"\n") if any(needle in line for needle in self._needles)]
        if picked:
            self._file.write(b"".join(self._prefix + line + b"\n" for line in picked))
