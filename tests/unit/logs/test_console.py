"""The console with a slow reader, no reader, or a terminal. Threads and pipes, no processes."""

import errno
import fcntl
import os
import pty
import struct
import termios
import threading
import tty
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from doubles.clocks import HandClock
from terminal import render

from muster._shared.console.progress_bars import ProgressBars, fit_row
from muster.agent.config import Std
from muster.agent.logs import console as consoles
from muster.agent.logs.console import Console, Feed
from muster.agent.runtime.loop import SystemClock


class Pipe:
    """A console's other end: reads nothing until `collect`. Each end is closed once: its number may be in use again."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()

    def read_all(self) -> bytes:
        """All until the write end is closed; closes the read end."""
        fd, self.read_fd = self.read_fd, -1
        with os.fdopen(fd, "rb") as reader:
            return reader.read()

    def collect(self) -> "threading.Thread":
        """Start reading in the background; `collected` is whole when the thread is joined."""
        thread = threading.Thread(target=lambda: setattr(self, "collected", self.read_all()))
        thread.start()
        return thread

    def close_read(self) -> None:
        fd, self.read_fd = self.read_fd, -1
        if fd >= 0:
            os.close(fd)

    def close_write(self) -> None:
        fd, self.write_fd = self.write_fd, -1
        if fd >= 0:
            os.close(fd)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close_read()
    # A stuck writer gets its error only now. Until then the number of its descriptor must not be in use again.
    for thread in threading.enumerate():
        if thread.name == "muster-console":
            thread.join(30)
            assert not thread.is_alive(), "a console was not closed"
    pipe.close_write()


def open_console(pipe: Pipe, **options: Any) -> Console:
    return Console(stdout_fd=pipe.write_fd, stderr_fd=pipe.write_fd, **options)


def finish(console: Console, pipe: Pipe, reader: threading.Thread) -> bytes:
    assert console.close(limit_s=20.0)
    pipe.close_write()
    reader.join()
    return pipe.collected


def flood(console: Console, count: int = 1000, size: int = 1000) -> None:
    """More than a pipe holds."""
    feed = console.open_feed(Std.OUT, b"")
    for _ in range(count):
        feed.offer(b"x" * (size - 1) + b"\n")


def begin_closing(console: Console, **limits: float) -> tuple[threading.Thread, list[bool]]:
    """It is closed in the background; whether it was, in the end."""
    closed: list[bool] = []
    thread = threading.Thread(target=lambda: closed.append(console.close(**limits)))
    thread.start()
    return thread, closed


def finish_closing(closing: threading.Thread, pipe: Pipe) -> bytes:
    """The reader goes on."""
    reader = pipe.collect()
    closing.join()
    pipe.close_write()
    reader.join()
    return pipe.collected


def test_ours_shows_escape_sequences_and_workers_lines_pass_as_they_are(pipe: Pipe) -> None:
    """OSC 52 sets the clipboard. A path, a host name or an exception may hold it."""
    console = open_console(pipe)
    feed = console.open_feed(Std.OUT, b"")
    feed.offer(b"\x1b[31mred\x1b[0m \x1b]52;c;eA==\x07\n")
    feed.end()
    console.print_line("rank 0: \x1b]52;c;eA==\x07\x1b[2J\r\x9b2J \x1b[31mred\x1b[0m \u202ekcab\nsecond\x85line\n")
    lines = finish(console, pipe, pipe.collect()).split(b"\n")
    assert b"\x1b[31mred\x1b[0m \x1b]52;c;eA==\x07" in lines
    shown = rb"[muster] rank 0: \x1b]52;c;eA==\x07\x1b[2J\r\x9b2J red \u202ekcab"
    assert lines[1:] == [shown, rb"[muster] second\x85line", b""]


@pytest.mark.parametrize(("lost", "refusals"), [("lost\n", 100), ("x" * 300_000 + "\n", 1)])
def test_a_file_that_is_full_is_written_again_when_there_is_room(pipe, monkeypatch, lost, refusals) -> None:
    """The console was closed for good, and nothing said so. There may be room in the middle of a write."""
    write, left = os.write, [refusals]

    def write_if_there_is_room(fd: int, data: bytes) -> int:
        if fd == pipe.write_fd and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", write_if_there_is_room)
    console = open_console(pipe)
    console.print_text(lost)
    device = next(iter(console._list_devices()))
    assert device.wait_written(20.0, 20.0)
    left[0] = 0
    console.print_line("shown")
    written = finish(console, pipe, pipe.collect())
    assert written == b"\n[muster] output was left out here: no space was left\n[muster] shown\n"


def test_lines_of_many_streams_are_whole_and_in_order(pipe: Pipe) -> None:
    console = open_console(pipe)
    reader = pipe.collect()
    feeds = [console.open_feed(std, b"[%d]:" % number) for number, std in enumerate((Std.OUT, Std.ERR, Std.OUT))]
    for step in range(300):
        for number, feed in enumerate(feeds):
            feed.offer(b"stream %d line %d begins " % (number, step))
            feed.offer(b"and ends\n" if step % 2 else b"and ends\nshort\n")
        console.print_line(f"own line {step}")
    for feed in feeds:
        feed.offer(b"no newline")
        feed.end()
    lines = finish(console, pipe, reader).split(b"\n")
    for number in range(3):
        own = [line for line in lines if line.startswith(b"[%d]:stream" % number)]
        assert own == [b"[%d]:stream %d line %d begins and ends" % (number, number, step) for step in range(300)]
        assert b"[%d]:no newline" % number in lines
    assert [line for line in lines if line.startswith(b"[muster]")] == [b"[muster] own line %d" % n for n in range(300)]
    assert len(lines) == 3 * (300 + 150 + 1) + 300 + 1


WARNING = b"/x/torch/a.py:368: UserWarning: no NumPy\n  cpu = template()\n"
SHOWN = [b"/x/torch/a.py:368: UserWarning: no NumPy", b"  cpu = template()"]


def open_feeds(console: Console) -> list[Feed]:
    return [console.open_feed(Std.ERR, b"[%d]:" % number) for number in range(3)]


def test_a_warning_that_workers_write_alike_is_printed_once(pipe: Pipe) -> None:
    console = open_console(pipe, clock=HandClock())
    reader = pipe.collect()
    feeds = open_feeds(console)
    for number in (1, 0, 2):
        feeds[number].offer(b"loads\n" + WARNING + b"says %d\n" % number)
    feeds[2].offer(b"/x/b.py:1: RuntimeWarning: of one\n" + WARNING.replace(b"no", b"old"))
    feeds[1].offer(WARNING)  # it wrote that first: again is another one
    console.begin_launch()
    for number, feed in enumerate(open_feeds(console)):
        feed.offer(WARNING[:30])
        feed.offer(WARNING[30:] + b"again %d\n" % number)
    lines = finish(console, pipe, reader).splitlines()
    expected = [b"[1]:loads", *(b"[1]:" + row for row in SHOWN), b"[1]:says 1"]
    expected += [b"[0]:loads", b"[0]:says 0", b"[2]:loads", b"[2]:says 2", b"[2]:/x/b.py:1: RuntimeWarning: of one"]
    expected += [b"[2]:" + SHOWN[0].replace(b"no", b"old"), b"[2]:" + SHOWN[1], *(b"[1]:" + row for row in SHOWN)]
    expected += [*(b"[0]:" + row for row in SHOWN), b"[0]:again 0", b"[1]:again 1", b"[2]:again 2"]
    assert lines == expected


def name_ranks(ranks: Sequence[int]) -> bytes:
    return b"[w%s]:" % ",".join(map(str, sorted(ranks))).encode()


def open_ranks(console: Console, std: Std = Std.OUT) -> list[Feed]:
    return [console.open_feed(std, b"[w%d]:" % rank, rank, name_ranks) for rank in range(3)]


def test_what_workers_write_alike_is_printed_once(pipe: Pipe) -> None:
    console = open_console(pipe, clock=HandClock(), merges_lines=True)
    reader = pipe.collect()
    feeds = open_ranks(console)
    for rank, feed in enumerate(feeds):
        feed.offer(b"step 1 loss 0.%d\n" % rank)
    feeds[0].offer(b"only here\n")
    feeds[2].offer(b"step 2\n")
    console.print_line("a line of the agent comes after all that was written before it")
    feeds[1].offer(b"step 2\n")
    for feed in feeds:
        feed.end()
    assert finish(console, pipe, reader).splitlines() == [
        b"[w0,1,2]:step 1 loss 0.0",
        b"[w0]:only here",
        b"[w2]:step 2",
        b"[muster] a line of the agent comes after all that was written before it",
        b"[w1]:step 2",
    ]


def test_a_line_of_one_worker_is_printed_while_nothing_else_is_written(pipe: Pipe) -> None:
    console = open_console(pipe, merges_lines=True)
    feeds = open_ranks(console)
    feeds[1].offer(b"alone\n")
    assert os.read(pipe.read_fd, 100) == b"[w1]:alone\n"  # else it would wait for ever
    assert finish(console, pipe, pipe.collect()) == b""


def test_a_debugger_gets_the_terminal_after_what_was_held(pipe: Pipe) -> None:
    console = open_console(pipe, clock=HandClock(), merges_lines=True)
    feeds = open_ranks(console)
    feeds[1].offer(b"before\n")
    console.hold()
    assert os.read(pipe.read_fd, 100) == b"[w1]:before\n"
    console.release()
    assert finish(console, pipe, pipe.collect()) == b""


def test_the_report_learns_where_a_traceback_of_several_workers_is(pipe: Pipe) -> None:
    trace = b'Traceback (most recent call last):\n  File "a.py", line 7\nValueError: bad\n'
    console = open_console(pipe, clock=HandClock(), merges_lines=True)
    reader = pipe.collect()
    feeds = open_ranks(console, Std.ERR)
    for rank in (0, 2):
        feeds[rank].offer(trace)
    feeds[1].offer(trace.replace(b"bad", b"worse"))
    console.wait_for_output(20.0)
    assert [feed.merged_traceback for feed in feeds] == [b"[w0,2]:", b"", b"[w0,2]:"]
    text = finish(console, pipe, reader)
    assert text.count(b"[w0,2]:") == text.count(b"[w1]:") == 3


@pytest.mark.parametrize("data", [bytes(range(256)) * 40 + b"\n", b"\xff\xfe\x00\x80\n", b"y" * (10 << 20) + b"\n"])
def test_bytes_pass_unchanged(pipe: Pipe, data: bytes) -> None:
    console = open_console(pipe)
    reader = pipe.collect()
    feed = console.open_feed(Std.OUT, b"")
    for start in range(0, len(data), 100_000):
        feed.offer(data[start : start + 100_000])
    feed.end()
    assert finish(console, pipe, reader) == data


def test_a_console_that_falls_behind_reads_the_rest_from_the_log(pipe: Pipe, tmp_path: Path) -> None:
    console = open_console(pipe, backlog_bytes=64 << 10)
    feeds = [console.open_feed(Std.OUT, b"[%d]:" % number) for number in range(2)]
    logs = [os.open(tmp_path / f"{number}.log", os.O_RDWR | os.O_CREAT) for number in range(2)]
    sizes = [0, 0]
    for step in range(20_000):
        for number in range(2):
            chunk = b"stream %d line %07d, padded to be long enough to fill a pipe\n" % (number, step)
            sizes[number] += os.write(logs[number], chunk)
            feeds[number].offer(chunk, logs[number], sizes[number])
    for feed in feeds:
        feed.end()
    console.print_line("the end")
    for log in logs:
        os.close(log)
    lines = finish(console, pipe, pipe.collect()).splitlines()
    for number in range(2):
        own = [line for line in lines if line.startswith(b"[%d]:" % number)]
        assert own == [
            b"[%d]:stream %d line %07d, padded to be long enough to fill a pipe" % (number, number, step)
            for step in range(20_000)
        ]
    assert lines[-1] == b"[muster] the end"
    assert len(lines) == 40_001


def test_without_a_log_lines_are_left_out_whole_and_counted(pipe: Pipe) -> None:
    console = open_console(pipe, backlog_bytes=64 << 10)
    feed = console.open_feed(Std.OUT, b"[0]:")
    total = 40_000
    # 48 bytes each: no chunk ends just before a line's end, when the line would be shown and its end left out.
    text = b"".join(b"line %06d and some more text to fill the pipe\n" % step for step in range(total))
    for start in range(0, len(text), 1000):
        feed.offer(text[start : start + 1000])
    feed.end()
    lines = finish(console, pipe, pipe.collect()).splitlines()
    gaps = [line for line in lines if line.startswith(b"[muster]")]
    left_out = sum(int(line.split()[1]) for line in gaps)
    whole = [line for line in lines if line.endswith(b"and some more text to fill the pipe")]
    assert left_out > 0
    assert len(whole) + left_out == total
    assert b"left out: the console is too slow" in gaps[0]


def test_without_descriptors_left_lines_are_left_out_and_counted(pipe, tmp_path, monkeypatch) -> None:
    def refuse(fd: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("muster.agent.logs.console.os.dup", refuse)
    console = open_console(pipe, backlog_bytes=1)
    log = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    feed = console.open_feed(Std.OUT, b"[0]:")
    size = 0
    for step in range(3000):
        chunk = b"line %04d %s\n" % (step, b"x" * 80)
        size += os.write(log, chunk)
        feed.offer(chunk, log, size)
    feed.end()
    os.close(log)
    lines = finish(console, pipe, pipe.collect()).splitlines()
    left_out = sum(int(line.split()[1]) for line in lines if line.startswith(b"[muster]"))
    assert left_out > 0
    assert left_out + sum(line.startswith(b"[0]:") for line in lines) == 3000


def test_a_stuck_console_blocks_no_caller(pipe: Pipe) -> None:
    console = open_console(pipe, backlog_bytes=64 << 10)
    flood(console)
    assert not console.close(limit_s=0.05)


class LeapingClock(SystemClock):
    """Of a process that stands still for an hour whenever it waits."""

    def __init__(self) -> None:
        self.leaps_s = 0.0

    def now_s(self) -> float:
        self.leaps_s += 3600.0
        return super().now_s() + self.leaps_s


def test_time_in_which_the_agent_stood_still_is_not_the_consoles(pipe: Pipe) -> None:
    console = open_console(pipe, clock=LeapingClock())
    feed = console.open_feed(Std.OUT, b"[0]:")
    feed.offer(b"".join(b"line %07d\n" % step for step in range(50_000)))
    feed.end()
    closing, closed = begin_closing(console, limit_s=60.0, cap_s=1e6)
    closing.join(0.2)  # the pipe is full, and nothing reads it
    assert finish_closing(closing, pipe).count(b"\n") == 50_000
    assert closed == [True]


def test_the_agents_own_lines_survive_when_the_rest_is_discarded(pipe: Pipe) -> None:
    class Impatient(HandClock):
        """Advances at each look as long as the workers' lines are queued; what is printed afterwards has time."""

        def now_s(self) -> float:
            self.at_s += 0.06 if device is not None and device._queued_bytes else 0.0
            return self.at_s

    device = None
    console = open_console(pipe, clock=Impatient())
    flood(console)
    console.print_text("the report")
    device = console._devices[Std.OUT]
    closing, _ = begin_closing(console, limit_s=0.05)
    while device._queued_bytes:  # until close has discarded what the stuck console does not take
        closing.join(0.001)
    lines = finish_closing(closing, pipe).splitlines()
    assert lines[-2] == b"the report"
    assert lines[-1].startswith(b"[muster] the console is too slow: ")


