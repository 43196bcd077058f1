"""The console: workers' lines and the agent's own, whole, in order, and never in anybody's way.

Who offers never waits: beyond the backlog's limit a stream that has a log file is merely noted ("from here to there in
the file") and read again when the console comes round to it; one without a file loses lines, and says how many.
"""

import os
from collections.abc import Iterable

from muster.agent.config import Std
from muster.agent.logs.console_queue import AgentLine, End, Gap, Span
from muster.agent.logs.console_writer import ConsoleWriter
from muster.agent.logs.lines import LineAssembler
from muster.agent.runtime.clock import Clock, SystemClock

BACKLOG_BYTES = 4 << 20
"""What may wait in memory for one device; eight times that of streams that have no log file."""

BAR_INTERVAL_S = 5.0
"""Where the console is no terminal, a progress bar is printed this often."""

SAY_PREFIX = "[muster] "


class Feed:
    """One worker's stream on its way to the console. Offered to by one thread."""

    __slots__ = ("_cut_off", "_device", "_fd", "_last", "assembler", "shown")

    def __init__(self, device: ConsoleWriter | None, fd: int, prefix: bytes) -> None:
        self._device = device
        self._fd = fd
        self.assembler = LineAssembler(prefix)
        self.shown = b""
        """The state of the bar that was printed last; the device's."""
        self._last: Span | Gap | None = None
        self._cut_off = False

    @property
    def fd(self) -> int:
        """The descriptor its lines are written to."""
        return self._fd

    def offer(self, chunk: bytes, log_fd: int | None = None, log_end: int = 0) -> None:
        """Hand on the stream's next bytes; never waits.

        Args:
            chunk: the bytes.
            log_fd: a readable descriptor of the log file that holds them too; None: there is none.
            log_end: the file's size after them.
        """
        device = self._device
        if device is None:
            return
        with device.changed:
            if not device.alive:
                return
            if device.has_room(logged=log_fd is not None):
                self._put(device, chunk)
            elif log_fd is not None:
                self._note_span(device, chunk, log_fd, log_end)
            else:
                self._drop(device, chunk)

    def end(self) -> None:
        """The stream is over: its unterminated last line may be printed."""
        if self._device is not None:
            with self._device.changed:
                self._device.put(self, End())

    def _put(self, device: ConsoleWriter, chunk: bytes) -> None:
        if self._cut_off:
            # The first bytes after dropped ones are the rest of a line whose beginning is gone.
            rest, newline, chunk = chunk.partition(b"\n")
            self._drop(device, rest + newline)
            if not chunk:
                return
        self._last = None
        device.put(self, chunk)

    def _note_span(self, device: ConsoleWriter, chunk: bytes, log_fd: int, end: int) -> None:
        start, last = end - len(chunk), self._last
        if isinstance(last, Span) and last.waits and last.end == start:
            last.end = end
            return
        try:
            fd = os.dup(log_fd)
        except OSError:  # no descriptors left: the file has the lines, the console does without
            self._drop(device, chunk)
            return
        self._last = Span(fd=fd, start=start, end=end)
        device.put(self, self._last)

    def _drop(self, device: ConsoleWriter, chunk: bytes) -> None:
        lines = chunk.count(b"\n")
        self._cut_off = not chunk.endswith(b"\n")
        if isinstance(self._last, Gap) and self._last.waits:
            self._last.lines += lines
            return
        self._last = Gap(lines=lines)
        device.put(self, self._last)


class Console:
    """Standard output and error of the agent, or any two descriptors. `close` it to get everything out.

    Both are one device when they are the same terminal, pipe or file, so that lines of the two are never mixed.
    """

    def __init__(
        self,
        *,
        stdout_fd: int = 1,
        stderr_fd: int = 2,
        backlog_bytes: int = BACKLOG_BYTES,
        bar_interval_s: float = BAR_INTERVAL_S,
        clock: Clock | None = None,
    ) -> None:
        self._fds = {Std.OUT: stdout_fd, Std.ERR: stderr_fd}
        self._clock = clock or SystemClock()
        identities = {std: identify_device(fd) for std, fd in self._fds.items()}
        by_identity = {
            identity: ConsoleWriter(
                is_terminal=os.isatty(fd),
                size_fd=fd,
                backlog_bytes=backlog_bytes,
                bar_interval_s=bar_interval_s,
                clock=self._clock,
            )
            for std, fd in self._fds.items()
            if (identity := identities[std]) is not None
        }
        self._devices = {std: by_identity[i] if i is not None else None for std, i in identities.items()}
        self._own = Feed(self._devices[Std.ERR], stderr_fd, b"")

    def feed(self, std: Std, prefix: bytes) -> Feed:
        """A way in for one worker's stream; every line gets the prefix. `end` it."""
        return Feed(self._devices[std], self._fds[std], prefix)

    def say(self, line: str) -> None:
        """One or more lines of the agent's own, each marked as such, on standard error."""
        self.print_page("\n".join(SAY_PREFIX + part for part in line.splitlines() or [""]))

    def print_page(self, text: str) -> None:
        """A text of the agent's own as it is, in one piece, on standard error. Never dropped for a slow console."""
        device = self._devices[Std.ERR]
        if device is not None:
            data = text.rstrip("\n").encode("utf-8", "backslashreplace") + b"\n"
            with device.changed:
                device.put(self._own, AgentLine(data=data))

    def close(self, limit_s: float = 2.0, cap_s: float = 30.0) -> bool:
        """Write out what waits and stop. Returns whether everything was written.

        A console that still takes bytes is waited for; one that has taken none for `limit_s` is given up, and so is
        any after `cap_s`: then workers' lines are left out (their files have them) and the agent's own get one more
        chance. A closed console accepts and ignores.

        Args:
            limit_s: seconds without progress.
            cap_s: seconds in all.
        """
        devices = [device for device in self._distinct() if device.started]
        end_s = self._clock.now_s() + cap_s
        lost_bytes = sum([device.drain(limit_s, end_s) for device in devices])
        own = self._devices[Std.ERR]
        if lost_bytes and own is not None:
            self.say(f"the console is too slow: {lost_bytes} bytes of the workers' output were left out")
            own.drain(1.0, self._clock.now_s() + 1.0)
        for device in self._distinct():
            device.stop()
        return not lost_bytes

    def _distinct(self) -> Iterable[ConsoleWriter]:
        return {id(device): device for device in self._devices.values() if device is not None}.values()


def identify_device(fd: int) -> tuple[int, int, int] | None:
    """What two descriptors share when they lead to the same place; None: the descriptor is closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_rdev
