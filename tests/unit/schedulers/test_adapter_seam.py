"""What `muster.schedulers.adapter` offers to other packages: its names, and logs of any source."""

import re
from pathlib import Path

import pytest

from muster.schedulers import adapter
from muster.schedulers.adapter import LogBroken, Position, TimedLine, follow_records, read_lines

STUB = Path(adapter.__file__).with_suffix(".pyi")


def test_each_name_is_there_and_says_what_it_is():
    assert len(adapter.__all__) == len(re.findall("^from ", STUB.read_text(), re.MULTILINE))
    for name in adapter.__all__:
        thing = getattr(adapter, name)
        if callable(thing) and hasattr(thing, "__module__") and thing.__module__.startswith("muster"):
            assert thing.__doc__, f"{name} says nothing"
    with pytest.raises(AttributeError, match="no attribute 'build_all'"):
        _ = adapter.build_all
    assert set(adapter.__all__) <= set(dir(adapter))


class Growing:
    """A log that gets one more part each time that its reader waits; a part is (time, bytes)."""

    def __init__(self, *parts):
        self.left = list(parts)
        self.content = b""
        self.times = []

    def find_size(self):
        return len(self.content) if self.times else None

    def read(self, offset, limit_bytes):
        return self.content[offset : offset + min(limit_bytes, 5)]

    def find_offset(self, time_s, *, after):
        return next((at for when, at in self.times if when > time_s or (when == time_s and not after)), None)

    def find_time(self, offset):
        return max((when for when, at in self.times if at <= offset), default=None)

    def wait(self, limit_s):
        if self.left:
            when, data = self.left.pop(0)
            self.times.append((when, len(self.content)))
            self.content += data

    def close(self):
        self.is_closed = True

    def has_ended(self):
        return not self.left


PARTS = ((1.0, b"first\nsec"), (2.0, b"ond\nthird \xff\n"), (3.0, b"10%\r"), (4.0, b"20%\nlast"))


def read(*parts, **wanted):
    source = Growing(*parts)
    lines = list(read_lines(source, source.has_ended, follow=True, **wanted))
    assert source.is_closed
    return lines


def test_lines_of_a_log_that_grows():
    assert read(*PARTS) == ["first\n", "second\n", "third �\n", "10%\r", "20%\n", "last"]
    assert read() == []
    assert read(*PARTS, pattern=re.compile("i.*d|%")) == ["third �\n", "10%\r", "20%\n"]


def written(*parts):
    source = Growing(*parts)
    while source.left:
        source.wait(0)
    return source


@pytest.mark.parametrize(
    ("since_s", "until_s", "lines"),
    [
        (None, 1.0, ["first\n", "sec"]),
        (2.0, None, ["third �\n", "10%\r20%\n", "last"]),
        (3.0, None, ["10%\r20%\n", "last"]),
        (3.5, 3.5, []),
        (9.0, None, []),
    ],
)
def test_a_part_of_a_log_begins_with_a_whole_line(since_s, until_s, lines):
    assert list(read_lines(written(*PARTS), bool, since_s=since_s, until_s=until_s)) == lines


@pytest.mark.parametrize("since_s", [None, 2.0])
def test_lines_that_are_not_followed_have_the_time_of_their_end(since_s):
    lines = list(read_lines(written(*PARTS), bool, since_s=since_s))
    times = [("first\n", 1.0), ("second\n", 2.0), ("third �\n", 2.0), ("10%\r20%\n", 4.0), ("last", 4.0)]
    assert [(line, line.at_s) for line in lines] == times[0 if since_s is None else 2 :]
    assert not any(isinstance(line, TimedLine) for line in read(*PARTS))


def test_records_come_once_through_broken_connections():
    """Each reading begins a little earlier than the last one broke off."""
    records = [((10, 0), b"a"), ((10, 0), b"a"), ((11, 5), b"b"), ((11, 2), b"late"), ((12, 0), b"c"), (None, b"note")]
    asked, waits = [], []
    stops = [2, 4, 6]

    def read_until(since):
        asked.append(since)
        at = stops[len(asked) - 1]
        yield from (each for each in records[:at] if each[0] is None or since is None or each[0] >= since)
        if at < len(records):
            raise LogBroken

    followed = follow_records(read_until, lambda: len(asked) > 1, lambda: waits.append(1), Position())
    assert list(followed) == [b"a", b"a", b"b", b"late", b"c", b"note"]
    assert asked == [None, (8, 0), (9, 0)]
    assert waits == [1], "none after the end"