def test_what_was_discarded_is_said_when_the_reader_goes_on(pipe: Pipe) -> None:
    console = open_console(pipe)
    flood(console)
    closing, _ = begin_closing(console, limit_s=0.01, notice_s=60.0)
    closing.join(1.2)
    assert closing.is_alive(), "the reader stands still"
    assert finish_closing(closing, pipe).splitlines()[-1].startswith(b"[muster] the console is too slow: ")


def test_a_closed_console_is_ignored(pipe: Pipe) -> None:
    pipe.close_read()
    console = open_console(pipe)
    flood(console, 100, 10_000)
    console.print_line("ignored")
    assert console.close(limit_s=20.0)


def test_no_console_at_all() -> None:
    console = Console(stdout_fd=12345, stderr_fd=12346)
    feed = console.open_feed(Std.OUT, b"")
    feed.offer(b"x\n")
    feed.end()
    console.print_line("ignored")
    assert console.close()


def test_a_descriptor_that_another_process_made_non_blocking_gets_everything(pipe: Pipe) -> None:
    os.set_blocking(pipe.write_fd, False)
    console = open_console(pipe)
    reader = pipe.collect()
    flood(console, 500, 10_000)
    assert len(finish(console, pipe, reader)) == 500 * 10_000


def test_off_a_terminal_a_bar_is_printed_once_per_interval_and_at_its_end(pipe: Pipe) -> None:
    console = open_console(pipe, bar_interval_s=0.01)
    feed = console.open_feed(Std.ERR, b"[0]:")
    feed.offer(b"\r 10%")
    with os.fdopen(pipe.read_fd, "rb", buffering=0, closefd=False) as reader:
        assert reader.read(100) == b"[0]: 10%\n"
        feed.offer(b"\r 20%\r 30%")
        assert reader.read(100) == b"[0]: 30%\n"
    feed.offer(b"\r100%\n")
    reader_thread = pipe.collect()
    assert finish(console, pipe, reader_thread) == b"[0]:100%\n"


