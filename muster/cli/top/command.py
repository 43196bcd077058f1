"""The command `muster top`: chooses the view, a line per change, one page, or JSON."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Final

from muster._shared.codec import to_data
from muster._shared.contract import print_line, show_controls
from muster._shared.control import CommandExit, ControlError
from muster._shared.job_view import JobEvent
from muster.cli.overview import STATE_CODES, build_entry, print_list, read_app
from muster.cli.top.agent_requests import EVERY_S, MOST_JOBS, Jobs
from muster.cli.top.picture import JobPicture

_PROGRESS_S: Final = 60.0
"""How often it is printed how far a job is, if nothing else changes."""
_PAGE_COLUMNS: Final = 200
"""The width of a page that goes into a pipe or a file."""
_NO_RICH: Final = "muster top draws with rich, which is not installed: pip install 'torchx-muster[top]'"


def show(handle: str | None, *, once: bool, as_json: bool) -> int:
    """Show a job, or all of them.

    Args:
        handle: what a person calls the job. None: all jobs.
        once: print one page and return.
        as_json: print one line of JSON and return.

    Returns:
        The exit code: it says the job's state, as of `muster status`. 0 for the list of all jobs.

    Raises:
        ControlError: the job cannot be read, or rich is not installed.
    """
    if handle is None and (as_json or once or not _has_terminal()):
        return print_list((), limit=MOST_JOBS, as_json=as_json)
    if as_json:
        return _print_json(handle or "")
    if once:
        return _print_page(handle or "")
    if _has_terminal():
        return _run_view(handle)
    return follow(Jobs(), handle or "", lambda line: print_line(line, sys.stdout)).exit_code


def _has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def _print_json(handle: str) -> int:
    name, facts = read_app(handle)
    code = STATE_CODES[facts.state]
    statuses = {role: to_data(job.status) for role, job in facts.jobs.items() if job.status is not None}
    print(json.dumps({**build_entry(name, facts), "statuses": statuses, "exit_code": code}))
    return code


def _print_page(handle: str) -> int:
    _check_rich()
    from muster.cli.top.rendering import print_once

    picture = Jobs().read_job(handle)
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else _PAGE_COLUMNS
    for row in print_once(picture, width, has_colours=is_terminal and not os.environ.get("NO_COLOR")):
        print(row)
    return picture.exit_code


def _run_view(handle: str | None) -> int:
    _check_rich()
    from muster.cli.top.app import run
    from muster.cli.top.screen import ClosedError

    try:
        failure, picture = run(Jobs(), handle)
    except ClosedError as error:
        return error.code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if failure is not None:
        raise failure
    return 0 if picture is None else picture.exit_code


def _check_rich() -> None:
    if find_spec("rich") is None:
        raise ControlError(_NO_RICH, CommandExit.REFUSED)


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
