"""`muster shell`: a terminal on one node of a running job."""

import contextlib
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from typing import Final

from muster._shared.control import ControlError, ExitCode
from muster._shared.processes import READ, read_wake_pipe, wait_events
from muster.cli import operations
from muster.cli.answers import say
from muster.cli.inside.exec_command import LOOK_S, NodeRun, watch_signals, write_all
from muster.cli.inside.targets import FAILED, find_targets
from muster.schedulers.node_program.session import ALIVE_S, Order, Session, find_name

_CHUNK_BYTES: Final = 1 << 16
_ENDS: Final = {signal.SIGTERM: "TERM", signal.SIGHUP: "HUP", signal.SIGINT: "INT", signal.SIGQUIT: "QUIT"}


def run(handle: str, *, role: str | None, node: int | None) -> int:
    """Run a shell on a node, in this terminal, and return its exit code.

    Raises:
        ControlError: this is no terminal, or no shell was started.
    """
    if not (os.isatty(0) and os.isatty(1)):
        line = "a shell needs a terminal: `muster exec` runs a command without one"
        raise ControlError(line, ExitCode.USAGE)
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
        node_run = NodeRun(target)
        node_run.open(scheduler, app_id, order)
        try:
            if node_run.session is not None:
                _Terminal(node_run.session).move()
        finally:
            node_run.close()
        if node_run.failure:
            say(f"{target}: {node_run.failure}")
            return FAILED
        return node_run.code


class _Terminal:
    """Passes on what is typed, and shows what comes. It is for one use."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._signals: list[int] = []
        self._stop = threading.Event()

    def move(self) -> None:
        """Return when the shell has ended, or this terminal is gone."""
        sys.stdout.flush()
        threading.Thread(target=self._say_alive, daemon=True).start()
        with watch_signals([*_ENDS, signal.SIGWINCH], self._signals.append) as wake, make_raw(0):
            try:
                while not self._session.is_over:
                    self._step(wake)
            finally:
                self._stop.set()

    def _step(self, wake: int) -> None:
        wanted = {wake: READ, **self._session.wanted}
        if self._session.room_bytes > 0:
            wanted[0] = READ
        for fd in wait_events(wanted, LOOK_S):
            if fd == wake:
                read_wake_pipe(wake)
            elif fd == 0:
                self._read_keys()
            else:
                for stream, data in self._session.receive():
                    write_all(stream, data)
        while self._signals:
            self._pass_on(signal.Signals(self._signals.pop(0)))
        self._session.check()

    def _read_keys(self) -> None:
        try:
            data = os.read(0, min(self._session.room_bytes, _CHUNK_BYTES))
        except OSError:
            data = b""
        if data:
            self._session.send_input(data)
        else:  # the terminal is gone
            self._session.close()
            self._session.failure = "this terminal was closed"

    def _pass_on(self, signum: signal.Signals) -> None:
        if signum is signal.SIGWINCH:
            with contextlib.suppress(OSError):
                size = os.get_terminal_size(0)
                self._session.send_size(size.lines, size.columns)
        elif signum in (signal.SIGTERM, signal.SIGHUP):  # an interactive shell ignores SIGTERM
            self._session.close()
            self._session.failure = f"the shell was ended by {signum.name}"
        else:
            self._session.send_signal(_ENDS[signum])

    def _say_alive(self) -> None:
        while not self._stop.wait(ALIVE_S):
            self._session.send_alive()


@contextlib.contextmanager
def make_raw(fd: int) -> Iterator[None]:
    """Let a terminal pass on each key. Its settings are restored whatever happens."""
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd, termios.TCSANOW)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)
