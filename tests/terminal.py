"""What a person sees: interprets the few control sequences that muster writes to a terminal."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import LIMIT_S

_CONTROL = re.compile(r"\x1b\[(\d*)([A-Za-z])|\x1b\[\?\d+[hl]")


def render(text: str, lines: int | None = None) -> list[str]:
    """The rows of a terminal after `text`, without trailing blanks, and before them what has left it at the top.

    Args:
        text: what was written, with `\\n` for a new line.
        lines: the terminal's height; None: it is endless. Like tmux, it keeps what is erased from its first row on.

    Raises:
        AssertionError: a control sequence that is not known here.
    """
    rows, row, column, at = [""], 0, 0, 0
    while at < len(text):
        character = text[at]
        at += 1
        if character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0  # the terminal's driver adds the carriage return
            rows += [""] * (row + 1 - len(rows))
        elif character == "\x1b":
            found = _CONTROL.match(text, at - 1)
            assert found is not None, text[at - 1 : at + 10]
            at = found.end()
            count, what = found.groups()
            top = 0 if lines is None else max(0, len(rows) - lines)
            if what == "A":
                assert row - top >= int(count or 1)
                row -= int(count or 1)
            elif what == "J" and lines is not None and (row, column) == (top, 0):
                row = len(rows)
                rows += [""] * lines
            elif what == "J":
                rows[row:] = [rows[row][:column], *[""] * (len(rows) - row - 1)]
            elif what == "K":
                rows[row] = rows[row][:column]
            elif what != "m":
                raise AssertionError(f"unknown sequence {found.group()!r}")
        else:
            rows[row] = f"{rows[row][:column]:<{column}}{character}{rows[row][column + 1 :]}"
            column += 1
    while len(rows) > row + 1 and not rows[-1]:
        rows.pop()
    return [each.rstrip() for each in rows]


class TerminalProgram:
    """A program on a pseudo-terminal of its own; a context manager that kills it at the end."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, has_keys: bool = False) -> None:
        """Start it; with `has_keys` what is typed has its meaning: Ctrl-C interrupts (a controlling terminal)."""
        self._main_fd, terminal_fd = pty.openpty()
        fcntl.ioctl(terminal_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.text = ""
        self._expected = 0
        self._settings = self.settings
        self._process = subprocess.Popen(
            list(argv), stdin=terminal_fd, stdout=terminal_fd, stderr=terminal_fd, env=dict(env), cwd=cwd,
            start_new_session=True,
            preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if has_keys else None,  # noqa: PLW1509
        )  # fmt: skip
        os.close(terminal_fd)

    def read_until(self, wanted: str | None, timeout_s: float = 250) -> str:
        """Read until `wanted` has been written (None: until the end); all the text so far."""
        deadline_s = time.monotonic() + timeout_s
        while wanted is None or wanted not in self.text:
            if not self._read_more(wanted, deadline_s - time.monotonic()):
                break
        return self.text

    def finish(self, code: int | None = 0) -> str:
        """Read all of it: the program ends with this code (None: any), and the terminal is set as at its start."""
        self.read_until(None)
        ended = self._process.wait(LIMIT_S)
        assert (ended if code is not None else None, self.settings) == (code, self._settings), self.text
        return self.text

    def _read_more(self, wanted: str | None, limit_s: float) -> bool:
        """False at the end, which must be what is wanted."""
        ready = select.select([self._main_fd], [], [], max(0.0, limit_s))[0]
        assert ready, f"{limit_s:.0f} s passed without {wanted!r}:\n{self.text}"
        try:
            data = os.read(self._main_fd, 65536)
        except OSError:  # EIO: no process has the terminal any more
            data = b""
        assert data or wanted is None, f"the program ended without {wanted!r}:\n{self.text}"
        self.text += data.decode()
        return bool(data)

    def read_more(self, limit_s: float = 60) -> str:
        """Read what is written next; all the text so far."""
        self._read_more("more", limit_s)
        return self.text

    def expect(self, wanted: str) -> None:
        """Read until `wanted` has been written after what was expected before."""
        while wanted not in self.text[self._expected :]:
            self._read_more(wanted, LIMIT_S)
        self._expected = self.text.index(wanted, self._expected) + len(wanted)

    def comes(self, wanted: str, limit_s: float) -> bool:
        """Whether `wanted` is written within a limit, after what was expected before."""
        deadline_s = time.monotonic() + limit_s
        while wanted not in self.text[self._expected :]:
            if not select.select([self._main_fd], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                return False
            self._read_more(wanted, limit_s)
        self.expect(wanted)
        return True

    @property
    def pid(self) -> int:
        """Of the program."""
        return self._process.pid

    @property
    def settings(self) -> list[object]:
        """Of the terminal, as termios has them."""
        return termios.tcgetattr(self._main_fd)

    def send(self, signum: int) -> None:
        """Signal the program."""
        self._process.send_signal(signum)

    def resize(self, lines: int, columns: int) -> None:
        """Change the size of the terminal: the program gets SIGWINCH if it is its controlling terminal."""
        fcntl.ioctl(self._main_fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, text: str) -> None:
        """Type a text."""
        os.write(self._main_fd, text.encode())

    def wait(self) -> int:
        """Its exit code."""
        return self._process.wait(LIMIT_S)

    def __enter__(self) -> "TerminalProgram":  # noqa: PYI034  # typing.Self is Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._main_fd)
