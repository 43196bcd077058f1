"""Prints the lines of a job's replicas as they come, with progress bars below them on a terminal.

`muster run` and `muster log` own their terminal, so bars, colours and the report at the end need nothing of TorchX.
"""

import heapq
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, TextIO

from muster._shared.reports import Failure
from muster.cli.answers import say
from muster.schedulers.lines import TimedLine
from muster.schedulers.runner.job_console import PREFIX, allows_colours, paint_line
from muster.schedulers.runner.live_lines import LiveLines

Replica = tuple[str, int]
"""The role's name, and the replica's number."""

RULE: Final = re.compile(r"={40,}\s*")
"""The first and the last line of the report of a failed job."""
HEADLINE: Final = "JOB FAILED "
"""How the line after the first begins."""
LAST_LINES_S: Final = 10.0
"""How long the last lines of a job that has ended may take."""


class LinePrinter:
    """Prints the lines of several replicas to one stream, each with its replica before it.

    The report of a failed job, with what its agent says after it, is held back until `print_reports`. Nodes end one
    after the other, and their last lines would come below it.

    Args:
        file: where to.
        holds_reports: False: a report is printed as it comes.
        shows_lines: False: only the reports that were held back are printed.
    """

    def __init__(self, file: TextIO, *, holds_reports: bool = True, shows_lines: bool = True) -> None:
        self._file = file
        self._holds_reports = holds_reports
        self._shows_lines = shows_lines
        self._live = LiveLines()
        self._reports: dict[Replica, list[str]] = {}
        self._threads: list[threading.Thread] = []
        self._errors: list[Exception] = []
        self._count_merged_ranks: Callable[[str], int] = lambda _: 0
        self._read_status: Callable[[], str] | None = None
        self._has_colour = file.isatty() and allows_colours(os.environ)

    def start(
        self,
        replicas: Sequence[Replica],
        read: Callable[[str, int], Iterable[str]],
        count_merged_ranks: Callable[[str], int] = lambda _: 0,
        read_status: Callable[[], str] | None = None,
        *,
        by_time: bool = False,
    ) -> None:
        """Begin to print, each replica in a thread of its own.

        Args:
            replicas: whose.
            read: (role, index) -> the replica's lines.
            count_merged_ranks: role -> see `PluginScheduler.count_merged_ranks`.
            read_status: see `PluginScheduler.read_status_line`. None: no row says how the job is doing.
            by_time: print the lines of all replicas in the order of their times, see `TimeOrder`. Nothing is followed.
        """
        self._read_status = read_status
        self._count_merged_ranks = count_merged_ranks
        order = TimeOrder(len(replicas)) if by_time else None
        for number, (role, index) in enumerate(replicas):
            args = (role, index, read, order, number)
            name = f"muster-log-{role}-{index}"
            thread = threading.Thread(target=self._print_lines, args=args, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def wait(self) -> None:
        """Wait until all lines are printed.

        Raises:
            Exception: the first that a reader has raised.
        """
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def finish(self, limit_s: float = LAST_LINES_S) -> bool:
        """Wait for the last lines of a job that has ended, and print its reports. Return whether there was one.

        What a reader has raised is a line: how the job has ended does not depend on it. It is none where no lines are
        shown.
        """
        deadline_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self.close()
        for error in self._errors[:1] if self._shows_lines else ():
            say(f"lines are missing: {error}")
        return self.print_reports()

    def close(self) -> None:
        """Draw no more bars."""
        self._live.close()

    def print_reports(self) -> bool:
        """Print the reports that were held back, and return whether there was one."""
        reports, self._reports = self._reports, {}
        for line in chain(*reports.values()):
            self._file.write(paint_line(line) if self._has_colour else line)
        self._file.flush()
        return any(reports.values())

    def _print_lines(
        self,
        role: str,
        index: int,
        read: Callable[[str, int], Iterable[str]],
        order: "TimeOrder | None",
        number: int,
    ) -> None:
        prefix = f"\x1b[32m{role}/{index}\x1b[0m " if self._has_colour else f"{role}/{index} "
        try:
            lines = read(role, index)
            if order is not None:
                lines = order.take_turns(number, lines)
            if self._holds_reports:
                lines = hold_report(lines, self._reports.setdefault((role, index), []))
            if not self._shows_lines:
                for _ in lines:
                    pass
                return
            shown = self._live.show(
                lines,
                role,
                index,
                file=self._file,
                count_merged_ranks=lambda: self._count_merged_ranks(role),
                read_status=self._read_status,
            )
            for line in shown:
                self._file.write(add_prefix(prefix, line))
                self._file.flush()
        except Exception as error:  # noqa: BLE001  # `wait` raises it
            self._errors.append(error)
        finally:
            if order is not None:
                order.end()


def hold_report(lines: Iterable[str], held: list[str]) -> Iterator[str]:
    """Return the lines of a replica without the report of its failed job, which `held` gets, and what follows it.

    If the replica's workers write again, it was not the last: it is returned.
    """
    rule = ""
    for line in lines:
        if held and PREFIX.match(line) is None:
            held.append(line)
        elif held:
            yield from held
            held.clear()
            yield line
        elif rule and line.startswith(HEADLINE):
            held += [rule, line]
            rule = ""
        else:
            if rule:
                yield rule
            rule = line if RULE.fullmatch(line) else ""
            if not rule:
                yield line
    if rule:
        yield rule


class TimeOrder:
    """Lets threads that read one log each take turns, so that lines come in the order of their times.

    A line without a time follows the one before it at once. So logs without times come one after the other. Lines of
    one time come in the order of the logs.

    Args:
        count: of the logs, which have the numbers from 0 on.
    """

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._open = count
        self._heads: list[tuple[float, int]] = []
        """A heap: the time of the next line of each log whose thread waits, and the log's number."""
        self._turns = [threading.Lock() for _ in range(count)]
        """Unlocked only by who gives the turn: a semaphore takes longer than a line."""
        for turn in self._turns:
            turn.acquire()

    def take_turns(self, number: int, lines: Iterable[str]) -> Iterator[str]:
        """Yield each line when it is its turn. It is printed before any other thread gets its next line."""
        for line in lines:
            with self._lock:
                heapq.heappush(self._heads, (line.at_s if isinstance(line, TimedLine) else -math.inf, number))
                self._start_next()
            self._turns[number].acquire()
            yield line

    def end(self) -> None:
        """Note that a log has ended, or cannot be read. Its thread calls it."""
        with self._lock:
            self._open -= 1
            self._start_next()

    def _start_next(self) -> None:
        """Give the turn to the earliest line, once the next line of every log is known."""
        if self._heads and len(self._heads) == self._open:
            _, number = heapq.heappop(self._heads)
            self._turns[number].release()


def add_prefix(prefix: str, line: str) -> str:
    """Return the line with the prefix, also where it is drawn anew after a carriage return."""
    if "\r" in line.rstrip("\r\n"):
        line = line.replace("\r", f"\r{prefix}")
    return line if line.startswith("\r") else f"{prefix}{line}"


def list_stderr(failure: Failure) -> Iterator[str]:
    """Yield the last lines of a rank's stderr, and its traceback unless they have it. Nothing: the report has none."""
    yield from failure.stderr_tail
    tail = "\n".join(failure.stderr_tail)
    text = failure.traceback or failure.exception or ""
    if any(line.strip() not in tail for line in text.splitlines()):
        yield from text.splitlines()
