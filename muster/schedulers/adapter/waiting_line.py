"""Says why an app waits, while a person or a program waits for it: for nodes, for its turn, for an image."""

import threading
import time
from collections.abc import Callable
from typing import Final

from torchx.schedulers.api import DescribeAppResponse
from torchx.specs import AppState

WAITS: Final = (AppState.UNSUBMITTED, AppState.SUBMITTED, AppState.PENDING)
"""The states of an app of which no replica runs (yet)."""

_SPACING_S: Final = 5.0
"""The shortest time until the first line, and between two lines."""


class WaitingLine:
    """Says the one line of a job: once it has waited for some seconds, when that line changes, and when the job runs.

    Any thread may use it: `torchx run --log` asks in two.

    Args:
        say: gets the app's id and the line.
        clock: monotonic, in seconds.
    """

    def __init__(self, say: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[str, tuple[float, str]] = {}
        """App that waits -> when a line may be said, and the last one. "": none was."""

    def update(self, response: DescribeAppResponse) -> None:
        """Say what is new.

        Args:
            response: the app's state of now.
        """
        app_id, now_s = response.app_id, self._clock()
        with self._lock:
            due_s, said = self._said.setdefault(app_id, (now_s + _SPACING_S, ""))
            if response.state not in WAITS:
                del self._said[app_id]
                is_new = bool(said) and response.state is AppState.RUNNING
            else:
                is_new = now_s >= due_s
            line = _format(response) if is_new else said
            if line == said:
                return
            if response.state in WAITS:
                self._said[app_id] = now_s + _SPACING_S, line
        self._say(app_id, line)


def _format(response: DescribeAppResponse) -> str:
    from muster.schedulers.adapter.job_line import format_line
    from muster.schedulers.adapter.status import parse_status

    return format_line(parse_status(response))
