"""The log of a replica that was not started: its files do not exist yet, or never will."""

import os
import tracemalloc
from pathlib import Path

import pytest

from muster.schedulers.lines import read_lines
from muster.schedulers.processes.file_logs import FileSource


@pytest.mark.parametrize("follow", [False, True])
def test_a_replica_that_was_never_started_has_no_lines(tmp_path, follow):
    """It was a traceback of the thread that reads."""
    source = FileSource(tmp_path / "r" / "0", "combined")
    assert list(read_lines(source, lambda: True, follow=follow)) == []


def test_a_follower_waits_for_the_start(tmp_path):
    folder = tmp_path / "r" / "0"
    looks = []

    def has_ended():
        looks.append(1)
        if len(looks) == 2:
            folder.mkdir(parents=True)
            (folder / "combined.log").write_text("first\n")
        return len(looks) > 2

    assert list(read_lines(FileSource(folder, "combined", tmp_path), has_ended, follow=True)) == ["first\n"]


def make_odd(path: Path, kind: str, text: bytes = b"") -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(text)
        os.truncate(path, 20 << 30)


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "device", "hole"])
def test_a_log_whose_times_are_no_file_is_read_without_them(tmp_path, kind, follow):
    (tmp_path / "combined.log").write_text("a\nb\n")
    make_odd(tmp_path / "combined.times", kind)
    until_s = 1.0 if follow else None
    assert list(read_lines(FileSource(tmp_path, "combined"), lambda: True, follow=follow, until_s=until_s)) == [
        "a\n",
        "b\n",
    ]


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_log_that_is_no_file_is_an_error(tmp_path, kind):
    make_odd(tmp_path / "combined.log", kind)
    with pytest.raises(OSError, match="a regular file"):
        list(read_lines(FileSource(tmp_path, "combined"), lambda: True))


def test_a_log_ends_where_only_a_hole_follows(tmp_path):
    make_odd(tmp_path / "combined.log", "hole", b"a\nb\n")
    tracemalloc.start()
    lines = list(read_lines(FileSource(tmp_path, "combined"), lambda: True))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (lines[:2], "".join(lines[2:]).strip("\0")) == (["a\n", "b\n"], "")
    assert peak_bytes < 8 << 20
