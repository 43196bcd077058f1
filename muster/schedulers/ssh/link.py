"""A process of this machine that stands for one replica on a host. It holds the connection and passes all on.

The supervisor starts it as it would start the replica. Its output and exit code are the replica's, and SIGTERM, SIGINT
and SIGQUIT (for a kill) reach the replica. A connection that breaks is made again. Standard library only.
"""

import contextlib
import io
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from muster._shared import processes
from muster._shared.contract import print_line
from muster._shared.foreign_files import read_whole
from muster.schedulers.inside.frames import FrameReader, build_program, keep_file, pack
from muster.schedulers.ssh import node
from muster.schedulers.ssh.command import build_ssh, build_takeover, explain_failure
from muster.schedulers.ssh.connection import Ssh

LOST: Final = 255
"""Exit code of a link whose replica is lost: its host is not reached, or has not started it."""
STATE_NAME: Final = "link.json"
"""In the replica's folder: how much this side has, and why the replica was lost."""

_ALIVE_S: Final = 5.0
"""Or a quarter of `lost_s`."""
_PAUSE_S: Final = 1.0
_READY_LIMIT_S: Final = 30.0
"""A host that is busy needs some time to begin."""
_ATTACH_LIMIT_S: Final = 15.0
_TRIES: Final = 3
"""For the first connection: a host that is busy refuses some."""
_NOISE_LIMIT_BYTES: Final = 1 << 16
_KILL_LIMIT_S: Final = 10.0
_SIGNALS: Final = {signal.SIGTERM: "TERM", signal.SIGINT: "INT", signal.SIGQUIT: "KILL"}


class LostError(Exception):
    """The replica is lost. `str()` says why."""


