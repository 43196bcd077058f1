"""What is queued for the console, in order: bytes, parts of log files, gaps, the agent's lines, ends of streams."""

import contextlib
import os
from collections.abc import Iterator
from typing import Protocol

from muster.agent.logs.lines import LineAssembler
from muster.agent.runtime.records import record


class Source(Protocol):
    """What the device needs of a stream: `console.Feed`."""

    assembler: LineAssembler
    printed_bar: bytes
    order: tuple[int, bytes]
    """Of its row among the live rows: by the prefix, [w2] before [w10]."""

    @property
    def fd(self) -> int:
        """The descriptor its lines are written to."""
        ...


class Span:
    """A part of a log file that must still be printed; the device closes `fd`. `end` may grow while it is queued."""

    def __init__(self, *, fd: int, start: int, end: int) -> None:
        self.fd = fd
        self.start = start
        self.end = end
        self.queued = True


class Gap:
    """Lines that were dropped here; the count may grow while it is queued."""

    def __init__(self, *, lines: int) -> None:
        self.lines = lines
        self.queued = True


@record
class AgentLine:
    """Lines of the agent: kept when all else is discarded."""

    data: bytes


@record
class End:
    """The stream has ended."""


@record
class Hold:
    """Print nothing from here on until `ConsoleWriter.release`: a debugger has the terminal."""


Piece = bytes | Span | Gap | AgentLine | End | Hold


def merge_output(output: list[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Join neighbours with the same descriptor: one write instead of many."""
    start = 0
    for index in range(1, len(output) + 1):
        if index == len(output) or output[index][0] != output[start][0]:
            yield output[start][0], b"".join(data for _, data in output[start:index])
            start = index


def read_span(part: Span) -> bytes:
    """Read the part's bytes; closes the descriptor after the last part."""
    try:
        return os.pread(part.fd, part.end - part.start, part.start)
    except OSError as error:
        return b"\n[muster] %d bytes of output cannot be read again: %s\n" % (
            part.end - part.start,
            (error.strerror or "").encode(),
        )
    finally:
        if not part.queued:
            with contextlib.suppress(OSError):
                os.close(part.fd)
