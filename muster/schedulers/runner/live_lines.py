"""Lines of a job for `torchx run` and `torchx log`: on a terminal by a `JobConsole`, to a pipe as they are."""

import os
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TextIO

from muster._shared.contract import print_line, show_controls
from muster.schedulers.runner.callers import find_printer, runs_command_line

if TYPE_CHECKING:  # loaded only where lines are shown
    from muster.schedulers.runner.job_console import JobConsole


def draws_bars(environ: Mapping[str, str]) -> bool:
    """Return whether this process is TorchX's command line on a terminal that can draw progress bars."""
    return runs_command_line() and sys.stdout.isatty() and sys.stderr.isatty() and environ.get("TERM") != "dumb"


def repeat_failure(app_id: str, reason: str, environ: Mapping[str, str] = os.environ) -> None:
    """Print the first paragraph of a failed job's report once more at the end of `torchx run` on a terminal.

    TorchX prints the app's status after the report, in more lines than many terminals have.
    """
    if not runs_command_line() or not sys.stderr.isatty():
        return
    from muster.schedulers.runner.job_console import allows_colours, measure

    text = show_controls(f"JOB FAILED  {app_id}: {reason}")
    for line in textwrap.wrap(text, measure(sys.stderr).columns - 1, break_long_words=False, break_on_hyphens=False):
        sys.stderr.write(f"\x1b[1;31m{line}\x1b[0m\n" if allows_colours(environ) else f"{line}\n")
    sys.stderr.flush()


def say_that_it_goes_on(line: str) -> None:
    """Print a line at the end of an interrupted `torchx run`, below the lines of the job. Programs get none."""
    if runs_command_line():
        print_line(line)


class LiveLines:
    """The lines of all replicas that one process prints. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._console: JobConsole | None = None
        self.has_printed = False
        """Whether TorchX's command line has printed lines of a job, and with them what its workers wrote."""

    def show(
        self,
        lines: Iterable[str],
        role: str,
        index: int,
        environ: Mapping[str, str] = os.environ,
        *,
        file: TextIO | None = None,
        count_merged_ranks: Callable[[], int] = lambda: 0,
        read_status: Callable[[], str] | None = None,
    ) -> Iterable[str]:
        """Return the lines for the caller to print. To a terminal, they are printed here while the caller reads them.

        Args:
            lines: of one replica, with their newlines.
            role: the replica's role.
            index: its number.
            environ: this process's environment.
            file: where the caller prints them. None: where TorchX's command line does, if that is the caller.
            count_merged_ranks: see `agent_command.count_merged_ranks`. It is called for a terminal only.
            read_status: see `JobConsole.follow_status`. None: nothing says how the job is doing.
        """
        from muster.schedulers.runner.job_console import JobConsole, unmark_bars

        file = find_printer() if file is None else file
        self.has_printed = self.has_printed or file is not None
        if file is None or not file.isatty():
            return unmark_bars(lines)
        with self._lock:
            console = self._console = self._console or JobConsole(file, environ)
        if read_status is not None:
            console.follow_status(read_status)
        return self._print(console, lines, role, index, count_merged_ranks)

    def close(self) -> None:
        """Erase the rows and draw no more: other lines follow. Does not wait long for a terminal that is stopped."""
        if self._console is not None:
            self._console.close()

    def _print(
        self, console: "JobConsole", lines: Iterable[str], role: str, index: int, count_merged_ranks: Callable[[], int]
    ) -> Iterator[str]:
        """Print when the caller begins to read, and return no lines."""
        console.print_lines(lines, role, index, count_merged_ranks())
        yield from ()
