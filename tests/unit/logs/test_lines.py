"""Whole prefixed lines from bytes, for any cut into chunks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.agent.logs.lines import LineAssembler, find_last_frame, is_bar

PREFIX = b"[w0]:"


def assemble(chunks: list[bytes], **options: int) -> bytes:
    assembler = LineAssembler(PREFIX, **options)
    return b"".join([*(assembler.push(chunk) for chunk in chunks if chunk), assembler.finish()])


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@given(st.binary().map(lambda data: data.replace(b"\r", b"")), st.lists(st.integers(0, 500)))
def test_every_line_comes_out_once_prefixed_and_unchanged(data: bytes, places: list[int]) -> None:
    lines = data.split(b"\n")
    expected = b"".join(PREFIX + line + b"\n" for line in lines[:-1])
    expected += PREFIX + lines[-1] + b"\n" if lines[-1] else b""
    assert assemble(cut(data, places)) == expected


@given(st.text(alphabet="ab\r\n\t").map(str.encode), st.lists(st.integers(0, 100)))
def test_bars_come_out_the_same_for_any_cut(data: bytes, places: list[int]) -> None:
    assert assemble(cut(data, places)) == assemble([data])


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"\r 10%\r 20%\r100%\n", b"[w0]:100%\n"),
        (b"10%\r20%\r100%\r\n", b"[w0]:100%\n"),
        (b"windows\r\nlines\r\n", b"[w0]:windows\r\n[w0]:lines\r\n"),
        (b"\r 10%\r    \rdone\n", b"[w0]:done\n"),
        (b"\r 10%\r 99%", b"[w0]: 99%\n"),
        (b"data \x00\r\x01 more\n", b"[w0]:data \x00\r\x01 more\n"),
        (b"\r\r", b""),
        (b"\n\n", b"[w0]:\n[w0]:\n"),
    ],
)
def test_what_is_printed(data: bytes, shown: bytes) -> None:
    assert assemble([data]) == shown
    assert assemble([data[i : i + 1] for i in range(len(data))]) == shown


def test_a_line_beyond_the_limit_is_split_not_lost() -> None:
    printed = assemble([b"x" * 7, b"y" * 7, b"z" * 3 + b"\n"], limit_bytes=10)
    assert printed.replace(PREFIX, b"").replace(b"\n", b"") == b"x" * 7 + b"y" * 7 + b"z" * 3


def test_a_bar_that_runs_for_long_does_not_grow() -> None:
    assembler = LineAssembler(PREFIX, limit_bytes=1000)
    for step in range(5000):
        assert assembler.push(b"\r%04d of 5000" % step) == b""
    assert assembler.get_visible_text() == b"4999 of 5000"
    assert assembler.holds_bar


def test_a_crash_is_printed_without_our_frames() -> None:
    stack = [
        b"Fatal Python error: Segmentation fault\n",
        b'  File "/w/crash.py", line 3 in <module>\n',
        b'  File "/x/muster/agent/workers/program.py", line 210 in run\n',
        b'  File "/x/muster/agent/workers/warm/template.py", line 9 in main\n',
        b'  File "/x/muster/agent/workers/program.py", line 4, in run\n',
    ]
    data = b"".join(stack)
    shown = b"".join(PREFIX + line for line in (*stack[:2], stack[4]))  # a traceback's frames have a comma
    assert assemble([data]) == shown
    assert assemble([data[i : i + 7] for i in range(0, len(data), 7)]) == shown


def test_what_a_bar_is() -> None:
    assert is_bar(b"\r1%")
    assert not is_bar(b"text\r")
    assert not is_bar(b"\x00\r1%")
    assert find_last_frame(b"1%\r2%\r") == b"2%"
