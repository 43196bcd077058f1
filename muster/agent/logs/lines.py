"""Cuts bytes into whole prefixed lines, a chunk at a time, recognises progress bars, and defines queued pieces. Pure.

Work is done per chunk (one `replace` for all its lines) instead of per line, so 400,000 lines cost milliseconds. Only
chunks with a carriage return, the sign of a progress bar, are processed line by line.
"""

import os
from collections.abc import Sequence
from typing import Protocol

from muster._shared.records import record
from muster.agent.round import Round

LINE_LIMIT_BYTES = 16 << 20
"""A line is kept in memory until it is whole. A longer one is split on the console (never in the file)."""

_LIVE_BYTES = 512
_OWN_FRAMES = b"/muster/agent/workers/"
_FUNCTION_FRAME = b'/muster/elastic/jobs/function.py"'
_STACK_FRAME = b'  File "'
_NOT_TEXT = bytes(set(range(0x20)) - {0x08, 0x09, 0x0A, 0x0D, 0x1B}) + b"\x7f"


def find_last_frame(line: bytes) -> bytes:
    r"""Return what a terminal would show of a line: the text after the last carriage return that is followed by any.

    >>> find_last_frame(b"\r 10%\r 20%"), find_last_frame(b" 10%\r 20%\r")
    (b' 20%', b' 20%')
    """
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def is_text(line: bytes) -> bool:
    """Return whether the only control bytes are those of terminal programs (tab, return, backspace, escape)."""
    return len(line.translate(None, _NOT_TEXT)) == len(line)


def is_bar(line: bytes) -> bool:
    r"""Return whether a line (without `\n`) is a progress bar: text with a carriage return before its end.

    A line with other control bytes is data, not a bar, and stays unchanged.
    """
    return b"\r" in line.rstrip(b"\r") and is_text(line)


def collapse_bars(lines: bytes) -> bytes:
    """Reduce each progress bar among whole lines to its last state; all other lines stay unchanged."""
    return b"\n".join(find_last_frame(line) if is_bar(line) else line for line in lines.split(b"\n"))


def drop_own_frames(lines: bytes) -> bytes:
    r"""Remove our frames from the outer end of faulthandler's stacks of a worker that a signal ends.

    The input is whole lines. faulthandler's frames have no comma before `in`; those of tracebacks have one and stay.

    >>> drop_own_frames(b'  File "/x/muster/agent/workers/program.py", line 7 in run\nrest\n')
    b'rest\n'
    """
    return b"".join(line for line in lines.splitlines(keepends=True) if not _is_own_frame(line))


def _is_own_frame(line: bytes) -> bool:
    is_ours = line.startswith(_STACK_FRAME) and (_OWN_FRAMES in line or _FUNCTION_FRAME in line)
    return is_ours and b'", line ' in line and b", in " not in line


def prefix_lines(prefix: bytes, lines: bytes) -> bytes:
    r"""Put the prefix before each of these whole lines, which end in `\n`, and collapse their bars."""
    if b"\r" in lines:
        lines = collapse_bars(lines)
    if _OWN_FRAMES in lines:
        lines = drop_own_frames(lines)
    if not prefix or not lines:
        return lines
    return b"".join((prefix, lines[:-1].replace(b"\n", b"\n" + prefix), b"\n"))


