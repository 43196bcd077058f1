"""The output and files that a host keeps until the link has them."""

import errno
import os
import resource
from collections.abc import Iterator

import pytest

from muster.schedulers.node_program import keeper, run_files
from muster.schedulers.node_program.frames import CHUNK_BYTES, FrameReader, Kind, pack
from muster.schedulers.node_program.run_files import ChangedFiles, keep_file

OUT, ERR = Kind.OUT, Kind.ERR


@pytest.fixture
def spool(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return keeper._Spool()


def take(spool: keeper._Spool) -> Iterator[tuple[bytes, bytes]]:
    """Receive all, as a link does."""
    while data := spool.read():
        yield from FrameReader().feed(data)


WRITTEN = [(OUT, b"line "), (OUT, b"1\n"), (ERR, b"error 1\n"), (OUT, b"line 2\n"), (ERR, b"err"), (ERR, b"or 2\n")]


def count_bytes(frames: list[tuple[bytes, bytes]]) -> int:
    return sum(len(pack(*each)) for each in frames)


@pytest.mark.parametrize("count", range(len(WRITTEN) + 1))
def test_another_link_goes_on_where_the_earlier_one_ended(spool, count):
    for each in WRITTEN:
        spool.add(*each)
    assert list(take(spool)) == WRITTEN
    spool.rewind(count_bytes(WRITTEN[:count]))
    assert list(take(spool)) == WRITTEN[count:]
    spool.rewind(0)
    assert list(take(spool)) == WRITTEN


def test_much_output_comes_whole_and_in_order(spool):
    long = os.urandom(CHUNK_BYTES * 3 + 7)
    spool.add(OUT, b"before\n")
    spool.add(ERR, long)
    for number in range(20000):
        spool.add(OUT, b"%d\n" % number)
    found = list(take(spool))
    assert b"".join(data for kind, data in found if kind == ERR) == long
    numbers = b"".join(b"%d\n" % number for number in range(20000))
    assert b"".join(data for kind, data in found if kind == OUT) == b"before\n" + numbers
    spool.rewind(count_bytes(found[:3]))
    assert next(take(spool)) == (ERR, long[2 * CHUNK_BYTES : 3 * CHUNK_BYTES])


def test_what_the_link_has_is_dropped(spool, monkeypatch):
    monkeypatch.setattr(keeper, "_SPOOL_LIMIT_BYTES", 10)
    for each in WRITTEN:
        spool.add(*each)
    assert len(list(take(spool))) == len(WRITTEN)
    size = count_bytes(WRITTEN)
    spool.confirm(size - 1)
    assert os.path.getsize("output") > 0
    spool.confirm(size)
    assert os.path.getsize("output") == 0
    spool.add(ERR, b"later\n")
    assert list(take(spool)) == [(ERR, b"later\n")]
    spool.rewind(size)
    assert list(take(spool)) == [(ERR, b"later\n")]


def test_a_full_disk_costs_output_only(spool, monkeypatch):
    write, left = os.pwrite, [3]

    def write_a_part(fd, data, offset):
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[: left.pop()], offset)

    spool.add(OUT, b"before\n")
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", write_a_part)
        spool.add(OUT, b"lost\n")
        spool.add(ERR, b"lost, too\n")
    spool.add(OUT, b"after\n")
    assert list(take(spool)) == [(OUT, b"before\n"), (OUT, b"after\n")]


def test_a_file_that_grows_comes_once_and_whole_although_the_disk_was_full(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "_FILE_LIMIT_BYTES", 25)
    source, kept = tmp_path / "there" / "log" / "run" / "events.jsonl", {}
    source.parent.mkdir(parents=True)
    files = ChangedFiles(str(tmp_path / "there"))

    def pass_on():
        for _, content in FrameReader().feed(files.read()):
            keep_file(content, str(tmp_path), str(tmp_path / "here"), kept)

    source.write_bytes(b"".join(b'{"line": %d}\n' % number for number in range(9)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, limits[1]))
    for _ in range(3):
        pass_on()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    copy = tmp_path / "here" / "run" / "events.jsonl"
    assert copy.read_bytes() == source.read_bytes()[:30]
    files.rewind(kept)
    for _ in range(9):
        pass_on()
    assert copy.read_bytes() == source.read_bytes()


def test_what_is_no_file_is_not_sent(tmp_path):
    os.mkfifo(tmp_path / "error.json")
    assert ChangedFiles(str(tmp_path)).read() == b""
