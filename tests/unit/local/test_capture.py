"""Writing a replica's output to files, also when the disk is full."""

import errno
import os
import threading
import time

from muster.schedulers.lines import TimedLine, read_lines
from muster.schedulers.processes import capture
from muster.schedulers.processes.capture import Capture
from muster.schedulers.processes.file_logs import FileSource
from muster.schedulers.supervision.driver import EventQueue

PACKET = 4096
"""The largest packet of the pipe; a longer write comes in several packets."""


def write_output(made, event_queue, *texts, stream=0):
    for text in texts:
        os.write(made.write_fds[stream], text)
        event_queue.run_once()


def read(folder, stream="combined"):
    return list(read_lines(FileSource(folder, stream), lambda: True))


def test_lines_have_the_times_at_which_they_were_written(tmp_path, monkeypatch):
    event_queue, now = EventQueue(), [100.0]
    monkeypatch.setattr(capture.time, "time", lambda: now[0])
    made = Capture(event_queue, tmp_path)
    write_output(made, event_queue, b"one\ntwo\nthr")
    now[0] = 107.5
    write_output(made, event_queue, b"ee\n")
    write_output(made, event_queue, b"error\n", stream=1)
    made.close()
    event_queue.close()
    times = [(line, line.at_s) for line in read(tmp_path)]
    assert times == [("one\n", 100.0), ("two\n", 100.0), ("three\n", 107.5), ("error\n", 107.5)]
    (tmp_path / "combined.times").unlink()  # as in a log of another program
    assert not any(isinstance(line, TimedLine) for line in read(tmp_path))


def capture_all(folder, count):
    """Write lines in a thread, and capture them: those of standard output come in two parts."""
    event_queue = EventQueue()
    made = Capture(event_queue, folder)
    texts = [text for number in range(count) for text in (b"rank 1 ", b"of %d\n" % number, b"error %d\n" % number)]

    def write_all():
        for text in texts:
            os.write(made.write_fds[text.startswith(b"error")], text)
        event_queue.post("over")

    writer = threading.Thread(target=write_all)
    writer.start()
    while event_queue.pop() is None:
        event_queue.run_once()
    writer.join()
    made.close()
    event_queue.close()
    return b"".join(texts).decode().splitlines(keepends=True)


def test_two_writes_to_one_stream_come_before_a_later_one_to_the_other(tmp_path, monkeypatch):
    """Both come while the write before them is on its way to the disk."""
    write = capture.LogFile.write

    def write_slowly(*args):
        write(*args)
        time.sleep(0.002)

    monkeypatch.setattr(capture.LogFile, "write", write_slowly)
    expected = capture_all(tmp_path, 50)
    assert read(tmp_path) == expected


def test_a_flood_cuts_no_line(tmp_path):
    expected = capture_all(tmp_path, 20000)
    assert sorted(read(tmp_path)) == sorted(expected)


def test_a_full_disk_loses_output_and_reports_it_once(tmp_path, monkeypatch):
    def refuse(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    event_queue = EventQueue()
    made = Capture(event_queue, tmp_path)
    write_output(made, event_queue, b"one\n", b"tw")
    with monkeypatch.context() as full:
        full.setattr(capture.LogFile, "write", refuse)
        write_output(made, event_queue, b"o\n", b"three\n")
    write_output(made, event_queue, b"there is room again\n")
    made.close()
    event_queue.close()
    lost = "[muster] output of this node was lost here: No space left on device\n"
    assert read(tmp_path) == ["one\n", "tw\n", lost, "there is room again\n"]
    assert read(tmp_path, "stdout") == ["one\n", "twthere is room again\n"]


def test_long_lines_come_whole(tmp_path):
    long = b"x" * (1 << 20)
    (tmp_path / "stdout.log").write_bytes(b"one\n\ntwo" + long + b"\n" + long)
    assert [len(line) for line in read(tmp_path, "stdout")] == [4, 1, 3 + len(long) + 1, len(long)]


def test_a_line_that_the_pipe_split_is_joined(tmp_path):
    event_queue = EventQueue()
    made = Capture(event_queue, tmp_path)
    write_output(made, event_queue, b"a\n" + b"o" * (PACKET - 2))
    write_output(made, event_queue, b"e" * PACKET, b"e\n", stream=1)
    write_output(made, event_queue, b"o" * PACKET, b"o\nb\n")
    made.close()
    event_queue.close()
    assert read(tmp_path) == ["a\n", "e" * (PACKET + 1) + "\n", "o" * (2 * PACKET - 1) + "\n", "b\n"]


def test_what_the_writer_left_without_an_end_is_shown_at_once(tmp_path):
    event_queue = EventQueue()
    made = Capture(event_queue, tmp_path)
    write_output(made, event_queue, b"name? ")
    write_output(made, event_queue, b"no\n", stream=1)
    assert read(tmp_path) == ["name? no\n"]
    made.close()
    event_queue.close()


def test_a_cut_line_whose_end_does_not_come_is_shown_after_a_while(tmp_path):
    now_s = 100.0
    event_queue = EventQueue(now_s=lambda: now_s)
    made = Capture(event_queue, tmp_path)
    write_output(made, event_queue, b"o" * PACKET)
    assert read(tmp_path) == []
    now_s += 60.0
    event_queue.run_once()
    assert read(tmp_path) == ["o" * PACKET]
    write_output(made, event_queue, b"p" * PACKET)
    made.close()
    event_queue.close()
    assert read(tmp_path) == ["o" * PACKET + "p" * PACKET]


def test_a_line_of_our_own_comes_after_what_the_process_has_written(tmp_path):
    event_queue = EventQueue()
    made = Capture(event_queue, tmp_path)
    write_output(made, event_queue, b"before\n", stream=1)
    made.write_line("[muster] why")
    write_output(made, event_queue, b"after\n", stream=1)
    made.close()
    event_queue.close()
    for stream in ("combined", "stderr"):
        assert read(tmp_path, stream) == ["before\n", "[muster] why\n", "after\n"]