class LineAssembler:
    r"""Cuts one stream into whole lines. Keeps the unterminated rest until its `\n` comes."""

    __slots__ = ("_held", "_held_bytes", "_is_data", "_limit_bytes", "holds_bar", "prefix")

    def __init__(self, prefix: bytes, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self.prefix = prefix
        self._limit_bytes = limit_bytes
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._is_data = False
        self.holds_bar = False
        """Whether the unterminated line is a progress bar."""

    def push(self, chunk: bytes) -> bytes:
        """Add the next bytes of the stream, and return the completed lines, prefixed."""
        return prefix_lines(self.prefix, self.cut(chunk))

    def finish(self) -> bytes:
        r"""Return the unterminated last line, prefixed and ended with a `\n`; empty if there is none."""
        return prefix_lines(self.prefix, self.cut_rest())

    def cut(self, chunk: bytes) -> bytes:
        """Add the next bytes of the stream, and return the completed lines unchanged."""
        cut = chunk.rfind(b"\n") + 1
        if not cut:
            return self._keep_rest(chunk)
        whole = chunk[:cut]
        if self._held:
            self._held.append(whole)
            whole = b"".join(self._held)
            self._reset()
        return whole + self._keep_rest(chunk[cut:]) if cut < len(chunk) else whole

    def cut_rest(self) -> bytes:
        r"""Return the unterminated last line, ended with a `\n`; empty if there is none. The stream may continue."""
        if not self._held_bytes:
            return b""
        line = b"".join(self._held)
        self._reset()
        return line + b"\n" if line.strip(b"\r") else b""

    def get_visible_text(self) -> bytes:
        """Return what a terminal would show of the unterminated line: a bar's last state, or the start of the text."""
        if not self._held:
            return b""
        return find_last_frame(self._held[0]) if self.holds_bar else self._held[0][:_LIVE_BYTES].rstrip(b"\r")

    def _keep_rest(self, rest: bytes) -> bytes:
        self._held.append(rest)
        self._held_bytes += len(rest)
        if (self.holds_bar or b"\r" in rest or self._held[0].endswith(b"\r")) and not self._is_data:
            self._trim_bar()
        return self.cut_rest() if self._held_bytes > self._limit_bytes else b""

    def _trim_bar(self) -> None:
        # Hidden earlier states must not accumulate.
        line = b"".join(self._held)
        self._is_data = not is_text(line)
        self.holds_bar = is_bar(line)
        if self.holds_bar:
            line = b"\r" + find_last_frame(line) + (b"\r" if line.endswith(b"\r") else b"")
        self._held = [line]
        self._held_bytes = len(line)

    def _reset(self) -> None:
        self._held = []
        self._held_bytes = 0
        self._is_data = False
        self.holds_bar = False


def build_prefix(*, role: str, local_rank: int, round: Round, template: str | None = None) -> bytes:  # noqa: A002
    """Build the prefix of one worker in one round.

    `[role0]:` (role and local rank) as with torchrun; with more than one node `[role0|n1.r3]:`, which adds node (its
    group rank) and global rank. The number after the role stays the local rank in both. It is `[role1:0]:` if the role
    ends in a digit.

    Args:
        role: the role's name.
        local_rank: the worker's rank on this node.
        round: the membership the worker was started for.
        template: see `LogConfig.prefix_template`. Knows torch's `${role_name}`, `${rank}` (global), `${local_rank}`
            and `${hostname}` (short), and `${global_rank}`, `${node}`, `${node_index}`, `${world_size}`, `${nodes}`,
            `${attempt}`, `${round}`. Unknown names stay, as with torchrun.
    """
    return _build_prefix(role, str(local_rank), str(round.rank_offset + local_rank), round, template)


def build_common_prefix(*, role: str, global_ranks: Sequence[int], round: Round, template: str | None = None) -> bytes:  # noqa: A002
    """Build the prefix of a line that several workers of a node have written: `[role0-7]:`, `[role0-2,5|n1.r8-10,13]:`.

    Args:
        role: the role's name.
        global_ranks: the workers'.
        round: the membership that they were started for.
        template: see `build_prefix`; its ranks are such texts.
    """
    from muster._shared.console.alike_lines import format_ranks

    local = format_ranks(rank - round.rank_offset for rank in global_ranks)
    return _build_prefix(role, local, format_ranks(global_ranks), round, template)


def _build_prefix(role: str, local: str, ranks: str, round: Round, template: str | None) -> bytes:  # noqa: A002
    if template:
        return _fill_template(template, role=role, local_rank=local, global_rank=ranks, round=round)
    node = f"|n{round.group_rank}.r{ranks}" if round.group_world_size > 1 else ""
    separator = ":" * role[-1:].isdigit()
    return f"[{role}{separator}{local}{node}]:".encode("utf-8", "surrogateescape")


def _fill_template(template: str, *, role: str, local_rank: str, global_rank: str, round: Round) -> bytes:  # noqa: A002
    from string import Template

    return (
        Template(template)
        .safe_substitute(
            role_name=role,
            rank=global_rank,
            local_rank=local_rank,
            hostname=os.uname().nodename,
            global_rank=global_rank,
            node=round.group_rank,
            node_index=round.node_index,
            world_size=round.world_size,
            nodes=round.group_world_size,
            attempt=round.attempt,
            round=round.number,
        )
        .encode("utf-8", "surrogateescape")
    )


# -- what is queued for the console, in order -------------------------------------------------------------------------


class Source(Protocol):
    """What the device needs of a stream: `console.Feed`. It is an `alike_lines.Speaker`."""

    assembler: LineAssembler
    printed_bar: bytes
    order: tuple[int, bytes]
    """Orders its row among the live rows by the prefix: [w2] comes before [w10]."""
    merged_traceback: bytes
    """The prefix with which its last traceback was printed, if others have written the same; b"" if they have not."""

    @property
    def fd(self) -> int:
        """The descriptor its lines are written to."""
        ...

    @property
    def stream(self) -> object:
        """See `Speaker`."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """See `Speaker`."""
        ...

    @property
    def launch(self) -> object:
        """See `Speaker`."""
        ...

    @property
    def peers(self) -> int:
        """See `Speaker`."""
        ...

    def name_ranks(self, ranks: Sequence[int]) -> bytes:
        """Return the prefix for lines that these global ranks of its launch have printed, this one among them."""
        ...

    def paint_prefix(self, prefix: bytes) -> bytes:
        """Return a prefix in the colour of its own rank."""
        ...


class Span:
    """A part of a log file that must still be printed. The device closes `fd`; `end` may grow while it is queued."""

    def __init__(self, *, fd: int, start: int, end: int) -> None:
        self.fd = fd
        self.start = start
        self.end = end
        self.queued = True


class Gap:
    """Lines that were dropped here. The count may grow while it is queued."""

    def __init__(self, *, lines: int) -> None:
        self.lines = lines
        self.queued = True


@record
class AgentLine:
    """Lines of the agent, which are kept when all else is discarded."""

    data: bytes


@record
class End:
    """The stream has ended."""


@record
class Hold:
    """Print nothing from here on until `ConsoleWriter.release`, because a worker has the terminal."""


Piece = bytes | Span | Gap | AgentLine | End | Hold
