"""Owns the terminal: the alternate screen, keys, a new size, Ctrl-Z and `fg`, a terminal that is closed.

Nothing is left behind: the shell's screen, its modes and its scroll-back are as before. The control sequences are those
that xterm, tmux and screen share. They are written by hand, because a terminfo entry may be missing where the command
runs.
"""

import contextlib
import os
import signal
import termios
import tty
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Final

from muster._shared.processes import READ, WRITE, wait_events
from muster.cli.top.keys import KeyParser

_ENTER: Final = b"\x1b[?1049h\x1b[?25l"
"""The alternate screen, and no cursor."""
_LEAVE: Final = b"\x1b[?25h\x1b[?1049l"
_BEGIN_FRAME, _END_FRAME = "\x1b[?2026h", "\x1b[?2026l"
"""Terminals that know synchronised output show a frame at once. The others ignore it."""
_ESCAPE_S: Final = 0.05
"""What follows Escape within this time belongs to it. Over ssh a sequence comes in one packet."""


class ClosedError(Exception):
    """The terminal was closed, or a signal ends the command. `code`: the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


class Screen:
    """The terminal while `opened`. It draws whole frames and reads keys. It is single-threaded."""

    def __init__(self, input_fd: int, output_fd: int) -> None:
        """Change nothing yet.

        Args:
            input_fd: a terminal.
            output_fd: the same terminal.
        """
        self._input_fd = input_fd
        self._output_fd = output_fd
        self._parser = KeyParser()
        self._frame: list[str] = []
        """As drawn. Empty: the screen must be drawn anew."""
        self._woken_fd, self._wake_fd = -1, -1

    @contextlib.contextmanager
    def opened(self) -> "Iterator[Screen]":
        """Take the terminal, and give it back at the end, whatever the end is."""
        saved = termios.tcgetattr(self._input_fd)
        self._woken_fd, self._wake_fd = os.pipe()
        os.set_blocking(self._wake_fd, False)
        os.set_blocking(self._woken_fd, False)
        handlers = {
            signal.SIGWINCH: self._on_resize,
            signal.SIGTSTP: lambda *_: self._suspend(saved),
            signal.SIGHUP: self._on_end,
            signal.SIGTERM: self._on_end,
        }
        before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
        try:
            self._take()
            yield self
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            self._give_back(saved)
            os.close(self._woken_fd)
            os.close(self._wake_fd)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows. It is 80x24 if the terminal does not say."""
        with contextlib.suppress(OSError):
            columns, rows = os.get_terminal_size(self._output_fd)
            if columns > 0 and rows > 0:
                return columns, rows
        return 80, 24

    def wake(self) -> None:
        """End a `read_keys` that waits. From any thread or signal handler."""
        with contextlib.suppress(OSError):  # a full pipe wakes it too
            os.write(self._wake_fd, b"\0")

    def draw(self, rows: Sequence[str]) -> None:
        """Show a frame, in one write. Rows that have not changed are not written.

        Args:
            rows: length at most that of the screen, each no wider than it, with colours or without.
        """
        height = self.size[1]
        frame = [*rows[:height], *[""] * (height - len(rows))]
        if frame == self._frame:
            return
        is_new = len(self._frame) != len(frame)
        changed = [at for at, row in enumerate(frame) if is_new or row != self._frame[at]]
        body = "".join(f"\x1b[{at + 1};1H{frame[at]}\x1b[0m\x1b[K" for at in changed)
        self._frame = frame
        self._write(f"{_BEGIN_FRAME}{body}{_END_FRAME}".encode(errors="replace"))

    def read_keys(self, limit_s: float) -> list[str]:
        """Wait for keys. Return [] after the limit, after `wake`, and for a new size.

        Raises:
            ClosedError: the terminal is gone.
        """
        if self._parser.is_waiting:
            limit_s = min(limit_s, _ESCAPE_S)
        ready = wait_events(dict.fromkeys((self._input_fd, self._woken_fd), READ), limit_s)
        if self._woken_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken_fd, 4096)
        if self._input_fd in ready:
            try:
                data = os.read(self._input_fd, 4096)
            except OSError as error:
                raise ClosedError(128 + signal.SIGHUP) from error
            if not data:
                raise ClosedError(128 + signal.SIGHUP)
            return self._parser.parse(data)
        return self._parser.flush() if self._parser.is_waiting and self._woken_fd not in ready else []

    def _take(self) -> None:
        tty.setcbreak(self._input_fd)  # Ctrl-C and Ctrl-Z stay signals
        self._write(_ENTER)
        self._frame = []

    def _give_back(self, saved: "list[int | list[bytes | int]]") -> None:
        with contextlib.suppress(OSError, termios.error):  # a closed terminal cannot be restored
            self._write(_LEAVE)
            termios.tcsetattr(self._input_fd, termios.TCSADRAIN, saved)

    def _write(self, data: bytes) -> None:
        """Write all of it.

        Raises:
            ClosedError: the terminal is gone.
        """
        try:
            while data:
                wait_events({self._output_fd: WRITE})  # another process may have made it non-blocking
                data = data[os.write(self._output_fd, data) :]
        except OSError as error:
            raise ClosedError(128 + signal.SIGHUP) from error

    def _on_resize(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        self._frame = []
        self.wake()

    def _on_end(self, signum: int, frame: FrameType | None) -> None:
        del frame
        raise ClosedError(128 + signum)

    def _suspend(self, saved: "list[int | list[bytes | int]]") -> None:
        """Stop at Ctrl-Z as any program would, with the terminal as it was. Take it again on `fg`."""
        self._give_back(saved)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
        os.kill(os.getpid(), signal.SIGTSTP)  # returns after SIGCONT
        signal.signal(signal.SIGTSTP, lambda *_: self._suspend(saved))
        self._take()
        self.wake()