class Link:
    """Holds the connection to one replica, to its end.

    Args:
        order: see `driver.SshDriver`.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._order = order
        self._state_path = Path(order["replica_dir"], STATE_NAME)
        self._streams = {"1": 0, "2": 0}
        self._files: dict[str, int] = {}
        if order["verb"] == "attach":
            with contextlib.suppress(OSError, ValueError):
                known = json.loads(read_whole(self._state_path))
                self._streams, self._files = known["streams"], known["files"]
        self._alive_s = min(_ALIVE_S, float(order["lost_s"]) / 4)
        self._parent = os.getppid()
        self._signals: list[str] = []
        self._stop_s: float | None = None
        self._told_kill_s: float | None = None
        self._started = order["verb"] == "attach"
        self._lent: Sequence[int] = order["fds"]
        """The descriptors of an `ssh` that has looked at the host already. They are for the first connection."""
        self._code: int | None = None
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for signum in _SIGNALS:
            signal.signal(signum, self._note_signal)

    def run(self) -> int:
        """Return the replica's exit code, or `LOST` with the reason in its state."""
        lost_s = 2 * float(self._order["lost_s"])
        heard_s, tries = time.monotonic(), 0
        while True:
            try:
                connection = _Connection(self._order, "attach" if self._started else "start", self._lent)
            except OSError as error:  # here no process, descriptor or thread is left for the moment
                why = str(error)
            else:
                try:
                    self._serve(connection)
                except (LostError, OSError, ValueError) as error:
                    return self._give_up(str(error))
                finally:
                    why = connection.close()
                heard_s, tries = (heard_s, tries) if connection.heard_s is None else (connection.heard_s, 0)
            self._lent = ()
            if self._code is not None:
                self._save()
                return self._code
            tries += 1
            if self._is_left():
                self._save()
                return 128 + signal.SIGTERM
            if not self._started and (tries >= _TRIES or self._stop_s is not None):
                return self._give_up(why) if self._stop_s is None else 128 + signal.SIGTERM
            is_patient = self._order["stays"] and self._stop_s is None
            if self._started and not is_patient and time.monotonic() - heard_s > lost_s:
                return self._give_up(f"not reached for {lost_s:g} s: {why}")
            if self._told_kill_s is not None and time.monotonic() - self._told_kill_s > _KILL_LIMIT_S:
                return self._give_up(f"not reached when it was to be killed: {why}")
            self._save()
            processes.wait_readable(self._wake_read, _PAUSE_S)

    # -- one connection -------------------------------------------------------------------------------------------

    def _serve(self, connection: "_Connection") -> None:
        """Serve until the replica has ended or the connection has."""
        watched = dict.fromkeys((self._wake_read, connection.stdout), processes.READ)
        alive_s = time.monotonic()
        while self._code is None:
            if connection.stdout in processes.wait_events(watched, _PAUSE_S) and not self._receive(connection):
                return
            self._heed_signals(connection)
            now_s = time.monotonic()
            silence_s = float(self._order["lost_s"])
            if not connection.is_ready:
                silence_s = max(silence_s, _READY_LIMIT_S)
            if self._is_left() or connection.is_silent(now_s, silence_s):
                return
            if self._stop_s is not None and not connection.is_ready:
                limit_s = _ATTACH_LIMIT_S if self._started else _PAUSE_S  # what has not started need not start
                if now_s - max(self._stop_s, connection.began_s) > limit_s:
                    return
            if connection.is_ready and now_s - alive_s >= self._alive_s:
                alive_s = now_s
                connection.send(node.ALIVE, self._tell_received())
                self._save()
            if self._told_kill_s is not None and now_s - self._told_kill_s > _KILL_LIMIT_S:
                return

    def _receive(self, connection: "_Connection") -> bool:
        frames = connection.receive()
        if frames is None:
            return False
        for kind, content in frames:
            if kind == node.READY:
                self._started = connection.is_ready = True
                connection.send(node.HELLO, self._tell_received())
            elif kind in (node.OUT, node.ERR):
                if not self._print(1 if kind == node.OUT else 2, content):
                    return False
                self._streams[kind.decode()] += len(content)
            elif kind == node.FILE:
                keep_file(content, self._order["replica_dir"], self._order["role_dir"], self._files)
            elif kind == node.FAILED:
                raise LostError(content.decode(errors="replace"))
            elif kind == node.EXIT:
                self._code = int(content)
                connection.send(node.DONE)
                connection.finish()
        return True

    def _print(self, fd: int, data: bytes) -> bool:
        """Pass output on. Return False if no process reads it any more and another link will."""
        try:
            while data:
                data = data[os.write(fd, data) :]
        except BrokenPipeError:
            return not self._order["stays"]
        return True

    def _tell_received(self) -> bytes:
        return json.dumps({"streams": self._streams, "files": self._files}).encode()

    # -- signals and state ----------------------------------------------------------------------------------------

    def _note_signal(self, signum: int, _frame: object) -> None:
        if self._is_left() and self._order["stays"]:
            return  # another supervisor will attach
        self._signals.append(_SIGNALS[signal.Signals(signum)])

    def _heed_signals(self, connection: "_Connection") -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        if self._stop_s is not None and self._parent != os.getppid() and "KILL" not in self._signals:  # noqa: SIM102
            if time.monotonic() - self._stop_s > float(self._order["grace_s"]):  # only the link measures it
                self._signals.append("KILL")
        for name in self._signals[:]:
            self._stop_s = self._stop_s or time.monotonic()
            if name == "KILL":
                self._told_kill_s = self._told_kill_s or time.monotonic()
            if connection.is_ready and name not in connection.told:
                connection.told.add(name)
                connection.send(node.SIGNAL, name.encode())

    def _is_left(self) -> bool:
        """Return whether the supervisor has died and the replica goes on without it."""
        return bool(self._order["stays"]) and os.getppid() != self._parent

    def _give_up(self, reason: str) -> int:
        self._save(f"{self._order['host']}: {reason}")
        return LOST

    def _save(self, reason: str = "") -> None:
        state = {"streams": self._streams, "files": self._files, "reason": reason}
        with contextlib.suppress(OSError):
            made = self._state_path.with_name(f".{STATE_NAME}.{os.getpid()}")
            made.write_text(json.dumps(state))
            made.replace(self._state_path)


