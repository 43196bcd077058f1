"""Says why nodes of an app wait, while a person or a program waits for it: for room, for their turn, for an image."""

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
    """Says the one line of a job: once nodes of it have waited for some seconds, when it changes why, and at their end.

    Any thread may use it: `torchx run --log` asks in two.

    Args:
        say: gets the app's id and the line.
        clock: monotonic, in seconds.
    """

    def __init__(self, say: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._lock = threading.Lock()
        self._shown: dict[str, tuple[float, tuple[object, ...]]] = {}
        """App of which nodes wait -> when a line may be said, and what the last one was about. (): none was said."""

    def update(self, response: DescribeAppResponse) -> None:
        """Say what is new.

        Args:
            response: the app's state of now.
        """
        app_id, now_s = response.app_id, self._clock()
        found = _find_waits(response)
        with self._lock:
            due_s, shown = self._shown.setdefault(app_id, (now_s + _SPACING_S, ()))
            if not found:
                del self._shown[app_id]
                is_new = bool(shown) and response.state is AppState.RUNNING
            else:
                is_new = now_s >= due_s and found != shown
            if not is_new:
                return
            if found:
                self._shown[app_id] = now_s + _SPACING_S, found
        self._say(app_id, _format(response))


def _find_waits(response: DescribeAppResponse) -> tuple[object, ...]:
    """Return what tells one wait from another. (): no node of the app waits."""
    from muster.schedulers.adapter.status import parse_status
    from muster.schedulers.wording.reasons import identify

    states = [each.state for role in response.roles_statuses for each in role.replicas]
    if response.state not in WAITS and (response.state is not AppState.RUNNING or not {*states}.intersection(WAITS)):
        return ()
    return response.state, states.count(AppState.RUNNING), frozenset(map(identify, parse_status(response).reasons))


def _format(response: DescribeAppResponse) -> str:
    from muster.schedulers.adapter.status import parse_status
    from muster.schedulers.wording.job_line import format_line

    return format_line(parse_status(response))
