"""`TailLog`: prints what workers append to their log files, each line with a prefix.

One thread reads all files. A progress bar (text with carriage returns) becomes the live last line of a terminal, which
log lines are printed above; elsewhere only its last state is printed.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TextIO

_CHUNK_BYTES = 1 << 20
_CLEAR_LINE = "\r\x1b[K"

LineFilter = Callable[[str], bool]


class _Bar:
    """The one live line at the end of a terminal, shared by all files of a `TailLog`."""

    def __init__(self, dst: TextIO) -> None:
        self._dst = dst
        self._is_live = _is_terminal(dst)
        self._text = ""

    def write_line(self, line: str) -> None:
        """Print a line above the bar."""
        self._dst.write(f"{_CLEAR_LINE}{line}{self._text}" if self._text else line)

    def show(self, text: str) -> None:
        """Show a bar's new state; "" when it is complete."""
        if self._is_live and text != self._text:
            self._dst.write(f"{_CLEAR_LINE}{text}")
            self._text = text

    def flush(self) -> None:
        """Make it visible."""
        with contextlib.suppress(AttributeError, ValueError):
            self._dst.flush()


class _Tail:
    """One file."""

    def __init__(self, header: str, file: str, bar: _Bar, line_filter: LineFilter | None) -> None:
        self._header = header
        self._file = file
        self._bar = bar
        self._filter = line_filter
        self._fd = -1
        self._rest = b""

    def read(self) -> bool:
        """Print the lines that have come; False when there is no more for now. A missing file is waited for."""
        if self._fd < 0:
            try:
                self._fd = os.open(self._file, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
        data = os.read(self._fd, _CHUNK_BYTES)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._print(line)
        if b"\r" in self._rest:
            self._bar.show(f"{self._header}{_find_last_frame(self._rest)}")
        return bool(data)

    def _print(self, line: bytes) -> None:
        text = _find_last_frame(line)
        if self._filter is None or self._filter(f"{text}\n"):
            if b"\r" in line:
                self._bar.show("")
            self._bar.write_line(f"{self._header}{text}\n")

    def close(self) -> None:
        """Print what came without an end of line, and close the file."""
        if self._rest:
            self._print(self._rest)
            self._rest = b""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _find_last_frame(line: bytes) -> str:
    """The last state of a progress bar; other lines as they are."""
    frames = [frame for frame in line.split(b"\r") if frame]
    return (frames[-1] if frames else b"").decode("utf-8", "replace")


def _is_terminal(dst: TextIO) -> bool:
    try:
        return dst.isatty()
    except (AttributeError, ValueError):
        return False


class TailLog:
    """Prints what is appended to log files until `stop`; see torch's class, whose arguments these are.

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
        log_line_prefixes: Mapping[int, str] | None = None,
        interval_sec: float = 0.1,
        log_line_filter: LineFilter | None = None,
        progbar_events: Any = None,  # noqa: ARG002  # ice-learn's: two threads that share a terminal; here one writes
    ) -> None:
        """Nothing is read before `start`.

        Args:
            name: for the default prefix, `[<name><local rank>]:`.
            log_files: paths by local rank; they need not exist yet.
            dst: where lines are printed; None: nowhere.
            log_line_prefixes: by local rank.
            interval_sec: seconds between two looks.
            log_line_filter: True for lines that are printed; None: all are.
            progbar_events: accepted because ice-learn has it; without effect, because bars stay whole without it.
        """
        prefixes = log_line_prefixes or {}
        bar = _Bar(dst)
        self._dst = dst
        self._bar = bar
        self._tails = [
            _Tail(prefixes.get(rank, f"[{name}{rank}]:"), file, bar, log_line_filter)
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
            self._thread = threading.Thread(target=self._run, name="TailLog", daemon=True)
            self._thread.start()
        return self

    def _run(self) -> None:
        while True:
            is_last = self._finished.is_set()  # before reading: what was written until then is read
            while any([tail.read() for tail in self._tails]):  # noqa: C419  # each file gets its turn
                self._bar.flush()
            self._bar.flush()
            if is_last:
                break
            self._finished.wait(self._interval_s)
        for tail in self._tails:
            tail.close()
        self._bar.flush()

    def stop(self) -> None:
        """Print what is in the files now, then end. Idempotent."""
        self._finished.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._stopped = True

    def stopped(self) -> bool:
        """True after `stop`."""
        return self._stopped


def tail_logfile(
    header: str,
    file: str,
    dst: TextIO,
    finished: threading.Event,
    interval_sec: float,
    log_line_filter: LineFilter | None = None,
) -> None:
    """Print one file in this thread until `finished` is set; None as the filter prints every line."""
    bar = _Bar(dst)
    tail = _Tail(header, file, bar, log_line_filter)
    while True:
        is_last = finished.is_set()
        while tail.read():
            bar.flush()
        if is_last:
            break
        finished.wait(interval_sec)
    tail.close()
    bar.flush()