def test_a_reader_that_draws_bars_gets_them_marked_and_hears_of_their_end(pipe, monkeypatch) -> None:
    monkeypatch.setattr(consoles, "MARKED_BAR_INTERVAL_S", 0.01)
    console = open_console(pipe, marks_bars=True)
    feed = console.open_feed(Std.ERR, b"[0]:")
    feed.offer(b"\r 10%")
    with os.fdopen(pipe.read_fd, "rb", buffering=0, closefd=False) as reader:
        assert reader.read(100) == b"\r[0]: 10%\n"
    feed.offer(b"\r100%\nnext\n")
    reader_thread = pipe.collect()
    assert finish(console, pipe, reader_thread) == b"[0]:100%\n[0]:next\n\r[0]:\n"


class Terminal:
    """A terminal of 24 rows and 40 columns; `read_until` returns what was drawn."""

    def __init__(self, rows: int = 24, columns: int = 40) -> None:
        self.master_fd, self.fd = pty.openpty()
        tty.setraw(self.fd)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.seen = b""

    def read_until(self, text: bytes) -> bytes:
        while text not in self.seen:
            self.seen += os.read(self.master_fd, 4096)
        return self.seen

    def close(self) -> None:
        os.close(self.master_fd)
        os.close(self.fd)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_on_a_terminal_every_worker_has_its_live_row_and_lines_go_above(terminal: Terminal) -> None:
    console = Console(stdout_fd=terminal.fd, stderr_fd=terminal.fd)
    bars = [console.open_feed(Std.ERR, b"[%d]:" % number) for number in range(2)]
    out = console.open_feed(Std.OUT, b"[0]:")
    bars[0].offer(b"\rfirst 10%")
    terminal.read_until(b"[0]:first 10%")
    bars[1].offer(b"\rsecond 20%")
    terminal.read_until(b"[0]:first 10%\n[1]:second 20%")
    terminal.seen = b""
    out.offer(b"a line\n")
    assert terminal.read_until(b"second 20%") == b"\r\x1b[K\x1b[A\x1b[K[0]:a line\n[0]:first 10%\n[1]:second 20%"
    terminal.seen = b""
    bars[0].offer(b"\rfirst 100%\n")
    assert terminal.read_until(b"second 20%") == b"\r\x1b[K\x1b[A\x1b[K[0]:first 100%\n[1]:second 20%"
    bars[1].offer(b"\n")
    for feed in (*bars, out):
        feed.end()
    assert console.close(limit_s=20.0)


