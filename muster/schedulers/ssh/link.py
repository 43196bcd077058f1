"""A link of ssh: it holds the connection to one replica on a host. See `node_program.link` and, there, `keeper`.

A connection that breaks is made again. SIGTERM, SIGINT and SIGQUIT (for a kill) reach the replica. Standard library
only.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from muster._shared import processes
from muster._shared.control import CommandExit, ControlError
from muster._shared.foreign_files import read_whole
from muster.schedulers.node_program.frames import STATE_NAME, Kind, pack, write_all
from muster.schedulers.node_program.link import UPLOAD_BYTES, Link, read_pieces, run_link
from muster.schedulers.node_program.pipe import PipedProcess
from muster.schedulers.node_program.session import ALIVE_S, Session
from muster.schedulers.ssh.command import build_ssh, explain_failure
from muster.schedulers.wording.reasons import Code, Reason

_PAUSE_S: Final = 1.0
_READY_LIMIT_S: Final = 30.0
"""A host that is busy needs some time to begin."""
_ATTACH_LIMIT_S: Final = 15.0
_TRIES: Final = 3
"""For the first connection: a host that is busy refuses some."""
_FINISH_LIMIT_S: Final = 5.0
_END_LIMIT_S: Final = 0.5
_KILL_LIMIT_S: Final = 10.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


class _UnreadError(Exception):
    """No process reads the output any more, and another link will."""


class SshLink(Link):
    """Holds the connection to one replica, to its end.

    Args:
        order: see `driver.SshDriver`.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        super().__init__(order, _SIGNALS)
        self._output = 0
        """How many bytes of frames with output were printed."""
        self._has_started = order["verb"] == "attach"
        if self._has_started:
            with contextlib.suppress(OSError, LookupError, TypeError, ValueError):
                known = json.loads(read_whole(Path(order["replica_dir"], STATE_NAME)))
                self._output, self._files = known["output"], known["files"]
        self._alive_s = min(ALIVE_S, float(order["lost_s"]) / 4)
        self._stop_s: float | None = None
        self._told_kill_s: float | None = None
        self._reported: set[str] = set()
        """The signals that were sent over this connection."""
        self._lent: Sequence[int] = order["fds"]
        """The descriptors of an `ssh` that has looked at the host already. They are for the first connection."""

    def run(self) -> int:
        """See `Link`."""
        lost_s = 2 * float(self._order["lost_s"])
        heard_s, tries = time.monotonic(), 0
        while True:
            try:
                session = self._open()
            except OSError as error:  # here no process, descriptor or thread is left for the moment
                why = str(error)
            else:
                try:
                    self._serve(session)
                except (ControlError, OSError, ValueError) as error:
                    return self._lose(str(error))
                finally:
                    why = session.close()
                if session.code is not None:
                    self._save_received()
                    return session.code
                if session.was_reached:
                    heard_s, tries = session.heard_s, 0
            self._lent = ()
            tries += 1
            if self._is_left():
                self._save_received()
                return 128 + signal.SIGTERM
            if not self._has_started and (tries >= _TRIES or self._stop_s is not None):
                return self._lose(why) if self._stop_s is None else 128 + signal.SIGTERM
            is_patient = self._order["stays"] and self._stop_s is None
            if self._has_started and not is_patient and time.monotonic() - heard_s > lost_s:
                return self._lose(why, lost_s)
            if self._told_kill_s is not None and time.monotonic() - self._told_kill_s > _KILL_LIMIT_S:
                return self._lose(why, _KILL_LIMIT_S)
            self._save_received()
            if processes.wait_readable(self._wake, _PAUSE_S):
                processes.read_wake_pipe(self._wake)

    # -- one connection -------------------------------------------------------------------------------------------

    def _open(self) -> Session:
        host, python = self._order["host"], self._order["python"]
        command = build_ssh(self._order["ssh"], host, python)
        ssh = PipedProcess.adopt(self._lent) if self._lent else PipedProcess.start(command, prepare=_end_with_parent)
        self._reported.clear()
        self._uploads = iter(()) if self._has_started else self._read_files()
        lost_s = float(self._order["lost_s"])
        return Session(
            ssh.open_pipe(partial(explain_failure, python=python), limit_s=_END_LIMIT_S),
            "keeper",
            {
                **self._order["node"],
                "verb": "attach" if self._has_started else "start",
                "files": [name for name, _ in self._order["files"]],
            },
            window_bytes=UPLOAD_BYTES,
            lost_s=lost_s,
            start_s=max(lost_s, _READY_LIMIT_S),
        )

    def _read_files(self) -> Iterator[bytes]:
        for _, path in self._order["files"]:
            yield from read_pieces(path)
            yield b""

    def _serve(self, session: Session) -> None:
        """Serve until the replica has ended or the connection has."""
        began_s = alive_s = time.monotonic()
        while not session.is_over:
            try:
                self._move(session, _PAUSE_S)
            except _UnreadError:
                return
            self._heed_signals(session)
            now_s = time.monotonic()
            if self._is_left():
                return
            session.check()
            if self._stop_s is not None and not session.has_started:
                limit_s = _ATTACH_LIMIT_S if self._has_started else _PAUSE_S  # what has not started need not start
                if now_s - max(self._stop_s, began_s) > limit_s:
                    return
            if session.has_started and now_s - alive_s >= self._alive_s:
                alive_s = now_s
                session.send(Kind.ALIVE, self._tell_received())
                self._save_received()
            if self._told_kill_s is not None and now_s - self._told_kill_s > _KILL_LIMIT_S:
                return
        if session.is_refused:
            raise ControlError(session.failure, CommandExit.LOST)

    def _handle(self, session: Session, kind: bytes, content: bytes) -> None:
        """See `Link`."""
        del content
        if kind == Kind.READY:
            self._has_started = True
            session.send(Kind.HELLO, self._tell_received())
        elif kind == Kind.EXIT:
            session.send(Kind.DONE)
            session.flush(_FINISH_LIMIT_S)

    def _print(self, kind: bytes, data: bytes) -> None:
        """See `Link`."""
        try:
            write_all(int(kind), data)
        except BrokenPipeError:
            if self._order["stays"]:
                raise _UnreadError from None
        self._output += len(pack(kind, data))

    def _tell_received(self) -> bytes:
        return json.dumps({"output": self._output, "files": self._files}).encode()

    # -- signals and state ----------------------------------------------------------------------------------------

    def _note_signal(self, signum: int, frame: object) -> None:
        if not self._is_left():  # else another supervisor will attach
            super()._note_signal(signum, frame)

    def _heed_signals(self, session: Session) -> None:
        if self._stop_s is not None and self._is_orphan() and "KILL" not in self._signals:  # noqa: SIM102
            if time.monotonic() - self._stop_s > float(self._order["grace_s"]):  # only the link measures it
                self._signals.append("KILL")
        for name in self._signals[:]:
            self._stop_s = self._stop_s or time.monotonic()
            if name == "KILL":
                self._told_kill_s = self._told_kill_s or time.monotonic()
            if session.has_started and name not in self._reported:
                self._reported.add(name)
                session.send_signal(name)

    def _is_left(self) -> bool:
        """Return whether the supervisor has died and the replica goes on without it."""
        return bool(self._order["stays"]) and self._is_orphan()

    def _lose(self, text: str, limit_s: float | None = None) -> int:
        """Give the replica up, which was not reached for so long, and return the exit code."""
        reason = Reason(code=Code.LINK_LOST, host=self._order["host"], text=text, limit_s=limit_s)
        return self._give_up(reason, output=self._output, files=self._files)

    def _save_received(self) -> None:
        self._save(output=self._output, files=self._files)


def _end_with_parent() -> None:
    processes.set_death_signal(signal.SIGKILL)
    os.setpgid(0, 0)


main = partial(run_link, SshLink)
