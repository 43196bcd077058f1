"""`muster shell`: a terminal on one node of a running job."""

import contextlib
import os
import signal
import termios
import tty
from collections.abc import Iterator
from typing import Final

from muster._shared.control import CommandExit, ControlError
from muster.cli import operations
from muster.cli.answers import say
from muster.cli.exec_command import FAILED, NodeRun, Relay, find_targets
from muster.schedulers.node_program.session import Order, Session, find_name

_ENDS: Final = {signal.SIGTERM: "TERM", signal.SIGHUP: "HUP", signal.SIGINT: "INT", signal.SIGQUIT: "QUIT"}


def run(*, handle: str, role: str | None, node: int | None) -> int:
    """Run a shell on a node, in this terminal, and return its exit code.

    Raises:
        ControlError: this is no terminal, or no shell was started.
    """
    if not (os.isatty(0) and os.isatty(1)):
        line = "a shell needs a terminal: `muster exec` runs a command without one"
        raise ControlError(line, CommandExit.USAGE)
    with operations.open_scheduler(handle) as (scheduler, app_id):
        [target] = find_targets(scheduler, app_id, role=role, node=node, takes_all=False)
        env = {"TERM": os.environ.get("TERM", "dumb")}
        size = os.get_terminal_size(0)
        order = Order(
            app=find_name(app_id),
            index=target.index,
            command=None,
            env=env,
            tty=True,
            size=(size.lines, size.columns),
        )
        node_run = NodeRun(target, order)
        node_run.open(scheduler, app_id)
        try:
            if node_run.session is not None:
                with make_raw(0):
                    _Terminal(node_run, node_run.session).move()
        finally:
            node_run.close()
        if node_run.failure:
            say(f"{target}: {node_run.failure}")
            return FAILED
        return node_run.code


class _Terminal(Relay):
    """Passes on what is typed, and shows what comes. It is for one use."""

    SIGNALS = (*_ENDS, signal.SIGWINCH)

    def __init__(self, run: NodeRun, session: Session) -> None:
        super().__init__([run], has_prefix=False)
        self._session = session

    def read_input(self, limit: int) -> None:
        """See `Relay`. Its end is that of the terminal."""
        super().read_input(limit)
        if not self.reads:
            self._end("this terminal was closed")

    def pass_on(self, signum: signal.Signals) -> None:
        """See `Relay`."""
        if signum is signal.SIGWINCH:
            with contextlib.suppress(OSError):
                size = os.get_terminal_size(0)
                self._session.send_size(size.lines, size.columns)
        elif signum in (signal.SIGTERM, signal.SIGHUP):  # an interactive shell ignores SIGTERM
            self._end(f"the shell was ended by {signum.name}")
        else:
            self._session.send_signal(_ENDS[signum])

    def _end(self, why: str) -> None:
        self._session.close()
        self._session.failure = why


@contextlib.contextmanager
def make_raw(fd: int) -> Iterator[None]:
    """Let a terminal pass on each key. Its settings are restored whatever happens."""
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd, termios.TCSANOW)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)