class _Connection:
    """One `ssh`, and a thread that writes to it, so that a slow host does not hold up its output.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, order: Mapping[str, Any], verb: str, lent: Sequence[int]) -> None:
        program = build_program(node.__file__, "main(stdin)").encode()
        files = order["files"] if verb == "start" else []
        sizes = [(name, os.path.getsize(path)) for name, path in files]
        self._python = order["python"]
        if lent:
            self._ssh = Ssh(lent)
            program = build_takeover(program)
        else:
            self._ssh = Ssh.start(build_ssh(order["ssh"], order["host"], order["python"], program), _end_with_parent)
        self.stdout = self._ssh.stdout
        self.is_open = False
        """It has answered."""
        self.is_ready = False
        """The replica's keeper listens."""
        self.heard_s: float | None = None
        self.told: set[str] = set()
        self.began_s = time.monotonic()
        self._noise = b""
        self._frames = FrameReader()
        self._errors = b""
        told = {**order["node"], "verb": verb, "files": sizes}
        self._queue: queue.SimpleQueue[bytes | Path | None] = queue.SimpleQueue()
        self._queue.put(program + json.dumps(told).encode() + b"\n")
        for _, path in files:
            self._queue.put(Path(path))
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._write, self._read_errors)]
        unread = [self._ssh.stdin, self._ssh.stderr, self.stdout]
        try:
            for thread in self._threads:
                thread.start()
                del unread[0]
        except RuntimeError as error:
            self._queue.put(None)
            self._ssh.end(0.0)
            for fd in unread:
                os.close(fd)
            raise OSError(str(error)) from error

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Queue a frame."""
        self._queue.put(pack(kind, content))

    def finish(self) -> None:
        """Send what is queued, and close this side."""
        self._queue.put(None)
        self._threads[0].join(_PAUSE_S * 5)

    def receive(self) -> list[tuple[bytes, bytes]] | None:
        """Return the frames that have come. None: the connection has ended."""
        data = os.read(self.stdout, 1 << 16)
        if not data:
            return None
        if not self.is_open:
            self._noise += data
            noise, found, data = self._noise.partition(node.MAGIC)
            if not found:
                return [] if len(noise) < _NOISE_LIMIT_BYTES else None
            self.is_open = True
        self.heard_s = time.monotonic()
        return list(self._frames.feed(data))

    def is_silent(self, now_s: float, limit_s: float) -> bool:
        """Return whether it has said nothing for so long that it no longer counts."""
        return now_s - (self.heard_s or self.began_s) > limit_s

    def close(self) -> str:
        """End it, and return why it has ended."""
        code = self._ssh.end(0.5 if self.is_open else 0.05)
        self._queue.put(None)
        for thread in self._threads:
            thread.join(1.0)
        os.close(self.stdout)
        return explain_failure(self._errors, code, self._python)

    def _write(self) -> None:
        with open(self._ssh.stdin, "wb", buffering=0) as stdin, contextlib.suppress(OSError):
            while (item := self._queue.get()) is not None:
                if isinstance(item, bytes):
                    _write_all(stdin, item)
                else:
                    with item.open("rb") as file:
                        while data := file.read(1 << 20):
                            _write_all(stdin, data)

    def _read_errors(self) -> None:
        with open(self._ssh.stderr, "rb", buffering=0) as stderr:
            while data := stderr.read(4096):
                self._errors = (self._errors + data)[-4096:]


def _write_all(file: io.FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def _end_with_parent() -> None:
    processes.set_death_signal(signal.SIGKILL)
    os.setpgid(0, 0)


def main(fd: int) -> int:
    """Run a link. Its order is JSON in the file of a descriptor."""
    with os.fdopen(fd, "rb") as file:
        order = json.load(file)
    try:
        return Link(order).run()
    except OSError as error:
        print_line(str(error))
        return LOST


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