def test_the_status_is_the_last_row_and_leaves_nothing(terminal: Terminal) -> None:
    console = Console(stdout_fd=terminal.fd, stderr_fd=terminal.fd)
    bar, out = console.open_feed(Std.ERR, b"[0]:"), console.open_feed(Std.OUT, b"[1]:")
    console.show_status("step 1 of 9")
    terminal.read_until(b"[muster] step 1 of 9")
    bar.offer(b"\r 10%")
    terminal.read_until(b"[0]: 10%\n[muster] step 1 of 9")
    out.offer(b"a line\n")
    terminal.read_until(b"[1]:a line\n[0]: 10%\n[muster] step 1 of 9")
    console.show_status("step 2 of 9")
    terminal.read_until(b"step 2 of 9")
    bar.offer(b"\r100%\n")
    for feed in (bar, out):
        feed.end()
    console.print_line("the end")
    assert console.close(limit_s=20.0)
    terminal.read_until(b"the end")
    seen = terminal.seen
    while not seen.endswith(b"\x1b[K"):
        seen += os.read(terminal.master_fd, 4096)
    assert render(seen.decode()) == ["[1]:a line", "[0]:100%", "[muster] the end", ""]


def test_a_pipe_has_no_status(pipe: Pipe) -> None:
    console = open_console(pipe)
    console.show_status("step 1 of 9")
    console.print_line("a line")
    assert finish(console, pipe, pipe.collect()) == b"[muster] a line\n"


