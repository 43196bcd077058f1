"""Writes a replica's output to three files: stdout, stderr, and both in the order in which they were written.

`OutputPipes` keeps the order. It splits a write that is longer than a packet, and the other stream's writes come in
between. The combined file gets the beginning of such a line only together with its end.
"""

import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from muster.schedulers.node_program.output_pipes import OutputPipes
from muster.schedulers.supervision.driver import EventQueue

_ERRORS: Final = "stderr"
STREAMS: Final = ("stdout", _ERRORS)
COMBINED: Final = "combined"
TIMES_RECORD: Final = struct.Struct("<dQ")
"""One row of `<stream>.times`: wall-clock seconds, and the offset of the first byte written then."""

_CUT_LIMIT_S: Final = 2.0
"""How long the beginning of a line that the pipe split waits for the rest, which comes at once if the writer runs."""

_CUT_LIMIT_BYTES: Final = 16 << 20
_TIMES_STEP_S: Final = 0.01


def log_path(folder: Path, stream: str) -> Path:
    """Return the file of a stream ("stdout", "stderr", "combined") in a replica's folder."""
    return folder / f"{stream}.log"


def times_path(folder: Path, stream: str) -> Path:
    """Return the file that records when each part of a stream was written."""
    return folder / f"{stream}.times"


class LogFile:
    """Appends to one log and its times."""

    def __init__(self, folder: Path, stream: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._fd = os.open(log_path(folder, stream), flags, 0o600)
        self._times_fd = os.open(times_path(folder, stream), flags, 0o600)
        self._offset = os.fstat(self._fd).st_size
        self._timed_s = 0.0

    def write(self, data: bytes, now_s: float) -> None:
        """Append. `now_s` is the wall clock.

        Raises:
            OSError: no space is left, or a quota is used up. A part may have been written.
        """
        if now_s - self._timed_s >= _TIMES_STEP_S:
            os.write(self._times_fd, TIMES_RECORD.pack(now_s, self._offset))
            self._timed_s = now_s
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self._offset += written
            view = view[written:]

    def close(self) -> None:
        """Release the files."""
        os.close(self._fd)
        os.close(self._times_fd)


class CombinedLog:
    """Both streams in one file, in the order in which they were written. Lines that the pipe split are joined."""

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self.partial_lines: dict[str, bytearray] = {stream: bytearray() for stream in STREAMS}
        """The beginning of a line whose end is still to come."""

    def write(self, stream: str, data: bytes, now_s: float, *, cut: bool) -> None:
        """Append the next bytes of a stream.

        Args:
            stream: the stream's name.
            data: its next bytes.
            now_s: when they came, by the wall clock.
            cut: more of the line is on its way, because the pipe split a write, or because very many writes come. Text
                that the writer itself leaves without a newline, such as a prompt or a progress bar, is written as it
                is.

        Raises:
            OSError: see `LogFile.write`. The data is lost.
        """
        partial = self.partial_lines[stream]
        end = len(data)
        if cut and len(partial) + len(data) < _CUT_LIMIT_BYTES:
            end = data.rfind(b"\n") + 1
            if not end:
                partial += data
                return
        whole = bytes(partial) + data[:end]
        partial[:] = data[end:]
        if whole:
            self._file.write(whole, now_s)


class Capture:
    """Writes the output of one start of a replica. The process gets `write_fds`. `close_write_ends` closes them here.

    A full disk loses output, not the job. A line in the log says where, once there is room.
    """

    def __init__(self, event_queue: EventQueue, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._event_queue = event_queue
        self._files = {stream: LogFile(folder, stream) for stream in (*STREAMS, COMBINED)}
        self._combined = CombinedLog(self._files[COMBINED])
        self._lost = b""
        """The line about output that could not be written, until there is room for it."""
        self._pipes = OutputPipes(event_queue.now_s)
        self._timers = {stream: f"the rest of {log_path(folder, stream)}" for stream in STREAMS}
        event_queue.watch_readable(self._pipes.fileno(), lambda: self._write_all(self._pipes.read()))

    @property
    def write_fds(self) -> tuple[int, ...]:
        """The ends that the process inherits."""
        return self._pipes.write_fds

    def write_line(self, text: str) -> None:
        """Add a line of our own to what the process writes to standard error."""
        self._write(_ERRORS, b"", cut=False)
        self._write(_ERRORS, f"{text}\n".encode(), cut=False)

    def close_write_ends(self) -> None:
        """Close our copies after the process has inherited them, so that the streams can end."""
        self._pipes.close_write_ends()

    def close(self) -> None:
        """Read what is left, then release everything. Call it after all writers have ended."""
        self.close_write_ends()
        self._write_all(self._pipes.drain())
        for stream in STREAMS:
            self._write(stream, b"", cut=False)
            self._event_queue.clear_timer(self._timers[stream])
        self._event_queue.unwatch(self._pipes.fileno())
        self._pipes.close()
        for file in self._files.values():
            file.close()

    def _write_all(self, found: Iterable[tuple[int, bytes, bool]]) -> None:
        for number, data, cut in found:
            self._write(STREAMS[number - 1], data, cut=cut)

    def _write(self, stream: str, data: bytes, *, cut: bool) -> None:
        """Write the next bytes of a stream, and the beginning of a line that waits for them. b"": there are none."""
        now_s = time.time()
        try:
            if self._lost:
                self._files[COMBINED].write(self._lost, now_s)
                self._lost = b""
            self._combined.write(stream, data, now_s, cut=cut)  # first: users read this file
            if data:
                self._files[stream].write(data, now_s)
        except OSError as error:
            self._lost = f"\n[muster] output of this node was lost here: {error.strerror}\n".encode()
        if self._combined.partial_lines[stream]:
            self._event_queue.set_timer(self._timers[stream], _CUT_LIMIT_S, lambda: self._write(stream, b"", cut=False))
