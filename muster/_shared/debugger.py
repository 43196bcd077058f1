"""pdb in one worker, at the terminal of its node's agent. `muster.worker.breakpoint` uses it.

It needs the standard library only. A worker has no terminal: its standard streams are the agent's pipes, and it leads a
session of its own. The agent lends it the one that the job was started in: it holds back all other output, and passes
Ctrl-C on to this worker alone. While pdb waits for a command, and while it steps, descriptors 0 to 2 are that terminal,
so that pdb has readline and looks as it does without a launcher.
"""

import os
import pdb  # noqa: T100  # this module is about it
import signal
import sys
import time
from types import FrameType
from typing import ClassVar, TextIO

from muster._shared.contract import has_feature
from muster._shared.layouts import StatusPageLayout as Layout

_LOOK_S = 0.02
_ANSWER_S = 30.0
"""An agent that has not answered by then hangs."""


def debug(frame: FrameType, words: "memoryview | None", terminal: str) -> None:
    """Stop at the frame's next line.

    Args:
        frame: of the user's code.
        words: this rank's slot in the status page. None: there is none (plain python, torchrun).
        terminal: path of the agent's standard input.
    """
    if words is None:
        pdb.Pdb(nosigint=True).set_trace(frame)
        return
    if _Session.current is None:
        _Session.current = _Session(words, terminal)
    if has_feature("debugger", os.environ) and _Session.current.borrow():
        _Session.current.debugger.set_trace(frame)
        return
    sys.stderr.write(
        f"muster.worker: the breakpoint at {frame.f_code.co_filename}:{frame.f_lineno} is skipped: this job has no "
        "terminal for a debugger. Run `muster-agent --standalone --nproc-per-node N SCRIPT` in a terminal to use it.\n"
    )


class _Session:
    """The terminal, from the first command of pdb until `continue`."""

    current: "ClassVar[_Session | None]" = None
    """The session of this process, because pdb goes on after the call that began it."""

    def __init__(self, words: memoryview, terminal: str) -> None:
        self._words = words
        self._path = terminal
        self._saved_fds: list[int] = []
        self._answer_s = _ANSWER_S
        self._streams: tuple[TextIO, TextIO, TextIO] = sys.stdin, sys.stdout, sys.stderr
        self.debugger = _Debugger(self)

    def borrow(self) -> bool:
        """Wait for the terminal, and take it. False: there is none."""
        if self._saved_fds:
            return True
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        words = self._words
        while words[Layout.TERMINAL] == Layout.TERMINAL_LENT:
            time.sleep(_LOOK_S)  # until the agent sees its end
        words[Layout.TERMINAL] = 0
        words[Layout.DEBUGGER] = Layout.DEBUGGER_WANTS
        until_s = time.monotonic() + self._answer_s
        while words[Layout.TERMINAL] == Layout.TERMINAL_QUEUED or (
            words[Layout.TERMINAL] == 0 and time.monotonic() < until_s
        ):
            time.sleep(_LOOK_S)
        if words[Layout.TERMINAL] == 0:
            self._answer_s = 0.0
        if words[Layout.TERMINAL] == Layout.TERMINAL_LENT and self._open_terminal():
            return True
        words[Layout.DEBUGGER] = Layout.DEBUGGER_NONE
        return False

    def _open_terminal(self) -> bool:
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return False
        self._saved_fds = [os.dup(number) for number in range(3)]
        for number in range(3):
            os.dup2(fd, number)
        os.close(fd)
        self._streams = sys.stdin, sys.stdout, sys.stderr
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        self.debugger.stdin, self.debugger.stdout = sys.stdin, sys.stdout
        rank = os.environ.get("RANK", "0")
        print(
            f"[muster] rank {rank} is in the debugger: `continue` goes on, `quit` ends the job. The output of other "
            "ranks waits; the timeout of torch's collectives does not."
        )
        return True

    def give_back(self, word: int) -> None:
        """Have the agent's pipes again.

        Args:
            word: what the agent is told, `Layout.DEBUGGER_NONE` or `_QUIT`.
        """
        if not self._saved_fds:
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, saved in enumerate(self._saved_fds):
            os.dup2(saved, number)
            os.close(saved)
        self._saved_fds = []
        sys.stdin, sys.stdout, sys.stderr = self._streams
        self._words[Layout.DEBUGGER] = word


class _Debugger(pdb.Pdb):
    """pdb that gives the terminal back when the program goes on."""

    def __init__(self, session: _Session) -> None:
        super().__init__(nosigint=True)  # Ctrl-C stays KeyboardInterrupt
        self._session = session
        self.prompt = f"(Pdb, rank {os.environ.get('RANK', '0')}) "

    def interaction(self, frame: "FrameType | None", traceback: object) -> None:
        """Wait for commands at a line, perhaps of a breakpoint that was set before a `continue`."""
        if not self._session.borrow():
            self.set_continue()
            return
        super().interaction(frame, traceback)  # type: ignore[arg-type]

    def set_continue(self) -> None:
        """Go on with the program at `continue`."""
        super().set_continue()
        self._session.give_back(Layout.DEBUGGER_NONE)

    def set_quit(self) -> None:
        """Let the agent end the job at `quit`. This worker goes no further."""
        self._session.give_back(Layout.DEBUGGER_QUIT)
        try:
            while True:
                time.sleep(1.0)  # until the agent's signal
        except KeyboardInterrupt:
            raise SystemExit(128 + signal.SIGINT) from None
