"""Makes a round's folder and opens its log files, in a thread of its own because their disk may hang.

The same thread does everything else in the folder that is no worker's output: the event log, error files, stacks.
"""

import contextlib
import errno
import os
from collections.abc import Callable
from typing import TypeVar

from muster._shared.contract import LogNames
from muster._shared.records import record
from muster.agent.config import LogConfig, Std
from muster.agent.errors import EnvironmentFault, InternalError
from muster.agent.logs.files import LogFile
from muster.agent.logs.routing import FolderLayout, Layout, WorkerRoute
from muster.agent.round import Round
from muster.agent.runtime.loop import Loop, LoopThread, Timer

T = TypeVar("T")

OPEN_LIMIT_S = 10.0
"""How long the job waits for log files before it continues without them."""

_READ_LIMIT_S = 0.5
"""How long the agent's loop may wait for a small file; it sends a heartbeat each second."""


@record
class WorkerFiles:
    """One worker's route, and the files that could be opened for it."""

    route: WorkerRoute
    logs: dict[Std, LogFile]
    """The worker's pumps close them; the opener closes those without a pump."""
    filtered: dict[Std, LogFile]
    """The ranks of an attempt share these files; the opener closes them."""


@record
class OnTrouble:
    """How the opener reports trouble."""

    report_no_files: Callable[[OSError], None]
    """Called in the agent's thread: from now on there are no files."""
    report_incomplete: Callable[[str], None]
    """Called in any thread with one line about a file that cannot be written."""


class _Opening:
    """One round's files while they are being opened."""

    def __init__(self) -> None:
        self.is_over = False
        self.timer: Timer | None = None
        self.thens: list[Callable[[], None]] = []


