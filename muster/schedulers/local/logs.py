"""Reads a replica's log, during the run and afterwards, from any shell."""

import re
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from muster.schedulers.lines import LineSplitter
from muster.schedulers.local.capture import TIMES_RECORD, log_path, read_notice, times_path
from muster.schedulers.supervision.file_watch import MAX_WAIT_S, Watch

CHUNK_BYTES = 65536
PARTIAL_S = 0.5
"""An unterminated line is shown after this time: a prompt, or the last output of a process that hangs."""


@dataclass(frozen=True, kw_only=True)
class FileLogQuery:
    """Selects a part of a log."""

    folder: Path
    """The replica's folder."""
    stream: str
    """stdout, stderr or combined."""
    pattern: re.Pattern[str] | None = None
    """Only lines that contain a match."""
    since_s: float | None = None
    until_s: float | None = None
    """Wall-clock seconds of this machine; both limits are exact to about 0.01 s."""
    follow: bool = False


def read_log(query: FileLogQuery, has_ended: Callable[[], bool], *also: Path) -> Iterator[str]:
    r"""Lines as they come.

    Args:
        query: which lines.
        has_ended: whether the app has ended and its logs are complete; called only when there is nothing to read.
        also: folders in which a file changes when the app ends.

    Returns:
        Lines with their newline. A last line without one comes as it is, and so does a progress bar (text with a
        carriage return) each time it is drawn; bytes that are not UTF-8 come as U+FFFD.
    """
    for line in _read_lines(query, has_ended, also):
        text = line.decode(errors="replace")
        if query.pattern is None or query.pattern.search(text):
            yield text


def _read_lines(query: FileLogQuery, has_ended: Callable[[], bool], also: tuple[Path, ...]) -> Iterator[bytes]:
    path = log_path(query.folder, query.stream)
    with Watch(query.folder, *also) as watch:
        while not path.exists():  # it was not started
            if (not query.follow or has_ended()) and not path.exists():
                return
            watch.wait()
    with Watch(query.folder, *also) as watch, open(path, "rb") as log:
        _seek_since(log, query)
        lines, last_read_s, complete, notice = LineSplitter(), time.monotonic(), False, b""
        while True:
            data = _read_until(log, query)
            if data:
                yield from lines.feed(data)
                last_read_s = time.monotonic()
                continue
            if not notice and (notice := read_notice(query.folder)):
                yield from (lines.take_rest() + b"\n", notice) if lines.has_rest() else (notice,)
            waited = time.monotonic() - last_read_s >= PARTIAL_S
            if lines.has_rest() and (lines.has_carriage_return() or complete or waited):
                yield lines.take_rest()
            if complete:
                return
            # Checked before the last read, so that all output up to the end is read.
            complete = not query.follow or has_ended() or _is_past(query)
            if not complete:
                watch.wait(PARTIAL_S if lines.has_rest() else MAX_WAIT_S)


def _seek_since(log: BinaryIO, query: FileLogQuery) -> None:
    if query.since_s is None:
        return
    offset = _find_offset(query, lambda time_s: time_s >= (query.since_s or 0.0))
    log.seek(0, 2) if offset is None else log.seek(offset)
    if log.tell() > 0:  # not from the middle of a line
        log.seek(-1, 1)
        if log.read(1) != b"\n":
            log.readline()


def _read_until(log: BinaryIO, query: FileLogQuery) -> bytes:
    limit = CHUNK_BYTES
    if query.until_s is not None:
        end = _find_offset(query, lambda time_s: time_s > (query.until_s or 0.0))
        limit = CHUNK_BYTES if end is None else max(0, min(CHUNK_BYTES, end - log.tell()))
    return log.read(limit)


def _is_past(query: FileLogQuery) -> bool:
    return query.until_s is not None and time.time() > query.until_s


def _find_offset(query: FileLogQuery, matches: Callable[[float], bool]) -> int | None:
    """The offset of the first part whose time of writing matches."""
    try:
        content = times_path(query.folder, query.stream).read_bytes()
    except FileNotFoundError:
        return None
    whole = len(content) - len(content) % TIMES_RECORD.size
    rows: Iterator[tuple[float, int]] = struct.iter_unpack(TIMES_RECORD.format, content[:whole])
    return next((offset for time_s, offset in rows if matches(time_s)), None)
