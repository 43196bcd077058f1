"""One place that takes output: a queue, and one thread that writes it with plain blocking writes.

A thread, because making the descriptor non-blocking would do so for every process that shares it.
"""

import os
import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from muster.agent.logs.console_queue import AgentLine, Gap, Piece, Source, Span, merge_output, read_span
from muster.agent.runtime.clock import Clock

if TYPE_CHECKING:  # needed on a terminal only
    from muster.agent.logs.progress_bars import ProgressBars

_WRITE_BYTES = 256 << 10
_REDRAW_S = 0.05
_UNLOGGED_FACTOR = 8


class ConsoleWriter:
    """Callers hold `changed` around `put`, `alive` and `has_room`; everything else is the thread's."""

    def __init__(
        self, *, is_terminal: bool, size_fd: int, backlog_bytes: int, bar_interval_s: float, clock: Clock
    ) -> None:
        self.changed = threading.Condition()
        self.alive = True
        """False once nobody reads any more: everything is ignored then."""
        self._limit_bytes = backlog_bytes
        self._bar_interval_s = bar_interval_s
        self._clock = clock
        self._queue: deque[tuple[Source, Piece]] = deque()
        self._queued_bytes = 0
        self._busy = False
        self._stopping = False
        self._taken_bytes = 0
        self._thread: threading.Thread | None = None
        self._dead_fds: set[int] = set()
        self._bars_due_s: dict[Source, float] = {}
        self._live: dict[Source, bytes] = {}
        self._redraw_due_s: float | None = None
        self._size_fd = size_fd
        self._screen = _open_progress_bars(size_fd) if is_terminal else None

    # -- callers ----------------------------------------------------------------------------------------------------

    def has_room(self, *, logged: bool) -> bool:
        """Whether more may wait in memory; what no log file holds may wait longer, for it would be lost."""
        return self._queued_bytes < self._limit_bytes * (1 if logged else _UNLOGGED_FACTOR)

    @property
    def started(self) -> bool:
        """Whether anything was ever put."""
        return self._thread is not None or bool(self._queue)

    def put(self, source: Source, piece: Piece) -> None:
        """Queue a piece; the caller holds `changed`."""
        if not self.alive:
            return
        if isinstance(piece, bytes):
            self._queued_bytes += len(piece)
        self._queue.append((source, piece))
        if self._thread is None and not self._start_thread():
            return
        self.changed.notify_all()

    def _start_thread(self) -> bool:
        """False when there are no processes left for one: tried again with the next piece, which finds the queue."""
        thread = threading.Thread(target=self._run, name="muster-console", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # what `threading` makes of EAGAIN
            return False
        self._thread = thread
        return True

    def drain(self, limit_s: float, end_s: float) -> int:
        """Wait until all is written; returns how many bytes were given up because the console takes no more.

        Args:
            limit_s: how long it may take nothing.
            end_s: the latest time on the clock.
        """
        if self._queue and self._thread is None and not self._start_thread():
            self._stopping = True
            self._run()  # even now no process is left for a thread: a stuck console would hold us, lost words are worse
        return 0 if self._wait_idle(limit_s, end_s) else self._give_up()

    def stop(self) -> None:
        """End the thread if it is not stuck in a write; ignore what comes from now on."""
        with self.changed:
            self.alive = False
            self._stopping = True
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join(0.1)

    def _wait_idle(self, limit_s: float, end_s: float) -> bool:
        with self.changed:
            seen_bytes, give_up_s = self._taken_bytes, self._clock.now_s() + limit_s
            while self.alive and (self._queue or self._busy):
                now_s = self._clock.now_s()
                if self._taken_bytes != seen_bytes:
                    seen_bytes, give_up_s = self._taken_bytes, now_s + limit_s
                if now_s >= min(give_up_s, end_s):
                    return False
                self.changed.wait(min(give_up_s, end_s) - now_s)
        return True

    def _give_up(self) -> int:
        with self.changed:
            lost_bytes = self._queued_bytes
            kept: deque[tuple[Source, Piece]] = deque()
            for source, piece in self._queue:
                if isinstance(piece, AgentLine):
                    kept.append((source, piece))
                elif isinstance(piece, Span):
                    lost_bytes += piece.end - piece.start
                    piece.end = piece.start  # the thread closes its descriptor
                    kept.append((source, piece))
            self._queue = kept
            self._queued_bytes = 0
        return lost_bytes

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (batch := self._wait_batch()) is not None:
                self._print(batch)
        finally:
            with self.changed:
                self.alive = self._busy = False
                self._forget_queue()
                self.changed.notify_all()

    def _wait_batch(self) -> list[tuple[Source, Piece]] | None:
        """What is to be printed next, nothing when only bars are due; None when all is over."""
        with self.changed:
            if not self.alive:
                self._forget_queue()
            self._busy = False
            self.changed.notify_all()
            while not self._queue and not self._stopping:
                wait_s = self._idle_s()
                if wait_s is not None and wait_s <= 0:
                    break
                self.changed.wait(wait_s)
            if self._stopping and not self._queue:
                return None
            self._busy = True
            return self._take()

    def _forget_queue(self) -> None:
        for _, piece in self._queue:
            if isinstance(piece, Span):
                piece.waits = False
                os.close(piece.fd)
        self._queue.clear()
        self._queued_bytes = 0

    def _idle_s(self) -> float | None:
        due = [*self._bars_due_s.values()]
        if self._redraw_due_s is not None:
            due.append(self._redraw_due_s)
        return min(due) - self._clock.now_s() if due else None

    def _take(self) -> list[tuple[Source, Piece]]:
        """The next pieces, about `_WRITE_BYTES` of them; a span is taken a part at a time."""
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
                piece.waits = False
                part.waits = False  # the last part: its reader closes the descriptor
            else:
                if isinstance(piece, bytes):
                    size += len(piece)
                    self._queued_bytes -= len(piece)
                elif isinstance(piece, Gap):
                    piece.waits = False
                batch.append((source, piece))
            self._queue.popleft()
        return batch

    def _print(self, batch: list[tuple[Source, Piece]]) -> None:
        now_s = self._clock.now_s()
        output = [(source.fd, data) for source, piece in batch for data in self._compose(source, piece, now_s) if data]
        if self._screen is None:
            output += self._show_bars(now_s)
        else:
            output = self._redraw(self._screen, output, now_s)
        for fd, data in merge_output(output):
            self._write(fd, data)

    def _compose(self, source: Source, piece: Piece, now_s: float) -> Iterator[bytes]:
        if isinstance(piece, AgentLine):
            yield piece.data
            return
        if isinstance(piece, bytes):
            yield source.assembler.push(piece)
        elif isinstance(piece, Span):
            yield source.assembler.push(read_span(piece))
        else:
            yield source.assembler.finish()
            if isinstance(piece, Gap) and piece.lines:
                yield b"[muster] %d lines of %s left out: the console is too slow\n" % (
                    piece.lines,
                    source.assembler.prefix.rstrip(b": "),
                )
        self._note_live(source, now_s)

    def _note_live(self, source: Source, now_s: float) -> None:
        if self._screen is not None:
            live = source.assembler.live()
            if live.strip():
                self._live[source] = source.assembler.prefix + live
            else:
                self._live.pop(source, None)
        elif not source.assembler.holds_bar:
            self._bars_due_s.pop(source, None)
        elif source not in self._bars_due_s:
            self._bars_due_s[source] = now_s + self._bar_interval_s

    def _show_bars(self, now_s: float) -> list[tuple[int, bytes]]:
        output = []
        for source, due_s in list(self._bars_due_s.items()):
            if due_s > now_s:
                continue
            self._bars_due_s[source] = now_s + self._bar_interval_s
            frame = source.assembler.live()
            if frame.strip() and frame != source.shown:
                source.shown = frame
                output.append((source.fd, source.assembler.prefix + frame + b"\n"))
        return output

    def _redraw(self, screen: "ProgressBars", output: list[tuple[int, bytes]], now_s: float) -> list[tuple[int, bytes]]:
        """The output with the live rows taken away before it and put back after it; both are the same terminal."""
        rows = [self._live[source] for source in sorted(self._live, key=_order_row)]
        if not output and self._redraw_due_s is None:
            self._redraw_due_s = now_s + _REDRAW_S
            return []
        if not output and now_s < (self._redraw_due_s or 0.0):
            return []
        self._redraw_due_s = None
        fd = output[0][0] if output else self._size_fd
        return [(fd, b"".join((screen.erase(), *(data for _, data in output), screen.draw(rows))))]

    def _write(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view and fd not in self._dead_fds:
            view = view[self._write_some(fd, view[:_WRITE_BYTES]) :]

    def _write_some(self, fd: int, view: memoryview) -> int:
        try:
            done = os.write(fd, view)
        except BlockingIOError:
            _wait_writable(fd)
            return 0
        except OSError:
            self._bury(fd)
            return 0
        with self.changed:
            self._taken_bytes += done
            self.changed.notify_all()
        return done

    def _bury(self, fd: int) -> None:
        """Nobody reads this descriptor any more."""
        self._dead_fds.add(fd)
        with self.changed:
            self.alive = False
            self.changed.notify_all()


def _open_progress_bars(size_fd: int) -> "ProgressBars":
    from muster.agent.logs.progress_bars import ProgressBars

    return ProgressBars(lambda: _measure_terminal(size_fd))


def _order_row(source: Source) -> tuple[int, bytes]:
    return len(source.assembler.prefix), source.assembler.prefix  # [w2] before [w10]


def _measure_terminal(fd: int) -> os.terminal_size:
    """Columns and lines; 80 by 24 for a terminal that does not know, or has just been hung up."""
    try:
        size = os.get_terminal_size(fd)
    except OSError:
        size = os.terminal_size((0, 0))
    return os.terminal_size((size.columns or 80, size.lines or 24))


def _wait_writable(fd: int) -> None:
    """Somebody made the descriptor non-blocking: wait until it takes more."""
    import select

    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    poller.poll()