def test_a_status_has_its_row_on_a_full_terminal() -> None:
    bars = ProgressBars(lambda: os.terminal_size((40, 5)))
    assert bars.draw([b"%d" % row for row in range(9)], b"status").split(b"\n") == [
        *(b"0", b"1", b"... and 7 more", b"status")
    ]


def test_rows_that_a_narrower_terminal_has_wrapped_are_erased() -> None:
    size = [20, 10]
    bars = ProgressBars(lambda: os.terminal_size((size[0], size[1])))
    bars.draw([b"x" * 19, b"short"])
    size[0] = 8
    assert bars.erase().count(b"\x1b[K") == 3 + 1


def test_a_terminal_without_a_size_has_80_columns() -> None:
    terminal = Terminal(0, 0)
    console = Console(stdout_fd=terminal.fd, stderr_fd=terminal.fd)
    feed = console.open_feed(Std.ERR, b"")
    feed.offer(b"\r" + b"x" * 200)
    assert terminal.read_until(b"x" * 79) == b"x" * 79
    feed.end()
    assert console.close(limit_s=20.0)
    terminal.close()


def draw_often(count: int, size: tuple[int, int], times: int = 5) -> list[str]:
    """All that a terminal of `size` (columns, lines) has in the end, with what has left it at the top."""
    bars = ProgressBars(lambda: os.terminal_size(size))
    frames = [[b"[%d]: %d%%" % (number, time) for number in range(count)] for time in range(times)]
    return render(b"".join(bars.erase() + bars.draw(rows) for rows in frames).decode(), size[1])


