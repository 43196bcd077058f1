"""Lines of a job for `torchx run` and `torchx log`: on a terminal with colours, and progress bars as live rows below.

An agent whose reader is a terminal (`Env.LIVE_BARS`) writes the state of each bar once a second as a line that begins
with a carriage return, and such a line without text when the bar has ended. Any other reader gets these as plain lines.
Warnings that several replicas write alike are printed once by TorchX's command line, see `alike_warnings`.
"""

import os
import sys
import textwrap
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TextIO

from muster._shared.progress_bars import ProgressBars
from muster.schedulers.runner.callers import find_printer, runs_command_line
from muster.schedulers.runner.shown.alike_warnings import PREFIX, AlikeWarnings

_HEADLINE: Final = "JOB FAILED "
_RANK_COLOURS: Final = ("36", "33", "35", "32", "34", "96", "93", "95", "92", "94")
"""As the agent's on a terminal."""
_MARK: Final = "\r"
_CLOSE_LIMIT_S: Final = 1.0


def draws_bars(environ: Mapping[str, str]) -> bool:
    """Whether this process is TorchX's command line on a terminal that can draw progress bars."""
    return runs_command_line() and sys.stdout.isatty() and sys.stderr.isatty() and environ.get("TERM") != "dumb"


def allows_colours(environ: Mapping[str, str]) -> bool:
    """Whether the user has not refused colours, on a terminal that may have any. Source: https://no-color.org."""
    return not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


def add_colours(line: str) -> str:
    """The line with its prefix in its rank's colour; the headline of a failed job in red."""
    found = PREFIX.match(line)
    if found is not None:
        code = _RANK_COLOURS[int(found["rank"] or found["local"]) % len(_RANK_COLOURS)]
        return f"\x1b[{code}m{found[0]}\x1b[0m{line[found.end() :]}"
    return f"\x1b[1;31m{line.rstrip()}\x1b[0m\n" if line.startswith(_HEADLINE) else line


def repeat_failure(app_id: str, reason: str, environ: Mapping[str, str] = os.environ) -> None:
    """Print the first paragraph of a failed job's report once more at the end of `torchx run` on a terminal.

    TorchX prints the app's status after the report, in more lines than many terminals have.
    """
    if not runs_command_line() or not sys.stderr.isatty():
        return
    text = f"{_HEADLINE} {app_id}: {reason}"
    for line in textwrap.wrap(text, measure(sys.stderr).columns - 1, break_long_words=False, break_on_hyphens=False):
        sys.stderr.write(f"\x1b[1;31m{line}\x1b[0m\n" if allows_colours(environ) else f"{line}\n")
    sys.stderr.flush()


class LiveLines:
    """The lines of all replicas that one process prints, and the live rows below them. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, int, int, str], bytes] = {}
        self._bars: ProgressBars | None = None
        self._file: TextIO | None = None
        self._is_closed = False
        self._warnings = AlikeWarnings()
        self.has_printed = False
        """Whether TorchX's command line has printed lines of a job, and with them what its workers wrote."""

    def show(
        self, lines: Iterable[str], role: str, index: int, environ: Mapping[str, str] = os.environ
    ) -> Iterable[str]:
        """The lines for the caller to print; their bars are drawn here if TorchX's command line prints to a terminal.

        Args:
            lines: of one replica, with their newlines.
            role: the replica's role.
            index: its number.
            environ: this process's environment.
        """
        file = find_printer()
        if file is not None:
            self.has_printed = True
            lines = self._warnings.leave_out(lines)
        if file is None or not file.isatty() or environ.get("TERM", "dumb") == "dumb":
            return _unmark(lines)
        with self._lock:
            self._file = file
            self._bars = self._bars or ProgressBars(lambda: measure(file))
        return self._draw_among(lines, role, index, has_colour=allows_colours(environ))

    def close(self) -> None:
        """Erase the rows and draw no more: other lines follow. Does not wait long for a terminal that is stopped."""
        self._is_closed = True
        if self._lock.acquire(timeout=_CLOSE_LIMIT_S):
            self._erase()
            self._rows.clear()
            self._lock.release()

    def _draw_among(self, lines: Iterable[str], role: str, index: int, *, has_colour: bool) -> Iterator[str]:
        try:
            for line in lines:
                bar = _parse_bar(line)
                if bar is not None:
                    self._set_row((role, index, *bar[0]), f"{role}/{index} {line[1:-1]}" if bar[1] else "")
                    continue
                with self._lock:  # until the caller has printed the line
                    self._erase()
                    yield add_colours(line) if has_colour else line
                    if line.endswith("\n"):
                        self._draw()
        finally:
            with self._lock:
                self._erase()
                for key in [key for key in self._rows if key[:2] == (role, index)]:
                    del self._rows[key]
                self._draw()

    def _set_row(self, key: tuple[str, int, int, str], text: str) -> None:
        with self._lock:
            if text:
                self._rows[key] = text.encode()
            else:
                self._rows.pop(key, None)
            self._erase()
            self._draw()

    def _erase(self) -> None:
        if self._bars is not None:
            self._write(self._bars.erase())

    def _draw(self) -> None:
        if self._bars is not None and self._rows and not self._is_closed:
            self._write(self._bars.draw([self._rows[key] for key in sorted(self._rows)]))

    def _write(self, data: bytes) -> None:
        if data and self._file is not None:
            self._file.write(data.decode())
            self._file.flush()


def measure(file: TextIO) -> os.terminal_size:
    """Columns and lines; 80 by 24 for a terminal that reports none."""
    try:
        size = os.get_terminal_size(file.fileno())
    except OSError:
        size = os.terminal_size((0, 0))
    return os.terminal_size((size.columns or 80, size.lines or 24))


def _parse_bar(line: str) -> "tuple[tuple[int, str], str] | None":
    """The rank (as a number, and the whole prefix) and the state of a bar; None: the line is another."""
    if not line.startswith(_MARK) or not line.endswith("\n"):
        return None
    found = PREFIX.match(line, 1)
    if found is None:
        return None
    return (int(found["rank"] or found["local"]), found[0]), line[found.end() :].strip()


def _unmark(lines: Iterable[str]) -> Iterator[str]:
    """Bars as plain lines."""
    for line in lines:
        bar = _parse_bar(line) if line.startswith(_MARK) else None
        if bar is None:
            yield line
        elif bar[1]:
            yield line[1:]
