"""The console: workers' lines and the agent's own, whole, in order, and without blocking any caller.

`offer` never waits. Beyond the backlog's limit, a stream with a log file only queues a span of that file, which the
console reads in its turn. A stream without a file drops lines, and the console prints how many.
"""

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence

from muster._shared.contract import show_controls
from muster.agent.config import Std
from muster.agent.logs.console_writer import ConsoleWriter
from muster.agent.logs.lines import AgentLine, End, Gap, Hold, LineAssembler, Span
from muster.agent.runtime.loop import Clock, SystemClock

BACKLOG_BYTES = 4 << 20
"""How much may be queued in memory for one device. Streams without a log file may queue eight times as much."""

BAR_INTERVAL_S = 5.0
"""How often a console that is not a terminal gets a progress bar."""

MARKED_BAR_INTERVAL_S = 1.0
"""How often a reader that draws the bars itself gets them, see `Env.LIVE_BARS`."""

AGENT_PREFIX = "[muster] "

_LOOK_S = 0.005


class Feed:
    """Sends one worker's stream to the console. Only one thread may call it."""

    __slots__ = (
        *("_colour", "_cut_off", "_device", "_fd", "_last", "_name_ranks", "assembler", "launch", "merged_traceback"),
        *("order", "printed_bar", "ranks", "stream"),
    )

    def __init__(
        self,
        device: ConsoleWriter | None,
        fd: int,
        prefix: bytes,
        *,
        colour: int | None = None,
        stream: Std = Std.ERR,
        rank: int = 0,
        launch: dict[Std, int] | None = None,
        name_ranks: "Callable[[Sequence[int]], bytes] | None" = None,
    ) -> None:
        self._device = device
        self._fd = fd
        self._colour = colour
        self._name_ranks = name_ranks
        self.stream = stream
        self.ranks = (rank,)
        self.launch = {} if launch is None else launch
        """How many workers that were started together have each stream on the console."""
        self.merged_traceback = b""
        self.assembler = LineAssembler(self.paint_prefix(prefix))
        self.order = len(prefix), prefix
        self.printed_bar = b""
        """The state of the bar that was printed last. It belongs to the device."""
        self._last: Span | Gap | None = None
        self._cut_off = False

    @property
    def fd(self) -> int:
        """The descriptor its lines are written to."""
        return self._fd

    @property
    def peers(self) -> int:
        """How many workers have this stream on the console."""
        return self.launch.get(self.stream, 0)

    def name_ranks(self, ranks: Sequence[int]) -> bytes:
        """Return the prefix for lines that these ranks have printed, this one among them."""
        return self.assembler.prefix if self._name_ranks is None else self._name_ranks(ranks)

    def paint_prefix(self, prefix: bytes) -> bytes:
        """Return a prefix in the colour of its rank."""
        return prefix if self._colour is None else paint(prefix, _RANK_COLOURS[self._colour])

    def offer(self, chunk: bytes, log_fd: int | None = None, log_end: int = 0) -> None:
        """Queue the stream's next bytes; never waits.

        Args:
            chunk: the bytes.
            log_fd: a readable descriptor of the log file that also has them; None if there is none.
            log_end: the file's size after them.
        """
        device = self._device
        if device is None:
            return
        with device.changed:
            if not device.is_open:
                return
            if device.has_room(logged=log_fd is not None):
                self._queue_bytes(device, chunk)
            elif log_fd is not None:
                self._queue_span(device, chunk, log_fd, log_end)
            else:
                self._drop_lines(device, chunk)

    def end(self) -> None:
        """End the stream: its unterminated last line may be printed."""
        if self._device is not None:
            with self._device.changed:
                self._device.put(self, End())

    def _queue_bytes(self, device: ConsoleWriter, chunk: bytes) -> None:
        if self._cut_off:
            # The rest of a line whose beginning was dropped.
            rest, newline, chunk = chunk.partition(b"\n")
            self._drop_lines(device, rest + newline)
            if not chunk:
                return
        self._last = None
        device.put(self, chunk)

    def _queue_span(self, device: ConsoleWriter, chunk: bytes, log_fd: int, end: int) -> None:
        start, last = end - len(chunk), self._last
        if isinstance(last, Span) and last.queued and last.end == start:
            last.end = end
            return
        try:
            fd = os.dup(log_fd)
        except OSError:  # no descriptors left: log file only
            self._drop_lines(device, chunk)
            return
        self._last = Span(fd=fd, start=start, end=end)
        device.put(self, self._last)

    def _drop_lines(self, device: ConsoleWriter, chunk: bytes) -> None:
        lines = chunk.count(b"\n")
        self._cut_off = not chunk.endswith(b"\n")
        if isinstance(self._last, Gap) and self._last.queued:
            self._last.lines += lines
            return
        self._last = Gap(lines=lines)
        device.put(self, self._last)