class FileOpener:
    """Opens the files of each round. Close it. All methods are for the agent's thread."""

    def __init__(
        self, config: LogConfig, loop: Loop, make_layout: Callable[[], Layout], *, nproc: int, on_trouble: OnTrouble
    ) -> None:
        """Make the run's folder. If that fails, report it and write no files.

        Args:
            config: the flags.
            loop: the agent's.
            make_layout: makes the run's folder; raises OSError.
            nproc: workers on this node.
            on_trouble: gets reports of what goes wrong.

        Raises:
            EnvironmentFault: the machine has no thread left.
        """
        self._config = config
        self._loop = loop
        self._nproc = nproc
        self._on_trouble = on_trouble
        self._opening: _Opening | None = None
        self._workers: dict[int, WorkerFiles] = {}
        self._filtered: dict[str, LogFile] = {}
        """Files by path; belongs to the thread."""
        self._attempt = -1
        """The attempt that they were opened for; belongs to the thread."""
        try:
            self.thread = LoopThread(loop, "muster-files", on_failure=raise_broken)
        except RuntimeError as error:
            raise EnvironmentFault(f"cannot start a thread for log files: {os.strerror(errno.EAGAIN)}") from error
        self._layout: Layout = FolderLayout(config, None)
        made = self.call(lambda: _capture_error(make_layout), OPEN_LIMIT_S)
        if made is None:
            made = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        if isinstance(made, OSError):
            on_trouble.report_no_files(made)
        else:
            self._layout = made

    @property
    def run_dir(self) -> str | None:
        """`<log_dir>/<run_id>`; None if there are no files."""
        return self._layout.run_dir

    def open_round(self, round: Round) -> None:  # noqa: A002
        """Begin to open the round's files. A round of the same attempt appends to the same files."""
        if self._opening is not None:
            self._opening.is_over = True
        self._close_unused()
        opening = self._opening = _Opening()
        layout = self._layout
        if isinstance(layout, FolderLayout) and layout.run_dir is None:
            self._end_opening(opening, round, self._open(layout, round))  # nothing could hang
            return

        def open_files() -> None:
            if self._attempt != round.attempt:
                self._close_filtered()
                self._attempt = round.attempt
            opened = _capture_error(lambda: self._open(layout, round))
            self.thread.reply(lambda: self._end_opening(opening, round, opened))

        self.thread.submit(open_files)
        late = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), layout.run_dir)
        opening.timer = self._loop.call_later(OPEN_LIMIT_S, lambda: self._end_opening(opening, round, late))

    def run_when_open(self, then: Callable[[], None]) -> None:
        """Call `then` when the round's files are open or cannot be opened, perhaps at once."""
        if self._opening is None:
            then()
        else:
            self._opening.thens.append(then)

    def hand_out(self, local_rank: int) -> WorkerFiles:
        """Return the worker's files of the open round, once.

        Raises:
            InternalError: the files are not open yet.
        """
        if local_rank not in self._workers or self._opening is not None:
            raise InternalError("a worker is started before its files are open")
        return self._workers.pop(local_rank)

    def take_back(self, files: list[LogFile]) -> None:
        """Close log files that got no pump."""
        for file in files:
            self.thread.submit(file.close)

    def call(self, read: Callable[[], T], limit_s: float = _READ_LIMIT_S) -> T | None:
        """Make a call that may block in the thread; return None if it takes longer, or an earlier call still hangs."""
        results: list[T] = []
        self.thread.run(lambda: results.append(read()), limit_s)
        return results[0] if results else None

    def close(self, limit_s: float) -> bool:
        """Write what is waiting and release everything; return False if the disk hangs. Idempotent."""
        self._close_unused()
        self.thread.submit(self._close_filtered)
        self.thread.submit(self._layout.close)
        return self.thread.close(limit_s)

    def _end_opening(self, opening: _Opening, round: Round, opened: "dict[int, WorkerFiles] | OSError") -> None:  # noqa: A002
        if opening.timer is not None:
            opening.timer.cancel()
        if opening.is_over:
            if not isinstance(opened, OSError):
                self.take_back(_list_logs(opened))
            return
        opening.is_over = True
        if isinstance(opened, OSError):
            self._on_trouble.report_no_files(opened)
            self._layout = FolderLayout(self._config, None)
            opened = self._open(self._layout, round)
        self._workers = opened
        self._opening = None
        for then in opening.thens:
            then()

    def _close_unused(self) -> None:
        """Close the files of workers that were never started, because a round may be over before."""
        self.take_back(_list_logs(self._workers))
        self._workers = {}

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _open(self, layout: Layout, round: Round) -> dict[int, WorkerFiles]:  # noqa: A002
        layout.open_round(round, self._nproc)
        return {local_rank: self._open_worker(layout.route_worker(local_rank)) for local_rank in range(self._nproc)}

    def _open_worker(self, route: WorkerRoute) -> WorkerFiles:
        if route.error_file is not None:
            for stale in (route.error_file, f"{route.error_file}{LogNames.EXIT_SUFFIX}"):
                with contextlib.suppress(OSError):  # left by an earlier round of this attempt
                    os.unlink(stale)
        found = WorkerFiles(route=route, logs={}, filtered={})
        for std, stream in route.streams.items():
            file = self._open_file(stream.path)
            if file is not None:
                found.logs[std] = file
            path = stream.filtered_path
            if path is not None and path not in self._filtered:
                file = self._open_file(path)
                if file is not None:
                    self._filtered[path] = file
            if path in self._filtered:
                found.filtered[std] = self._filtered[path]
        return found

    def _open_file(self, path: str | None) -> LogFile | None:
        if path is None:
            return None
        try:
            return LogFile(path, self._on_trouble.report_incomplete)
        except OSError as error:
            self._on_trouble.report_incomplete(f"cannot write {path}: {error.strerror}")
            return None

    def _close_filtered(self) -> None:
        for file in self._filtered.values():
            file.close()
        self._filtered = {}


def _list_logs(workers: dict[int, WorkerFiles]) -> list[LogFile]:
    return [file for worker in workers.values() for file in worker.logs.values()]


def raise_broken() -> None:
    """Raise on the agent's loop when a thread has failed, because a failed job is better than one that hangs.

    Raises:
        InternalError: always.
    """
    raise InternalError("the log thread has failed, see the error above")


def _capture_error(call: Callable[[], T]) -> T | OSError:
    try:
        return call()
    except OSError as error:
        return error
