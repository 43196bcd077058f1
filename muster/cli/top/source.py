"""Reads what the view shows, and passes on what a person asks for. It does so in threads: the view itself never waits.

What a thread has read is put into a queue, and `wake` is called. A scheduler that answers slowly is asked less often.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final, TypeAlias

from muster._shared.control import ControlError
from muster._shared.reports import Answer
from muster.cli.top.picture import KEPT_LINES, JobList, JobPicture
from muster.cli.top.state import Deed

EVERY_S: Final = 1.0
"""Between two looks at a job. A look that takes long is followed by a pause that is four times as long."""
_PAUSE_FACTOR: Final = 4.0

Content: TypeAlias = JobList | JobPicture | Answer | ControlError


class Origin(Enum):
    """What has reported something that no key asks for."""

    LOOK = "look"
    LOG = "log"


class Reader:
    """Runs calls in threads. What belongs to an earlier call of the same method is dropped."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Start nothing yet.

        Args:
            wake: called by threads when there is something to get.
        """
        self._wake = wake
        self._told: queue.SimpleQueue[tuple[Origin | Deed, object, Content]] = queue.SimpleQueue()
        """What was reported, with the call that reported it."""
        self._looks: object = None
        """Names the present `repeat`. A thread that finds another one ends."""
        self._log: object = None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)

    def get(self) -> list[tuple[Origin | Deed, Content]]:
        """Return what has been read since the last call, the oldest first.

        By look or log, or on a request for a deed.
        """
        found: list[tuple[Origin | Deed, Content]] = []
        while True:
            try:
                origin, call, content = self._told.get_nowait()
            except queue.Empty:
                return found
            if isinstance(origin, Deed) or call is self._looks or call is self._log:
                found.append((origin, content))

    def get_lines(self) -> list[str]:
        """Return the lines of the log that have come since the last call, at most `KEPT_LINES` of them."""
        lines: list[str] = []
        while self._lines:
            lines.append(self._lines.popleft())
        return lines

    def repeat(self, read: "Callable[[], JobList | JobPicture]") -> None:
        """Read again and again, until the next call."""
        mine = self._looks = object()

        def run() -> None:
            while mine is self._looks:
                began_s = time.monotonic()
                self._report(Origin.LOOK, mine, read)
                time.sleep(max(EVERY_S, _PAUSE_FACTOR * (time.monotonic() - began_s)))

        _start("look", run)

    def follow(self, read: Callable[[], Iterator[str]]) -> None:
        """Read lines as they come, until the next call or `leave_log`."""
        mine = self._log = object()
        lines = self._lines = deque(maxlen=KEPT_LINES)

        def run() -> None:
            try:
                for line in read():
                    if mine is not self._log:
                        return
                    lines.append(line)
            except ControlError as error:
                self._tell(Origin.LOG, mine, error)

        _start("log", run)

    def leave_log(self) -> None:
        """Read no more lines."""
        self._log = None
        self._lines = deque(maxlen=KEPT_LINES)

    def run(self, deed: Deed, ask: Callable[[], Answer]) -> None:
        """Pass on the request for a deed."""
        _start("request", lambda: self._report(deed, None, ask))

    def _report(self, origin: Origin | Deed, call: object, read: "Callable[[], JobList | JobPicture | Answer]") -> None:
        try:
            content: Content = read()
        except ControlError as error:
            content = error
        self._tell(origin, call, content)

    def _tell(self, origin: Origin | Deed, call: object, content: Content) -> None:
        self._told.put((origin, call, content))
        self._wake()


def _start(what: str, run: Callable[[], None]) -> None:
    threading.Thread(target=run, name=f"muster-top-{what}", daemon=True).start()