_RANK_COLOURS = (b"36", b"33", b"35", b"32", b"34", b"96", b"93", b"95", b"92", b"94")
"""Colours for the prefixes of neighbouring ranks; not red, which is for failures."""


def paint(text: bytes, colour: bytes) -> bytes:
    """Return the text in a colour; the code is the parameter of the terminal's SGR sequence."""
    return b"\x1b[%sm%s\x1b[0m" % (colour, text)


class Console:
    """Standard output and error of the agent, or any two descriptors. `close` writes out what is queued.

    Both count as one device if they are the same terminal, pipe or file, so that their lines are never mixed.
    """

    def __init__(
        self,
        *,
        stdout_fd: int = 1,
        stderr_fd: int = 2,
        backlog_bytes: int = BACKLOG_BYTES,
        bar_interval_s: float = BAR_INTERVAL_S,
        clock: Clock | None = None,
        has_colour: bool = False,
        marks_bars: bool = False,
        merges_lines: bool = False,
    ) -> None:
        self._has_colour = has_colour
        self._fds = {Std.OUT: stdout_fd, Std.ERR: stderr_fd}
        self._clock = clock = clock or SystemClock()
        self._merges_lines = merges_lines
        self._launch: dict[Std, int] = {}
        identities = {std: identify_device(fd) for std, fd in self._fds.items()}
        by_identity = {
            identity: ConsoleWriter(
                is_terminal=os.isatty(fd),
                size_fd=fd,
                backlog_bytes=backlog_bytes,
                bar_interval_s=MARKED_BAR_INTERVAL_S if marks_bars else bar_interval_s,
                marks_bars=marks_bars,
                merges_lines=merges_lines,
                clock=clock,
            )
            for std, fd in self._fds.items()
            if (identity := identities[std]) is not None
        }
        self._devices = {std: by_identity[i] if i is not None else None for std, i in identities.items()}
        self._agent_feed = Feed(self._devices[Std.ERR], stderr_fd, b"")

    def has_colour(self, std: Std) -> bool:
        """Return whether what is written there may have colours.

        That is the case if it is a terminal, and the user has not refused colours.
        """
        return self._has_colour and os.isatty(self._fds[std])

    def begin_launch(self) -> None:
        """Compare lines only with those of workers that are started from now on."""
        self._launch = {}

    def open_feed(
        self,
        std: Std,
        prefix: bytes,
        rank: int = 0,
        name_ranks: "Callable[[Sequence[int]], bytes] | None" = None,
    ) -> Feed:
        """Open a feed for one worker's stream; every line gets the prefix. The caller ends it.

        Args:
            std: which stream.
            prefix: that of each line.
            rank: that in the job; it determines the prefix's colour on a terminal.
            name_ranks: builds the prefix of lines that several ranks have written alike.
        """
        self._launch[std] = self._launch.get(std, 0) + 1
        return Feed(
            self._devices[std],
            self._fds[std],
            prefix,
            colour=rank % len(_RANK_COLOURS) if prefix and self.has_colour(std) else None,
            stream=std,
            rank=rank,
            launch=self._launch,
            name_ranks=name_ranks,
        )

    def print_line(self, line: str) -> None:
        """Print one or more lines of the agent on standard error, each with its prefix."""
        parts = show_controls(line).splitlines() or [""]
        self.print_text("\n".join(AGENT_PREFIX + part for part in parts))

    def print_text(self, text: str) -> None:
        """Print a text of the agent unchanged and in one piece on standard error. A slow console never drops it."""
        device = self._devices[Std.ERR]
        if device is not None:
            data = text.rstrip("\n").encode("utf-8", "backslashreplace") + b"\n"
            with device.changed:
                device.put(self._agent_feed, AgentLine(data=data))

    def show_status(self, line: str) -> None:
        """Show the job's progress in the last row of the terminal, or no such row for "". Elsewhere, show nothing."""
        device = self._devices[Std.ERR]
        if device is not None and device is self._devices[Std.OUT]:
            with device.changed:
                device.show_status(f"{AGENT_PREFIX}{line}".encode() if line else b"")

    def wait_for_output(self, cap_s: float, limit_s: float = 2.0) -> None:
        """Wait until standard output is written and read, so that later output on standard error follows it.

        If lines are merged, also wait for standard error, because then the prefixes of tracebacks are known. Two pipes
        have no common order. Docker merges them and buffers for a reader that cannot be observed, so the time that the
        reader needs is estimated.

        Args:
            cap_s: seconds in total.
            limit_s: how long the console may accept nothing.
        """
        until_s = time.monotonic() + cap_s
        device, own = self._devices[Std.OUT], self._devices[Std.ERR]
        if self._merges_lines and own is not None and own.started:
            own.wait_written(limit_s, cap_s)
        if device is None or device is own or not device.started:
            return
        if device.wait_written(limit_s, cap_s):
            _wait_read(self._fds[Std.OUT], until_s, device.find_delay_s)

    def hold(self) -> None:
        """Print what is queued, and then nothing until `release`, because a worker gets the terminal."""
        for device in self._list_devices():
            with device.changed:
                device.put(self._agent_feed, Hold())

    @property
    def is_held(self) -> bool:
        """Whether everything that was queued before `hold` is printed."""
        return all(device.is_held for device in self._list_devices() if device.is_open)

    def release(self) -> None:
        """Print again. Idempotent."""
        for device in self._list_devices():
            with device.changed:
                device.release()

    def close(self, limit_s: float = 10.0, cap_s: float = 30.0, notice_s: float = 1.0) -> bool:
        """Write out what is queued and stop; return whether everything was written.

        This waits while the console accepts bytes, but not after `limit_s` without progress or `cap_s` in total. Then
        it discards the workers' lines (their files have them) and says so, with the agent's own lines, if the console
        accepts that within `notice_s`. A closed console ignores what it gets.

        Args:
            limit_s: seconds without progress.
            cap_s: seconds in total, for each of the two devices.
            notice_s: seconds for the line about what was discarded.
        """
        self.release()
        devices = [device for device in self._list_devices() if device.started]
        lost_bytes = sum([device.flush(limit_s, cap_s) for device in devices])
        own = self._devices[Std.ERR]
        if lost_bytes and own is not None:
            self.print_line(f"the console is too slow: {lost_bytes} bytes of the workers' output were left out")
            own.flush(notice_s, notice_s)
        if own is not None and any(device.full_fds for device in devices):
            self.print_line("no space was left for the end of the output")
            own.flush(1.0, 1.0)
        for device in self._list_devices():
            device.stop()
        return not lost_bytes

    def _list_devices(self) -> Iterable[ConsoleWriter]:
        return {id(device): device for device in self._devices.values() if device is not None}.values()


def _wait_read(fd: int, until_s: float, find_delay_s: Callable[[], float]) -> None:
    """Wait until a pipe's reader has read all that is in it, and written it down. Other devices need no wait."""
    import fcntl
    import termios

    with contextlib.suppress(OSError):
        while stat.S_ISFIFO(os.fstat(fd).st_mode) and time.monotonic() < until_s:
            unread = fcntl.ioctl(fd, termios.FIONREAD, bytes(4))
            if not any(unread):
                time.sleep(max(0.0, min(find_delay_s(), until_s - time.monotonic())))
                return
            time.sleep(_LOOK_S)


def identify_device(fd: int) -> tuple[int, int, int] | None:
    """Return a key that is equal for two descriptors of the same device; None if the descriptor is closed."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_rdev
