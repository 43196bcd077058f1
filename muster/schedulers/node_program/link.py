"""A process of this machine that stands for one node elsewhere. `ssh.link` and `held.link` are such links.

The supervisor starts it as it would start the replica. Its output and exit code are the replica's, and signals reach
the replica. What the agent reports is written to the app's folder here.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from muster._shared import processes
from muster._shared.contract import print_line
from muster.schedulers.node_program.frames import CHUNK_BYTES, LOST, STATE_NAME, Kind, write_all
from muster.schedulers.node_program.run_files import keep_file
from muster.schedulers.node_program.session import Session
from muster.schedulers.supervision.app_folder import write_text
from muster.schedulers.wording.reasons import Reason, to_data

UPLOAD_BYTES: Final = 1 << 20
"""How much of a file may be under way."""


class Link:
    """Stands for one replica, to its end.

    Args:
        order: of the driver.
        signums: what is passed on; SIGQUIT for a kill.
    """

    def __init__(self, order: Mapping[str, Any], signums: Iterable[signal.Signals]) -> None:
        self._order = order
        self._signals: list[str] = []
        """What is still to be passed on."""
        self._files: dict[str, int] = {}
        self._uploads: Iterator[bytes] = iter(())
        """Contents of files that the node needs, in pieces; b"": the end of one."""
        self._parent = os.getppid()
        for signum in signums:
            signal.signal(signum, self._note_signal)
        self._wake = processes.open_wake_pipe()

    def _note_signal(self, signum: int, _frame: object) -> None:
        self._signals.append("KILL" if signum == signal.SIGQUIT else signal.Signals(signum).name.removeprefix("SIG"))

    def _is_orphan(self) -> bool:
        """Return whether the supervisor has died."""
        return os.getppid() != self._parent

    def _move(self, session: Session, limit_s: float) -> None:
        """Wait, at most `limit_s`, and pass on what has come, and what can be sent of files."""
        ready = processes.wait_events({**session.wanted, self._wake: processes.READ}, limit_s)
        if self._wake in ready:
            processes.read_wake_pipe(self._wake)
        if ready.keys() - {self._wake}:
            for kind, content in session.receive_frames():
                if kind in (Kind.OUT, Kind.ERR):
                    self._print(kind, content)
                elif kind == Kind.FILE:
                    keep_file(content, self._order["replica_dir"], self._order["role_dir"], self._files)
                else:
                    self._handle(session, kind, content)
        while session.room_bytes > 0 and (data := next(self._uploads, None)) is not None:
            session.send_input(data)

    def _print(self, kind: bytes, data: bytes) -> None:
        """Pass output on. It is lost if no process reads it any more."""
        with contextlib.suppress(BrokenPipeError):
            write_all(int(kind), data)

    def _handle(self, session: Session, kind: bytes, content: bytes) -> None:
        """Handle what is neither output nor a file."""
        raise NotImplementedError

    def run(self) -> int:
        """Return the replica's exit code, or `LOST` with the reason in its state."""
        raise NotImplementedError

    def _save(self, **state: Any) -> None:
        with contextlib.suppress(OSError):
            write_text(Path(self._order["replica_dir"], STATE_NAME), json.dumps(state))

    def _give_up(self, reason: Reason, **state: Any) -> int:
        """Save why the replica is lost, and return the exit code."""
        self._save(**state, lost=[to_data(reason)])
        return LOST


def read_pieces(path: str | os.PathLike[str], limit_bytes: int = sys.maxsize) -> Iterator[bytes]:
    """Yield a file in pieces, and its end."""
    with open(path, "rb") as file:
        while limit_bytes and (data := file.read(min(limit_bytes, CHUNK_BYTES))):
            limit_bytes -= len(data)
            yield data


def run_link(link: Callable[[Mapping[str, Any]], Link], fd: int) -> int:
    """Run a link. Its order is JSON in the file of a descriptor."""
    with os.fdopen(fd, "rb") as file:
        order = json.load(file)
    try:
        return link(order).run()
    except OSError as error:
        print_line(str(error))
        return LOST
