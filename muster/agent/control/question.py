"""Asks the person at the terminal what Ctrl-C is to do (`--interrupt-action ask`), as ice-learn's launcher does.

    Ctrl-C --pause--> all ranks wait at one step --question--> y: resume, stop: ranks that ask `should_stop` save first
                                                               n: the signal, as without the option
                                                               c: resume

Ranks that never ask `should_stop` save a checkpoint instead, and get the signal then. Whatever is refused or late, the
job ends as without the option. A second Ctrl-C kills the workers, as always.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from typing import IO

from muster._contract import AskKind, AskOutcome
from muster.agent.logs import LogRouter
from muster.agent.rendezvous.consensus.actions import Answer
from muster.agent.runtime.loop import Loop, Timer

LIMIT_S = 60.0
"""How long the ranks may take for each request."""
REQUEST = 1 << 40
"""The number of the terminal's requests; other persons' begin with 1."""
_HELD_S = 0.02
_QUESTION = "save a checkpoint, and stop? y: save and stop; n: stop; c: continue. Ctrl-C kills [Y/n/c]"
_READ = "import os; os.write(1, os.read(0, 4096))"


class Then(Enum):
    """What follows, other than a request."""

    PERSON = "person"
    """The person is asked."""
    INTERRUPT = "interrupt"
    """The signal has its ordinary effect."""
    END = "end"
    """The ranks are ending."""
    GO_ON = "go on"


def choose_next(asked: AskKind, outcome: AskOutcome, *, continues: bool) -> AskKind | Then:
    """What follows the answer to a request.

    Args:
        asked: the request.
        outcome: of it.
        continues: the person wants the job to go on.
    """
    is_done = outcome is AskOutcome.DONE
    if asked is AskKind.PAUSE:
        return Then.PERSON if is_done else Then.INTERRUPT
    if asked is AskKind.RESUME:
        return Then.GO_ON if continues else AskKind.STOP
    if asked is AskKind.STOP and outcome is AskOutcome.REFUSED:
        return AskKind.CHECKPOINT
    return Then.END if asked is AskKind.STOP and is_done else Then.INTERRUPT


def parse_choice(text: str) -> str | None:
    """The first letter of yes, no or continue; None: something else. Nothing means y: what can be saved is."""
    word = text.strip().lower()
    return (word or "y")[0] if word in ("", "y", "yes", "n", "no", "c", "continue") else None


class InterruptQuestion:
    """What Ctrl-C does at the terminal. `close` it when the round or the job ends."""

    def __init__(
        self, loop: Loop, logs: LogRouter, *, ask: Callable[[int, AskKind, float], None], interrupt: Callable[[], None]
    ) -> None:
        """Ask nothing yet.

        Args:
            loop: the agent's.
            logs: has the console, which waits while the person is asked.
            ask: asks the job: the request's number, what is asked for, and how long it may take.
            interrupt: gives the signal its ordinary effect.
        """
        self._loop = loop
        self._logs = logs
        self._send = ask
        self._is_open = False
        """Another Ctrl-C kills."""
        self._interrupt = interrupt
        self._asked: AskKind | None = None
        self._continues = False
        self._timer: Timer | None = None
        self._reader: subprocess.Popen[bytes] | None = None

    def handle_interrupt(self, *, may_ask: bool) -> bool:
        """Begin with a pause of the job; False: the signal must have its ordinary effect.

        Args:
            may_ask: the workers run, and no debugger has the terminal.
        """
        if self._is_open:
            self.close()
            self._interrupt()
            self._interrupt()  # the second one kills
            return True
        if not may_ask or not os.isatty(0):
            return False
        self._is_open, self._continues = True, False
        self._logs.print_line("pausing all ranks at one step; Ctrl-C again kills")
        self._ask(AskKind.PAUSE)
        return True

    def _ask(self, kind: AskKind) -> None:
        self._asked = kind
        self._send(REQUEST, kind, LIMIT_S)

    def handle_answer(self, requests: tuple[int, ...], answer: Answer) -> None:
        """What became of these requests; one of them may be the terminal's."""
        if self._asked is None or REQUEST not in requests:
            return
        asked, self._asked = self._asked, None
        if asked is AskKind.PAUSE or answer.outcome is not AskOutcome.DONE:
            self._logs.print_line(answer.line)  # of the others the leader tells
        then = choose_next(asked, answer.outcome, continues=self._continues)
        if isinstance(then, AskKind):
            self._ask(then)
        elif then is Then.PERSON:
            self._ask_person()
        elif then is not Then.END:
            self.close()
            if then is Then.INTERRUPT:
                self._interrupt()

    def _ask_person(self) -> None:
        self._logs.print_line(_QUESTION)
        self._logs.hold_console()
        self._read_when_held()

    def _read_when_held(self) -> None:
        if not self._logs.is_console_held:
            self._timer = self._loop.call_later(_HELD_S, self._read_when_held)
            return
        # The agent is in the background of its terminal, and would be stopped if it read. A session of its own may.
        try:
            self._reader = subprocess.Popen(
                [sys.executable, "-IS", "-c", _READ], stdout=subprocess.PIPE, start_new_session=True
            )
        except OSError:  # no processes or descriptors left: nothing can be typed
            self.close()
            self._interrupt()
            return
        self._loop.watch_readable(self._get_pipe(self._reader).fileno(), self._on_typed)

    def _on_typed(self) -> None:
        if self._reader is None:
            return
        text = os.read(self._get_pipe(self._reader).fileno(), 4096).decode(errors="replace")
        self._end_reading()
        choice = parse_choice(text)
        if choice is None:
            self._ask_person()
        elif choice == "n":
            self.close()
            self._interrupt()
        else:
            self._continues = choice == "c"
            self._ask(AskKind.RESUME)

    def _get_pipe(self, reader: "subprocess.Popen[bytes]") -> IO[bytes]:
        assert reader.stdout is not None  # noqa: S101  # it has a pipe
        return reader.stdout

    def _end_reading(self) -> None:
        if self._reader is not None:
            pipe = self._get_pipe(self._reader)
            self._loop.unwatch(pipe.fileno())
            pipe.close()
            self._reader.kill()
            self._reader.wait()
            self._reader = None
        self._logs.release_console()

    def close(self) -> None:
        """Ask no more. Idempotent."""
        self._is_open, self._asked = False, None
        if self._timer is not None:
            self._timer.cancel()
        self._end_reading()
