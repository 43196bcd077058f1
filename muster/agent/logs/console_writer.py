"""One output device: a queue, and one thread that writes it by plain blocking writes.

It is a thread, because a non-blocking descriptor would be non-blocking for every process that shares it.
"""

import contextlib
import errno
import os
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from muster._shared.processes import WRITE, wait_events
from muster.agent.logs.lines import AgentLine, End, Gap, Hold, Piece, Source, Span, prefix_lines
from muster.agent.runtime.loop import Clock, SideThread

if TYPE_CHECKING:
    from muster._shared.console.alike_lines import AlikeLines, HeldUnit
    from muster._shared.console.progress_bars import ProgressBars

_WRITE_BYTES = 256 << 10
_REDRAW_S = 0.05
_UNLOGGED_FACTOR = 8
_READER_BYTES = 1 << 20
_READER_BYTES_PER_S = 1e6
"""How fast Docker's engine writes into a container's log on a busy machine."""
_WAIT_S = 0.1
"""Time of waiting for the console counts in steps of at most this. While this process stands still (Ctrl-Z, a very busy
machine), the console has no chance."""


class ConsoleWriter:
    """The writer of one device.

    Callers hold `changed` around `put`, `is_open` and `has_room`; the rest belongs to the thread.
    """

    def __init__(
        self,
        *,
        is_terminal: bool,
        size_fd: int,
        backlog_bytes: int,
        bar_interval_s: float,
        clock: Clock,
        marks_bars: bool = False,
        merges_lines: bool = False,
    ) -> None:
        """Start nothing yet; see `console.Console`.

        Args:
            is_terminal: bars are live rows.
            size_fd: the terminal's descriptor.
            backlog_bytes: how much may be queued in memory.
            bar_interval_s: how often a bar is printed if it is no terminal.
            clock: the agent's.
            marks_bars: see `Env.LIVE_BARS`.
            merges_lines: whether equal lines of several ranks are printed once.
        """
        self._thread = SideThread(self._run, "muster-console")
        self.changed = self._thread.changed
        self.is_open = True
        """False once the device has no reader any more; everything is ignored then."""
        self.is_held = False
        """Whether all before a `Hold` is printed, and nothing more is until `release`."""
        self._is_holding = False
        """Whether the thread has dequeued a `Hold` that is not released."""
        self._limit_bytes = backlog_bytes
        self._bar_interval_s = bar_interval_s
        self._bar_mark = b"\r" if marks_bars else b""
        self._merges_lines = merges_lines
        self._alike: AlikeLines[Source] | None = None
        self._holds_lines = False
        """Whether `_alike` holds any lines."""
        self._is_draining = False
        """Whether a caller waits until all is printed; nothing is held then."""
        self._clock = clock
        self._queue: deque[tuple[Source, Piece]] = deque()
        self._queued_bytes = 0
        self._busy = False
        self._written_bytes = 0
        self._passed_on = 0.0
        """Of these, the bytes that a buffering reader may not have written down at `_passed_on_s`."""
        self._passed_on_s = 0.0
        self._broken_fds: set[int] = set()
        self.full_fds: set[int] = set()
        """Descriptors of files that had no room for what was written last."""
        self._bars_due_s: dict[Source, float] = {}
        self._rows: dict[Source, bytes] = {}
        self._redraw_due_s: float | None = None
        self._status = b""
        """The last of the live rows."""
        self._has_new_status = False
        self._size_fd = size_fd
        self._screen = _open_progress_bars(size_fd) if is_terminal else None

    # -- callers ----------------------------------------------------------------------------------------------------

    def has_room(self, *, logged: bool) -> bool:
        """Return whether more may be queued in memory.

        Text that is in no log file gets more room, because it would be lost.
        """
        return self._queued_bytes < self._limit_bytes * (1 if logged else _UNLOGGED_FACTOR)

    @property
    def started(self) -> bool:
        """Whether anything was ever queued."""
        return self._thread.is_started or bool(self._queue)

    def put(self, source: Source, piece: Piece) -> None:
        """Queue a piece. The caller holds `changed`."""
        if not self.is_open:
            return
        if isinstance(piece, bytes):
            self._queued_bytes += len(piece)
        self._queue.append((source, piece))
        self._thread.wake()

    def show_status(self, row: bytes) -> None:
        """Draw another last row at the bottom of the terminal, or none for b"". The caller holds `changed`."""
        if self._screen is None or not self.is_open or row == self._status:
            return
        self._status, self._has_new_status = row, True
        self._thread.wake()

    def release(self) -> None:
        """Print what is queued again. The caller holds `changed`."""
        self._is_holding = self.is_held = False
        self._queue = deque(queued for queued in self._queue if not isinstance(queued[1], Hold))
        self.changed.notify_all()

    def flush(self, limit_s: float, cap_s: float) -> int:
        """Wait until all is written; return how many bytes were discarded because the console accepts no more.

        Args:
            limit_s: how long it may accept nothing.
            cap_s: how long this may take in total.
        """
        if self._queue and not self._thread.is_started and not self._thread.wake():
            self._thread.is_closing = True
            self._run()  # no thread: blocking is better than lost output
        return 0 if self.wait_written(limit_s, cap_s) else self._discard_queue()

    def find_delay_s(self) -> float:
        """Return how long a reader may need to write down what it has read.

        Docker's reader keeps up to 1 MiB of each stream.
        """
        return max(0.0, self._passed_on / _READER_BYTES_PER_S - (self._clock.now_s() - self._passed_on_s))

    def stop(self) -> None:
        """End the thread if it is not stuck in a write. Ignore what comes from now on."""
        with self.changed:
            self.is_open = False
        self._thread.close(0.1)

    def wait_written(self, limit_s: float, cap_s: float) -> bool:
        """Wait until all is written, and return whether it is. See `flush` for the limits."""
        with self.changed:
            self._is_draining = True
            self.changed.notify_all()
            try:
                return self._wait_idle(limit_s, cap_s)
            finally:
                self._is_draining = False

    def _wait_idle(self, limit_s: float, cap_s: float) -> bool:
        seen_bytes, idle_s, waited_s = self._written_bytes, 0.0, 0.0
        while self.is_open and (self._queue or self._busy or self._holds_lines or self._has_new_status):
            if self._written_bytes != seen_bytes:
                seen_bytes, idle_s = self._written_bytes, 0.0
            left_s = min(limit_s - idle_s, cap_s - waited_s)
            if left_s <= 0.0:
                return False
            begun_s = self._clock.now_s()
            self.changed.wait(min(left_s, _WAIT_S))
            step_s = min(self._clock.now_s() - begun_s, _WAIT_S)
            idle_s, waited_s = idle_s + step_s, waited_s + step_s
        return True

    def _discard_queue(self) -> int:
        with self.changed:
            lost_bytes = self._queued_bytes
            kept: deque[tuple[Source, Piece]] = deque()
            for source, piece in self._queue:
                if isinstance(piece, AgentLine):
                    kept.append((source, piece))
                elif isinstance(piece, Span):
                    lost_bytes += piece.end - piece.start
                    piece.end = piece.start  # closed by the thread
                    kept.append((source, piece))
            self._queue = kept
            self._queued_bytes = 0
        return lost_bytes

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (batch := self._wait_batch()) is not None:
                self._print(batch)
                if batch and isinstance(batch[-1][1], Hold):
                    self._wait_released()
            if self._screen is not None:
                self._write(self._size_fd, self._screen.erase())
        finally:
            with self.changed:
                self.is_open = self._busy = False
                self._clear_queue()
                self.changed.notify_all()

    def _wait_batch(self) -> list[tuple[Source, Piece]] | None:
        """Return the pieces to print next; none if only bars are due, and None at the end."""
        with self.changed:
            if not self.is_open:
                self._clear_queue()
            self._busy = False
            self.changed.notify_all()
            while not self._queue and not (self._thread.is_closing or (self._is_draining and self._holds_lines)):
                wait_s = self._find_wait_s()
                if self._has_new_status or (wait_s is not None and wait_s <= 0):
                    break
                self.changed.wait(wait_s)
            if self._thread.is_closing and not self._queue and not (self._holds_lines and self.is_open):
                return None
            self._busy = True
            return self._dequeue_batch()

    def _wait_released(self) -> None:
        if self._screen is not None and self._is_holding:
            self._write(self._size_fd, self._screen.erase())  # redrawn below the worker's output
        with self.changed:
            self.is_held = self._is_holding
            while self._is_holding and self.is_open and not self._thread.is_closing:
                self.changed.wait()
            self._is_holding = self.is_held = False

    def _clear_queue(self) -> None:
        for _, piece in self._queue:
            if isinstance(piece, Span):
                piece.queued = False
                os.close(piece.fd)
        self._queue.clear()
        self._queued_bytes = 0

    def _find_wait_s(self) -> float | None:
        due = [*self._bars_due_s.values()]
        if self._redraw_due_s is not None:
            due.append(self._redraw_due_s)
        if self._alike is not None and self._alike.due_s is not None:
            due.append(self._alike.due_s)
        return min(due) - self._clock.now_s() if due else None

    def _dequeue_batch(self) -> list[tuple[Source, Piece]]:
        """Dequeue the next pieces, about `_WRITE_BYTES`. A span is dequeued in parts."""
        batch: list[tuple[Source, Piece]] = []
        size = 0
        while self._queue and size < _WRITE_BYTES:
            source, piece = self._queue[0]
            if isinstance(piece, Span):
                part = Span(fd=piece.fd, start=piece.start, end=min(piece.end, piece.start + _WRITE_BYTES))
                piece.start = part.end
                size += part.end - part.start
                batch.append((source, part))
                if piece.start < piece.end:
                    break
                piece.queued = False
                part.queued = False  # the last part's reader closes the descriptor
            else:
                if isinstance(piece, bytes):
                    size += len(piece)
                    self._queued_bytes -= len(piece)
                elif isinstance(piece, Gap):
                    piece.queued = False
                batch.append((source, piece))
            self._queue.popleft()
            if isinstance(piece, Hold):
                self._is_holding = True
                break
        return batch

    def _print(self, batch: list[tuple[Source, Piece]]) -> None:
        now_s = self._clock.now_s()
        output = [each for source, piece in batch for each in self._format(source, piece, now_s) if each[1]]
        output += self._print_held(now_s)
        if self._screen is None:
            output += self._print_due_bars(now_s)
        else:
            output = self._redraw(self._screen, output, now_s)
        for fd, data in _merge_output(output):
            self._write(fd, data)

    def _format(self, source: Source, piece: Piece, now_s: float) -> Iterator[tuple[int, bytes]]:
        """Return what to print of a piece, by descriptor. Held lines from before a line of the agent come first."""
        if isinstance(piece, (AgentLine, Hold, Gap)):
            yield from self._print_all_held()
        if isinstance(piece, AgentLine):
            yield source.fd, piece.data
            return
        if isinstance(piece, Hold):
            return
        if isinstance(piece, bytes):
            yield from self._say(source, source.assembler.cut(piece), now_s)
        elif isinstance(piece, Span):
            yield from self._say(source, source.assembler.cut(_read_span(piece)), now_s)
        else:
            yield from self._say(source, source.assembler.cut_rest(), now_s)
            if isinstance(piece, End) and self._alike is not None:
                yield from self._build_prefixed(self._alike.end(source, now_s))
            elif isinstance(piece, Gap) and piece.lines:
                name = source.assembler.prefix.rstrip(b": ")
                yield from self._print_all_held()
                yield source.fd, b"[muster] %d lines of %s left out: the console is too slow\n" % (piece.lines, name)
        yield source.fd, self._update_bar(source, now_s)

    def _say(self, source: Source, lines: bytes, now_s: float) -> Iterator[tuple[int, bytes]]:
        """Return what to print after a worker has written these whole lines."""
        if not lines:
            return
        if self._alike is None:
            try:
                from muster._shared.console.alike_lines import AlikeLines
            except OSError:  # no descriptors left: still show the failure
                yield source.fd, prefix_lines(source.assembler.prefix, lines)
                return
            self._alike = AlikeLines(merges_lines=self._merges_lines)
        yield from self._build_prefixed(self._alike.push(source, lines, now_s))

    def _print_held(self, now_s: float) -> Iterator[tuple[int, bytes]]:
        """Return what has been held long enough, or all if a caller waits for it and nothing else is queued."""
        if self._alike is None:
            return
        if (self._is_draining or self._thread.is_closing) and not self._queue:
            yield from self._print_all_held()
        else:
            yield from self._build_prefixed(self._alike.take_due(now_s))
        self._holds_lines = self._alike.due_s is not None

    def _print_all_held(self) -> Iterator[tuple[int, bytes]]:
        return self._build_prefixed(self._alike.take_all() if self._alike is not None else ())

    def _build_prefixed(self, entries: "Iterable[HeldUnit[Source]]") -> Iterator[tuple[int, bytes]]:
        for each in entries:
            first, others = each.speakers[0], each.speakers[1:]
            prefix = first.assembler.prefix
            if others:
                plain = first.name_ranks([speaker.ranks[0] for speaker in each.speakers])
                prefix = first.paint_prefix(plain)
                if each.is_traceback:
                    for speaker in each.speakers:
                        speaker.merged_traceback = plain
            yield first.fd, prefix_lines(prefix, each.text)

    def _update_bar(self, source: Source, now_s: float) -> bytes:
        """Follow the state of the source's bar, and return what its reader must get now."""
        if self._screen is not None:
            text = source.assembler.get_visible_text()
            if text.strip():
                self._rows[source] = source.assembler.prefix + text
            else:
                self._rows.pop(source, None)
        elif not source.assembler.holds_bar:
            self._bars_due_s.pop(source, None)
            if self._bar_mark and source.printed_bar:
                source.printed_bar = b""
                return self._bar_mark + source.assembler.prefix + b"\n"
        elif source not in self._bars_due_s:
            self._bars_due_s[source] = now_s + self._bar_interval_s
        return b""

    def _print_due_bars(self, now_s: float) -> list[tuple[int, bytes]]:
        output = []
        for source, due_s in list(self._bars_due_s.items()):
            if due_s > now_s:
                continue
            self._bars_due_s[source] = now_s + self._bar_interval_s
            frame = source.assembler.get_visible_text()
            if frame.strip() and frame != source.printed_bar:
                source.printed_bar = frame
                output.append((source.fd, self._bar_mark + source.assembler.prefix + frame + b"\n"))
        return output

    def _redraw(self, screen: "ProgressBars", output: list[tuple[int, bytes]], now_s: float) -> list[tuple[int, bytes]]:
        """Return the output with the live rows erased before it and drawn after it. Both are on the same terminal."""
        rows = [self._rows[source] for source in sorted(self._rows, key=lambda source: source.order)]
        has_new_status, self._has_new_status = self._has_new_status, False
        if has_new_status:
            self._redraw_due_s = now_s
        if not output and self._redraw_due_s is None:
            self._redraw_due_s = now_s + _REDRAW_S
            return []
        if not output and now_s < (self._redraw_due_s or 0.0):
            return []
        self._redraw_due_s = None
        fd = output[0][0] if output else self._size_fd
        return [(fd, b"".join((screen.erase(), *(data for _, data in output), screen.draw(rows, self._status))))]

    def _write(self, fd: int, data: bytes) -> None:
        if fd in self.full_fds:
            data = b"\n[muster] output was left out here: no space was left\n" + data
        view = memoryview(data)
        while view and fd not in self._broken_fds:
            view = view[self._write_some(fd, view[:_WRITE_BYTES]) :]
            if fd in self.full_fds:
                return  # the next write says so

    def _write_some(self, fd: int, view: memoryview) -> int:
        try:
            done = os.write(fd, view)
        except BlockingIOError:
            wait_events({fd: WRITE})  # another process has made it non-blocking
            return 0
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self.full_fds.add(fd)
                return 0
            self._mark_broken(fd)
            return 0
        self.full_fds.discard(fd)
        with self.changed:
            self._written_bytes += done
            self._passed_on = min(self.find_delay_s() * _READER_BYTES_PER_S + done, _READER_BYTES)
            self._passed_on_s = self._clock.now_s()
            self.changed.notify_all()
        return done

    def _mark_broken(self, fd: int) -> None:
        """Ignore everything for this device from now on, because its descriptor has no reader any more."""
        self._broken_fds.add(fd)
        with self.changed:
            self.is_open = False
            self.changed.notify_all()


def _open_progress_bars(size_fd: int) -> "ProgressBars":
    from muster._shared.console.progress_bars import ProgressBars

    return ProgressBars(lambda: _measure_terminal(size_fd))


def _measure_terminal(fd: int) -> os.terminal_size:
    """Return the columns and lines; 80 by 24 for a terminal that reports none or has just been closed."""
    try:
        size = os.get_terminal_size(fd)
    except OSError:
        size = os.terminal_size((0, 0))
    return os.terminal_size((size.columns or 80, size.lines or 24))


def _merge_output(output: list[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Join neighbours with the same descriptor, to make one write instead of many."""
    start = 0
    for index in range(1, len(output) + 1):
        if index == len(output) or output[index][0] != output[start][0]:
            yield output[start][0], b"".join(data for _, data in output[start:index])
            start = index


def _read_span(part: Span) -> bytes:
    """Read the part's bytes, and close the descriptor after the last part."""
    try:
        return os.pread(part.fd, part.end - part.start, part.start)
    except OSError as error:
        return b"\n[muster] %d bytes of output cannot be read again: %s\n" % (
            part.end - part.start,
            (error.strerror or "").encode(),
        )
    finally:
        if not part.queued:
            with contextlib.suppress(OSError):
                os.close(part.fd)