def test_rows_from_the_top_of_a_terminal_leave_nothing_in_its_scroll_back() -> None:
    assert draw_often(23, (80, 24)) == [f"[{number}]: 4%" for number in range(23)]


def test_rows_that_do_not_fit_are_counted() -> None:
    assert draw_often(32, (80, 24)) == [*(f"[{number}]: 4%" for number in range(22)), "... and 10 more"]
    assert draw_often(3, (80, 3)) == ["[0]: 4%", "... and 2 more"]
    assert draw_often(3, (80, 2)) == ["[0]: 4%"], "a bar is worth more than a count"


def test_rows_do_not_wrap() -> None:
    assert fit_row(b"x" * 100, 39) == b"x" * 39
    assert fit_row(b"\x1b[31mred\x1b[0m text", 39) == b"red text"
    assert fit_row("進捗バー".encode(), 5) == "進捗".encode()
    assert fit_row(b"\xff\tabc", 39).decode().endswith("    abc")


def test_what_follows_the_workers_output_comes_after_it(pipe: Pipe) -> None:
    """As Docker merges the two: its reader of standard output is slower than that of standard error."""
    merged: list[str] = []

    def read_slowly() -> None:
        while data := os.read(pipe.read_fd, 8192):
            SLOW.wait(0.001)
            merged.append("last" if data.endswith(b"last\n") else "output")

    out_fd = pipe.write_fd
    err_read_fd, err_fd = os.pipe()
    console = Console(stdout_fd=out_fd, stderr_fd=err_fd)
    feed = console.open_feed(Std.OUT, b"")
    for _ in range(20):
        feed.offer(b"x" * 65535 + b"\n")
    feed.offer(b"last\n")
    feed.end()
    reader = threading.Thread(target=read_slowly)
    reader.start()
    console.wait_for_output(20.0)
    console.print_text("report")
    assert os.read(err_read_fd, 100) == b"report\n"
    merged.append("report")
    assert console.close(limit_s=20.0)
    pipe.close_write()
    reader.join()
    os.close(err_read_fd)
    os.close(err_fd)
    assert merged[-2:] == ["last", "report"]


@pytest.mark.parametrize("size_bytes", [10, 1 << 20], ids=["written and not read", "not even written"])
def test_what_follows_does_not_wait_for_ever_for_a_reader_that_has_stopped(pipe: Pipe, size_bytes: int) -> None:
    err_read_fd, err_fd = os.pipe()
    console = Console(stdout_fd=pipe.write_fd, stderr_fd=err_fd)
    feed = console.open_feed(Std.OUT, b"")
    feed.offer(b"x" * size_bytes + b"\n")
    feed.end()
    waiting = threading.Thread(target=console.wait_for_output, args=(0.05,), daemon=True)
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive()
    console.print_text("report")
    assert os.read(err_read_fd, 100) == b"report\n"
    reading = pipe.collect()
    assert console.close(limit_s=20.0)
    pipe.close_write()
    reading.join()
    os.close(err_read_fd)
    os.close(err_fd)


SLOW = threading.Event()
"""Never set."""
