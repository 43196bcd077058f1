"""What a unit of a rank's output is, and which units are alike."""

import pytest
from doubles.masks import mask_line
from hypothesis import given
from hypothesis import strategies as st

from muster._shared.console.units import ALONE, LINE, TRACEBACK, WARNING, Masks, Unit, Units


def cut(*writes: bytes) -> list[Unit]:
    units = Units(Masks(), holds_tracebacks=True)
    return [unit for write in writes for unit in units.cut(write, 0.0)] + list(units.end_block())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (b"rank 0 step 9 loss 0.25", b"rank 11 step 10 loss 1234.5"),
        (b"lr 1.5e-05", b"lr 0.001"),
        (b"at 0x7ffe12 in 3 s", b"at 0xA1 in 20 s"),
        (b"wrote /tmp/rank_a/x.pt.", b"wrote /var/lib/b/y-1.pt"),
        (b"wrote '/tmp/a'", b"wrote '/tmp/b/c'"),
        (b"commit 1f3a9c04 on node", b"commit 99aa00bb on node"),
        (b"id 0b7c1d2e-aa12-4f00-8a3c-123456789abc", b"id 1b7cdd21-a412-5f07-90bb-0123456789ab"),
        (b"took 5d 3h 12m 7.25ms", b"took 12d 11h 1m 19.5ms"),
        (b"2026-01-31 23:59:59,123 done", b"2025-11-01 03:00:07,001 done"),
        (b"offset -3", b"offset +17"),
    ],
)
def test_lines_that_are_alike(first: bytes, second: bytes) -> None:
    assert mask_line(first) == mask_line(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (b"loss 0.25", b"loss nan"),
        (b"loss 0.25", b"acc 0.25"),
        (b"12.5 it/s", b"12.5 s/it"),
        (b"dead beef", b"dead meat"),
        (b"added 3", b"faded 3"),
        (b" step 1", b"step 1"),
        (b"", b"1"),
    ],
)
def test_lines_that_differ(first: bytes, second: bytes) -> None:
    assert mask_line(first) != mask_line(second)


def test_what_is_masked() -> None:
    line = b"rank 7: loss 0.25 at 0x7ffe, wrote /tmp/a7/x.pt, commit 1f3a9c"
    assert mask_line(line) == b"rank #: loss # at #, wrote #, commit #"


def test_a_long_word_costs_no_more_than_its_length() -> None:
    """Of a mask that tries a word from each of its bytes, these would take minutes."""
    for word in (b"a" * 500_000, b"0" * 500_000 + b"g", b"a" * 500_000 + b"0g", b"/" * 500_000, b"0.0e" * 100_000):
        mask_line(word)


TRACE = b'Traceback (most recent call last):\n  File "a.py", line 7, in <module>\n    f()\nValueError: bad\n'


@pytest.mark.parametrize(
    ("lines", "kinds"),
    [
        (b"a\n\nb\n", [LINE, LINE, LINE]),
        (TRACE, [TRACEBACK]),
        (TRACE + b"more of the text\n", [TRACEBACK]),
        (TRACE + b"\nDuring handling of the above exception, another exception occurred:\n\n" + TRACE, [TRACEBACK]),
        (b"step 1\n" + TRACE, [LINE, TRACEBACK]),
        (b"Fatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n  File x\n", [TRACEBACK]),
        (b"100%|###\r 50%\n", [ALONE]),
        (b"a\r\n", [LINE]),
        (b"x" * 5000 + b"\n", [ALONE]),
        (b"a\0b\n", [ALONE]),
        (b"a.py:1: UserWarning: w\n  code\nb\n", [WARNING, LINE]),
    ],
)
def test_units(lines: bytes, kinds: list[int]) -> None:
    units = cut(lines)
    assert [unit.kind for unit in units] == kinds
    assert b"".join(unit.text for unit in units) == lines


def test_a_traceback_ends_where_another_write_begins() -> None:
    assert [unit.text for unit in cut(TRACE, b"step 2\n")] == [TRACE, b"step 2\n"]
    rows = TRACE.splitlines(keepends=True)
    assert [unit.text for unit in cut(*rows, b"step 2\n")] == [TRACE, b"step 2\n"]


def test_torchs_mark_of_the_rank_is_no_difference() -> None:
    first, second = (
        cut(b"".join(b"[rank%d]: %s" % (rank, row) for row in TRACE.splitlines(keepends=True)))[0] for rank in (0, 11)
    )
    assert first.kind == TRACEBACK
    assert first.key == second.key


def test_tracebacks_that_differ_in_a_number_differ() -> None:
    assert cut(TRACE)[0].key != cut(TRACE.replace(b"7", b"8"))[0].key


@pytest.mark.parametrize(
    ("lines", "warnings"),
    [
        (b"a.py:1: UserWarning: w\n", [b"a.py:1: UserWarning: w\n"]),
        (b"a.py:1: UserWarning: w\n  code\n  more\n", [b"a.py:1: UserWarning: w\n  code\n"]),
        (b"a.py:1: my.Warning: of two\nlines\n  code\n", [b"a.py:1: my.Warning: of two\nlines\n  code\n"]),
        (b"a:1: AWarning: \nb:2: BWarning: \n", [b"a:1: AWarning: \n", b"b:2: BWarning: \n"]),
        (b"a.py:1: UserWarning: w\nis this of it?\n", [b"a.py:1: UserWarning: w\n"]),
        (b"UserWarning: w\n  code\n", []),
        (b"a.py:x: UserWarning: w\n", []),
        (b"12:30:01: INFO: Warning: w\n", []),
        (b"\n\n", []),
    ],
)
def test_warnings_among_lines(lines: bytes, warnings: list[bytes]) -> None:
    units = cut(lines)
    assert [unit.text for unit in units if unit.kind == WARNING] == warnings
    assert b"".join(unit.text for unit in units) == lines


ROWS = [*TRACE.splitlines(), b"a.py:1: UserWarning: w", b"  code", b"", b"step 1", b"[rank3]: x", b"\r5%", b"\xff\x00"]


@given(st.lists(st.lists(st.sampled_from(ROWS) | st.binary(max_size=8), min_size=1, max_size=8), max_size=8))
def test_cutting_loses_nothing(writes: list[list[bytes]]) -> None:
    texts = [b"".join(row.replace(b"\n", b"") + b"\n" for row in rows) for rows in writes]
    assert b"".join(unit.text for unit in cut(*texts)) == b"".join(texts)
