"""How far a log was read whose records have times. After a break, reading resumes without loss or repetition."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from muster.schedulers.timestamps import Timestamp

OVERLAP_S: Final = 2
"""After a break, reading resumes this many seconds before the last record: a record may come that much late."""

ReadRecords: TypeAlias = Callable[[Timestamp | None], Iterator[tuple[Timestamp | None, bytes]]]
"""(since) -> the records of a log that were written at this time or later, each with its time, as they come.

None means from the beginning, with records whose time is not known. The iterator may end, or raise `LogBroken`, at any
record.
"""


class LogBroken(Exception):
    """The connection over which a log was read has broken. Reading goes on later."""


def follow_records(
    read: ReadRecords, has_ended: Callable[[], bool], wait: Callable[[], object], position: "Position"
) -> Iterator[bytes]:
    """Yield each record of a log once, until what writes it has ended, through broken connections.

    Args:
        read: reads from a time on.
        has_ended: returns whether what writes it has ended. What is read after that is complete.
        wait: returns when there may be more, at the latest after a second or so.
        position: how far the log was read. It is kept up to date.
    """
    while True:
        ended = has_ended()
        try:
            for stamp, record in read(position.resume()):
                if stamp is None or position.accept(stamp, record):
                    yield record
        except LogBroken:
            ended = False
        if ended:
            return
        if not has_ended():
            wait()


class Position:
    """How far one log was read.

    Records need not come in the order of their times: standard output and error are often dated separately.

    Args:
        since: where the first reading begins. None: at the beginning.
    """

    def __init__(self, since: Timestamp | None = None) -> None:
        self._since = since
        self._last: Timestamp | None = None
        self._seen: Counter[tuple[Timestamp, bytes]] = Counter()
        self._order: deque[tuple[Timestamp, bytes]] = deque()
        self._expected: Counter[tuple[Timestamp, bytes]] = Counter()

    def resume(self) -> Timestamp | None:
        """Return the time from which to read next, a whole second after the first reading. None: from the beginning.

        Records that were seen since then are expected again.
        """
        self._expected = self._seen.copy()
        if self._last is not None:
            resumed = (self._last[0] - OVERLAP_S, 0)
            self._since = resumed if self._since is None else max(self._since, resumed)
        return self._since

    def accept(self, stamp: Timestamp, record: bytes) -> bool:
        """Return whether a record of this time is new."""
        key = (stamp, record)
        if self._expected[key] > 0:
            self._expected[key] -= 1
            return False
        if self._since is not None and stamp < self._since:
            return False
        self._seen[key] += 1
        self._order.append(key)
        self._last = stamp if self._last is None else max(self._last, stamp)
        self._drop_before(self._last[0] - OVERLAP_S)
        return True

    def _drop_before(self, before_s: int) -> None:
        while self._order and self._order[0][0][0] < before_s:
            key = self._order.popleft()
            self._seen[key] -= 1
            if self._seen[key] <= 0:
                del self._seen[key]
