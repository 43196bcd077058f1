"""`muster top` without a terminal, and for programs: a line per change, one page, or one line of JSON."""

import time
from collections.abc import Callable, Iterator
from typing import Final

from muster._shared.contract import show_controls
from muster._shared.job_view import JobEvent
from muster.cli.top.asking import Jobs
from muster.cli.top.picture import JobPicture
from muster.cli.top.source import EVERY_S

_PROGRESS_S: Final = 60.0
"""How often it is printed how far a job is, if nothing else changes."""


def follow(
    jobs: Jobs, handle: str, write: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> JobPicture:
    """Print one line per change, until the job has ended.

    Args:
        jobs: what is asked.
        handle: of the job.
        write: prints a line.
        sleep: waits between two looks.

    Returns:
        The job as it was seen last.

    Raises:
        ControlError: it cannot be read.
    """
    changes = Changes()
    while True:
        picture = jobs.read_job(handle)
        for line in changes.list_new(picture, time.monotonic()):
            write(line)
        if picture.has_ended:
            return picture
        sleep(EVERY_S)


class Changes:
    """What is new since the last look."""

    def __init__(self) -> None:
        self._state = ""
        self._events: dict[str, tuple[JobEvent, ...]] = {}
        self._told_s = 0.0

    def list_new(self, picture: JobPicture, now_s: float) -> Iterator[str]:
        """Return the lines: new events, then the job's line if its state has changed, or after a minute.

        Args:
            picture: of the job.
            now_s: by a monotonic clock.
        """
        for role, status in picture.statuses:
            known = self._events.get(role, ())
            name = f"{role}: " if len(picture.statuses) > 1 else ""
            for event in status.events:
                if event not in known:
                    clock = time.strftime("%H:%M:%S", time.localtime(event.time_s))
                    yield f"{clock} {name}{show_controls(event.text)}"
            self._events[role] = status.events
        state = picture.state
        if state != self._state or now_s - self._told_s >= _PROGRESS_S:
            self._state, self._told_s = state, now_s
            yield show_controls(f"{time.strftime('%H:%M:%S')} {state}: {picture.line}" if picture.line else state)
