"""Asks the person at the agent's terminal what Ctrl-C is to do (`--interrupt-action ask`).

What follows from the choice is decided in `node.request_decisions`.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import IO

from muster.agent.logs import LogRouter
from muster.agent.runtime.loop import Loop, Timer

_HELD_S = 0.02
_QUESTION = "save a checkpoint, and stop? y: save and stop; n: stop; c: continue. Ctrl-C kills [Y/n/c]"
_READ = "import os; os.write(1, os.read(0, 4096))"


class TerminalQuestion:
    """The question and its answer. Call `close` when the answer is not needed any more."""

    def __init__(self, loop: Loop, logs: LogRouter, on_typed: Callable[[str | None], None]) -> None:
        """Ask nothing yet.

        Args:
            loop: the agent's.
            logs: has the console, which waits while the person is being asked.
            on_typed: receives one line, or what was typed before the end of file; None if nothing can be typed.
        """
        self._loop = loop
        self._logs = logs
        self._on_line = on_typed
        self._timer: Timer | None = None
        self._reader: subprocess.Popen[bytes] | None = None

    def ask(self) -> None:
        """Print the question, and wait for one line."""
        self._logs.print_line(_QUESTION)
        self._logs.hold_console()
        self._read_when_held()

    def _read_when_held(self) -> None:
        if not self._logs.is_console_held:
            self._timer = self._loop.call_later(_HELD_S, self._read_when_held)
            return
        # The agent is in the background of its terminal, and reading would stop it. A separate session may read.
        try:
            self._reader = subprocess.Popen(
                [sys.executable, "-IS", "-c", _READ], stdout=subprocess.PIPE, start_new_session=True
            )
        except OSError:  # no processes or descriptors left
            self._logs.release_console()
            self._on_line(None)
            return
        self._loop.watch_readable(self._get_pipe(self._reader).fileno(), self._on_typed)

    def _on_typed(self) -> None:
        if self._reader is not None:
            text = os.read(self._get_pipe(self._reader).fileno(), 4096).decode(errors="replace")
            self.close()
            self._on_line(text)

    def _get_pipe(self, reader: "subprocess.Popen[bytes]") -> IO[bytes]:
        assert reader.stdout is not None  # noqa: S101  # it has a pipe
        return reader.stdout

    def close(self) -> None:
        """Read no more, and release the console. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._reader is not None:
            pipe = self._get_pipe(self._reader)
            self._loop.unwatch(pipe.fileno())
            pipe.close()
            self._reader.kill()
            self._reader.wait()
            self._reader = None
        self._logs.release_console()
