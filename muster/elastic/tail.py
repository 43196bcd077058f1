"""`TailLog`: prints what workers append to their log files, each line with a prefix.

One thread reads all files of a `TailLog`. On a terminal, the progress bar (text with carriage returns) of each file is
a live row at the bottom, and log lines are printed above. Elsewhere only its last state is printed.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from muster._shared.console.progress_bars import ProgressBars

_CHUNK_BYTES = 1 << 20
_OWNER_LIMIT_S = 5.0
"""How long lines wait for a program that draws a bar of its own to clear it."""

LineFilter = Callable[[str], bool]


class Screen:
    """Where several files are printed. The live rows at the bottom of a terminal belong to all of them.

    Standard output and standard error are two streams to one terminal, so the `TailLog`s of both share one `Screen`.
    """

    def __init__(self, progbar_events: Mapping[str, Any] | None = None, lock: Any = None) -> None:
        """Begin with an empty screen.

        Args:
            progbar_events: "trigger_clear" and "cleared", events of a program that draws a bar of its own. Before lines
                are printed, the first is set and the second awaited. Then the first is cleared.
            lock: held while something is printed. None: one of its own.
        """
        self._owner = progbar_events
        self._lock = threading.Lock() if lock is None else lock
        self._rows: dict[str, str] = {}
        """The rows by file, in the order in which the bars appeared."""
        self._terminal: TextIO | None = None
        self._bars = ProgressBars(self._find_size)

    def write(self, dst: TextIO, text: str, *, file: str, bar: str | None) -> None:
        """Print complete lines of a file, and show its unfinished progress bar.

        Args:
            dst: the stream.
            text: complete lines, or "".
            file: whose text it is.
            bar: the bar as it is now. None: it has none.
        """
        with self._lock:
            is_live = _is_terminal(dst)
            rows = dict(self._rows)
            if bar is None or not is_live:
                rows.pop(file, None)
            else:
                rows[file] = bar
            if not text and rows == self._rows:
                return
            had_rows, self._rows = bool(self._rows), rows
            with self._clear_owners_bar():
                if is_live and (had_rows or rows):
                    self._terminal = dst
                    text = self._bars.erase().decode() + text
                    text += self._bars.draw([row.encode() for row in rows.values()]).decode("utf-8", "replace")
                dst.write(text)
                with contextlib.suppress(AttributeError, ValueError):
                    dst.flush()

    @contextlib.contextmanager
    def _clear_owners_bar(self) -> Iterator[None]:
        if self._owner is None:
            yield
            return
        self._owner["trigger_clear"].set()
        try:
            if not self._owner["cleared"].wait(_OWNER_LIMIT_S):
                self._owner["trigger_clear"].clear()
                self._owner = None  # no later line need wait
            yield
        finally:
            if self._owner is not None:
                self._owner["trigger_clear"].clear()

    def _find_size(self) -> os.terminal_size:
        try:
            return os.get_terminal_size(self._terminal.fileno() if self._terminal is not None else 1)
        except (OSError, ValueError):  # it only claims to be a terminal
            return os.terminal_size((80, 24))


class _Tail:
    """One file."""

    def __init__(self, header: str, file: str, dst: TextIO, screen: Screen, line_filter: LineFilter | None) -> None:
        self._header = header
        self._file = file
        self._dst = dst
        self._screen = screen
        self._filter = line_filter
        self._fd = -1
        self._rest = b""

    def read(self) -> bool:
        """Print the lines that have come. Return False when there is no more for now. A missing file is waited for."""
        if self._fd < 0:
            try:
                self._fd = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
        data = os.read(self._fd, _CHUNK_BYTES)
        if data:
            *lines, self._rest = (self._rest + data).split(b"\n")
            bar = self._rest if b"\r" in self._rest else None
            self._print(lines, bar)
            if bar is not None:  # only its end matters
                self._rest = b"\r" + b"\r".join(bar.rsplit(b"\r", 2)[-2:])
        return bool(data)

    def _print(self, lines: list[bytes], bar: bytes | None) -> None:
        found = [f"{self._header}{text}\n" for line in lines if self._is_wanted(text := _find_last_frame(line))]
        frame = None if bar is None else _find_last_frame(bar)
        shown = f"{self._header}{frame}" if frame and self._is_wanted(frame) else None
        self._screen.write(self._dst, "".join(found), file=self._file, bar=shown)

    def _is_wanted(self, text: str) -> bool:
        return self._filter is None or self._filter(f"{text}\n")

    def close(self) -> None:
        """Print what came without an end of line, and close the file."""
        if self._rest:
            self._print([self._rest], None)
            self._rest = b""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _follow(tails: Sequence[_Tail], finished: threading.Event, interval_s: float) -> None:
    """Print files until an event is set, and then what is left."""
    while True:
        is_last = finished.is_set()  # before reading, so that all is read
        while any([tail.read() for tail in tails]):  # noqa: C419  # each file gets its turn
            pass
        if is_last:
            break
        finished.wait(interval_s)
    for tail in tails:
        tail.close()


def _find_last_frame(line: bytes) -> str:
    """Return the last state of a progress bar. Return other lines unchanged."""
    frames = [frame for frame in line.split(b"\r") if frame]
    return (frames[-1] if frames else b"").decode("utf-8", "replace")


def _is_terminal(dst: TextIO) -> bool:
    try:
        return dst.isatty()
    except (AttributeError, ValueError):
        return False


class TailLog:
    """Prints what is appended to log files until `stop`. The arguments are those of torch's class.

    Usage::

        tailer = TailLog("trainer", {0: "/tmp/0.log", 1: "/tmp/1.log"}, sys.stdout).start()
        run_trainers()
        tailer.stop()
    """

    def __init__(
        self,
        name: str,
        log_files: Mapping[int, str],
        dst: TextIO,
        log_line_prefixes: Mapping[int, str] | float | None = None,
        interval_sec: Any = 0.1,
        log_line_filter: LineFilter | None = None,
        progbar_events: Mapping[str, Any] | None = None,
        *,
        screen: Screen | None = None,
    ) -> None:
        """Keep the settings. `start` begins to read.

        It accepts two signatures, and tells them apart by the fourth argument's type. One is torch's. The other, of
        torch before 2.2 and of ice-learn, is `(name, log_files, dst, interval_sec, progbar_events)`.

        Args:
            name: a part of the default prefix, `[<name><local rank>]:`.
            log_files: paths by local rank. They need not exist yet.
            dst: where lines are printed. None: nowhere.
            log_line_prefixes: the prefixes of lines, by local rank. None: the default prefix.
            interval_sec: seconds between two looks.
            log_line_filter: returns True for a line that is printed. None: all lines are.
            progbar_events: of a program that draws a bar of its own, see `Screen`.
            screen: shared by what prints on one terminal. None: one with `progbar_events`.
        """
        if isinstance(log_line_prefixes, int | float):
            if isinstance(interval_sec, Mapping):
                progbar_events = interval_sec
            interval_sec, log_line_prefixes = log_line_prefixes, None
        prefixes = log_line_prefixes or {}
        screen = screen or Screen(progbar_events)
        self._dst = dst
        self._tails = [
            _Tail(prefixes.get(rank, f"[{name}{rank}]:"), file, dst, screen, log_line_filter)
            for rank, file in log_files.items()
            if file != os.devnull
        ]
        self._interval_s = interval_sec
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def start(self) -> "TailLog":
        """Begin to print."""
        if self._tails and self._dst is not None and self._thread is None:
            arguments = self._tails, self._finished, self._interval_s
            self._thread = threading.Thread(target=_follow, args=arguments, name="TailLog", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """Print what is in the files now, then end. Idempotent."""
        self._finished.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._stopped = True

    def stopped(self) -> bool:
        """Return True after `stop`."""
        return self._stopped


def tail_logfile(
    header: str,
    file: str,
    dst: TextIO,
    finished: threading.Event,
    interval_sec: float,
    log_line_filter: Any = None,
    progbar_events: Mapping[str, Any] | None = None,
    *,
    lock: Any = None,
) -> None:
    """Print one file in this thread until `finished` is set.

    It accepts two signatures, and tells them apart by the sixth argument's type. One is torch's. The other, of
    ice-learn, is `(header, file, dst, finished, interval_sec, lock, progbar_events)`.

    Args:
        header: the text that is printed before every line.
        file: a path. The file need not exist yet.
        dst: where lines are printed.
        finished: set when no more will be written.
        interval_sec: seconds between two looks.
        log_line_filter: returns True for a line that is printed. None: all lines are.
        progbar_events: of a program that draws a bar of its own, see `Screen`.
        lock: held while something is printed. Threads that share a progress bar pass the same lock.
    """
    if hasattr(log_line_filter, "acquire"):
        log_line_filter, lock = None, log_line_filter
    _follow([_Tail(header, file, dst, Screen(progbar_events, lock), log_line_filter)], finished, interval_sec)
