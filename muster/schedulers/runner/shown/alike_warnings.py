"""Of the warnings that several replicas of a job write alike, a console that has the lines of all prints one.

Each agent prints once what the workers of its node write alike (`LaunchWarnings` in `muster/agent/logs/console.py`), so
that a warning of an import would still be there once a node. Log files, and programs that read lines, get all of them.
"""

import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

PREFIX: Final = re.compile(r"\[[^\[\]|]*?(?P<local>\d+)(?:\|n\d+\.r(?P<rank>\d+))?\]:")
"""`[main0]:` or `[main0|n1.r2]:`. Source: build_prefix in `muster/agent/logs/lines.py`."""

_HEADER: Final = re.compile(r"[^:]+:\d+: [\w.]*Warning: ")
"""How Python's `warnings` begins: `PATH:LINE: CATEGORY: TEXT`, and perhaps more rows of text."""
_SOURCE: Final = "  "
"""Begins the last row of a warning, the line of source."""
_ROW_LIMIT: Final = 8
_WARNING_LIMIT: Final = 256
"""Different warnings of one job; who writes more has another purpose than to warn."""


class _Warning:
    """A warning as the replica wrote it that was printed: the others are compared with it."""

    def __init__(self) -> None:
        self.times = 0
        """How often it was printed."""
        self.rows: list[str] = []
        """Below the first row."""
        self.is_whole = False

    def add(self, row: str) -> None:
        """Add the next row of the rank that wrote it; without a line of source only the first row is the warning."""
        if _HEADER.match(row) or len(self.rows) == _ROW_LIMIT:
            self.rows, self.is_whole = [], True
            return
        self.rows.append(row)
        self.is_whole = row.startswith(_SOURCE)


class AlikeWarnings:
    """The warnings that one console has printed. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._warnings: dict[str, _Warning] = {}

    def leave_out(self, lines: Iterable[str]) -> Iterator[str]:
        """The lines of one replica without the warnings that others have written as often as it has.

        A line is only held back, until its rank writes the next one, if it may belong to such a warning.
        """
        seen: Counter[str] = Counter()
        ranks: dict[str, _Rank] = {}
        for line in lines:
            found = PREFIX.match(line)
            if found is None:
                yield line
                continue
            with self._lock:
                rank = ranks.setdefault(found[0], _Rank(found[0], self._warnings, seen))
                shown = rank.push(line[found.end() :])
            yield from shown
        for rank in ranks.values():
            with self._lock:
                shown = rank.flush()
            yield from shown


class _Rank:
    """The lines of one rank, without their prefix."""

    def __init__(self, prefix: str, warnings: dict[str, _Warning], seen: Counter[str]) -> None:
        self._prefix = prefix
        self._warnings = warnings
        self._seen = seen
        """How often this replica wrote each warning."""
        self._printed: _Warning | None = None
        """The warning that this rank is printing."""
        self._repeated = _Warning()
        self._held: list[str] = []
        """What may be `_repeated` once more."""

    def push(self, row: str) -> list[str]:
        """Returns the lines to print now."""
        if self._held and self._continues(row):
            self._held.append(row)
            return self._drop_repeated()
        return self.flush() + self._begin(row)

    def flush(self) -> list[str]:
        """Returns the held lines, unless they are the warning that was printed."""
        self._drop_repeated()
        held, self._held = self._held, []
        return [self._prefix + row for row in held]

    def _begin(self, row: str) -> list[str]:
        if self._printed is not None:
            self._printed.add(row)
            self._printed = None if self._printed.is_whole else self._printed
        if _HEADER.match(row) and len(self._warnings) < _WARNING_LIMIT:
            self._seen[row] += 1
            warning = self._warnings.setdefault(row, _Warning())
            if self._seen[row] <= warning.times:
                self._repeated, self._held = warning, [row]
                return self._drop_repeated()
            warning.times, warning.rows, warning.is_whole = self._seen[row], [], False
            self._printed = warning
        return [self._prefix + row]

    def _continues(self, row: str) -> bool:
        """Whether the row can be the next one of the repeated warning, of which not all may be printed yet."""
        left = self._repeated.rows[len(self._held) - 1 :]
        if left or self._repeated.is_whole:
            return left[:1] == [row]
        return row.startswith(_SOURCE) and not self._held[-1].startswith(_SOURCE)

    def _drop_repeated(self) -> list[str]:
        if self._repeated.is_whole and self._held[1:] == self._repeated.rows:
            self._held = []
        return []
