"""Reads what the view shows, and passes on what a person asks for. It does so in threads: the view itself never waits.

Each call finds the job's scheduler anew, and closes it. What a thread has read is put into a queue, and `wake` is
called. A scheduler that answers slowly is asked less often.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Final, TypeAlias

from torchx.specs import is_terminal

from muster._shared.control import ControlError
from muster._shared.job_view import JobState
from muster._shared.reports import Answer
from muster.cli import operations
from muster.cli.log_command import FILES, follow_files, has_ended, select_rank
from muster.cli.overview import STATE_CODES, open_job, read_app, read_listings, sort_apps
from muster.cli.top.picture import KEPT_LINES, JobList, JobPicture, JobRow
from muster.cli.top.state import KeyAction
from muster.schedulers.adapter.properties import list_properties
from muster.schedulers.adapter.scheduler import LogRequest
from muster.schedulers.wording.job_line import format_details, name_state
from muster.schedulers.wording.reasons import walk

MOST_JOBS: Final = 200
"""The newest of each scheduler."""
_ASKED: Final[Mapping[KeyAction, Callable[[str], Answer]]] = {
    KeyAction.STACKS: operations.stacks,
    KeyAction.WAITS: operations.stacks,
    KeyAction.CHECKPOINT: operations.checkpoint,
    KeyAction.STOP: operations.stop,
}


class Jobs:
    """All jobs, of all schedulers."""

    def list_jobs(self) -> JobList:
        """Return all jobs of all schedulers that answer."""
        listings = read_listings(list_properties(), MOST_JOBS, are_named=False)
        apps = sort_apps(app for each in listings for app in each.apps)
        return JobList(
            rows=[
                JobRow(handle=app.handle, state=name_state(app.facts), line=format_details(app.facts))
                for app in reversed(apps)
            ],
            unreachable=[f"{each.scheduler}: {each.problem}" for each in listings if each.problem],
        )

    def read_job(self, handle: str) -> JobPicture:
        """Return one job.

        Raises:
            ControlError: it cannot be read.
        """
        name, facts = read_app(handle)
        return JobPicture(
            handle=name,
            state=name_state(facts),
            line=format_details(facts, shows_progress=False),
            reasons=(*walk(facts.reasons), *(each for job in facts.jobs.values() for each in job.trouble)),
            statuses=[(role, job.status) for role, job in facts.jobs.items() if job.status is not None],
            has_ended=is_terminal(facts.state),
            exit_code=STATE_CODES[facts.state],
        )

    def ask(self, action: KeyAction, handle: str) -> Answer:
        """Ask for what a key means. A pause of a job that is paused ends it.

        Raises:
            ControlError: it cannot be asked.
        """
        if action is not KeyAction.PAUSE:
            return _ASKED[action](handle)
        is_paused = any(status.state is JobState.PAUSED for _, status in self.read_job(handle).statuses)
        return operations.resume(handle) if is_paused else operations.pause(handle)

    def follow_log(self, handle: str, role: str, node_index: int, global_rank: int) -> Iterator[str]:
        """Return the lines of one rank, and those that come, without their ends.

        They are those of its files where these are on this machine, or else those in the output of its node.

        Args:
            handle: of the job.
            role: of the rank.
            node_index: of the node that it runs on.
            global_rank: its number.

        Raises:
            ControlError: there is none.
        """
        with open_job(handle) as (scheduler, app_id):
            folder = scheduler.find_run_dir(app_id, role)
            if folder is not None:
                files = tuple(FILES.values())
                yield from follow_files(folder, global_rank, None, files, lambda: has_ended(scheduler, app_id))
                return
            lines = scheduler.read_log(app_id, LogRequest(role=role, index=node_index, follow=True))
            yield from (line.rstrip("\r\n") for line in select_rank(lines, global_rank))


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
        self._answers: queue.SimpleQueue[tuple[Origin | KeyAction, object, Content]] = queue.SimpleQueue()
        """What was reported, with the call that reported it."""
        self._looks: object = None
        """Names the present `repeat`. A thread that finds another one ends."""
        self._log: object = None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)

    def get(self) -> list[tuple[Origin | KeyAction, Content]]:
        """Return what has been read since the last call, the oldest first.

        By look or log, or on a request for an action.
        """
        found: list[tuple[Origin | KeyAction, Content]] = []
        while True:
            try:
                origin, call, content = self._answers.get_nowait()
            except queue.Empty:
                return found
            if isinstance(origin, KeyAction) or call is self._looks or call is self._log:
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

    def run(self, action: KeyAction, ask: Callable[[], Answer]) -> None:
        """Pass on the request for an action."""
        _start("request", lambda: self._report(action, None, ask))

    def _report(self, origin: Origin | KeyAction, call: object, read: "Callable[[], Content]") -> None:
        try:
            content: Content = read()
        except ControlError as error:
            content = error
        self._tell(origin, call, content)

    def _tell(self, origin: Origin | KeyAction, call: object, content: Content) -> None:
        self._answers.put((origin, call, content))
        self._wake()


def _start(what: str, run: Callable[[], None]) -> None:
    threading.Thread(target=run, name=f"muster-top-{what}", daemon=True).start()
