"""The program on a host, which arrives over the connection's standard input and owns a replica there.

It is standard library only, and one text with `frames` and `processes`.
`start` unpacks what the link sends into a run folder and forks the keeper, which owns the replica, leads a session of
its own, and listens at a socket in the run folder. What sshd has started, then as after a later `attach`, only passes
bytes between the connection and that socket. So a connection can break and another one take its place: output waits in
files until the link has it.

The keeper ends the replica when no link has been heard for `lost_s` seconds, unless the replica `stays`. The run folder
is removed when the link has got the exit code, or by the keeper when no link comes any more. Over 400 lines: it travels
as one file.
"""

import contextlib
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from muster._shared.folders import remove_folder
from muster._shared.processes import become_subreaper, kill_descendants, set_death_signal
from muster.schedulers.inside.frames import FRAME, ChangedFiles, FrameReader, OutputPipes, pack

MAGIC = b"\0muster-ssh\n"
"""Ends what the user's shell may print before."""
HELLO, SIGNAL, ALIVE, DONE = b"O", b"S", b"H", b"A"
"""The link's. HELLO, and ALIVE: JSON, the bytes that it has of each stream, and of each file that only grows. SIGNAL: a
name. DONE: it has the exit code."""
READY, OUT, ERR, FILE, EXIT, FAILED = b"R", b"1", b"2", b"F", b"X", b"E"
"""The other side's, and ALIVE as its answer. READY: the keeper listens. FILE: see `frames`. FAILED: why
nothing runs."""

_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE)
"""By the keeper."""
_CHUNK_BYTES = 1 << 16
_SPOOL_LIMIT_BYTES = 64 << 20
"""Output that the link has is forgotten when there is so much of it."""
_HELLO_LIMIT_S = 20.0
_LOOK_S = 1.0
_KEPT_S = 86400.0
"""How long the output of a replica that has stayed, and ended, waits for a link."""
_END_LIMIT_S = 10.0
_GUARD = """\
import sys
sys.path.insert(0, sys.argv[1])
from muster._shared.guard import main
sys.exit(main(sys.argv[2:]))
"""


class _Spool:
    """The replica's output until the link has it: frames in a file, in the order in which it was written."""

    def __init__(self) -> None:
        self._fd = os.open("output", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._sent = self._size = 0
        self._base = {OUT: 0, ERR: 0}
        """Bytes of each stream that are no longer in the file."""
        self._written = dict(self._base)

    def add(self, kind: bytes, data: bytes) -> None:
        """Append output. A full disk costs output, and not the replica."""
        for begin in range(0, len(data), _CHUNK_BYTES):
            content = data[begin : begin + _CHUNK_BYTES]
            frame = pack(kind, content)
            with contextlib.suppress(OSError):
                if os.pwrite(self._fd, frame, self._size) == len(frame):
                    self._size += len(frame)
                    self._written[kind] += len(content)

    def read(self) -> bytes:
        """Return the next frames for the link."""
        frames = b"".join(pack(*each) for each in self._read_frames())
        self._sent += len(frames)
        return frames

    def confirm(self, received: Mapping[str, int]) -> None:
        """Drop what need not be kept, because the link has all of it.

        Args:
            received: bytes that it has of each stream.
        """
        has_all = all(received.get(kind.decode()) == count for kind, count in self._written.items())
        if has_all and self._size > _SPOOL_LIMIT_BYTES:
            os.ftruncate(self._fd, 0)
            self._sent = self._size = 0
            self._base = dict(self._written)

    def rewind(self, received: Mapping[str, int]) -> None:
        """Go back to the first output that another link does not have yet. See `confirm`."""
        self._sent, counts = 0, dict(self._base)
        while frames := self._read_frames():
            for kind, content in frames:
                counts[kind] += len(content)
                if counts[kind] > received.get(kind.decode(), 0):
                    return
                self._sent += FRAME.size + len(content)

    def _read_frames(self) -> list[tuple[bytes, bytes]]:
        data = os.pread(self._fd, min(self._size - self._sent, 2 * _CHUNK_BYTES), self._sent)
        return list(FrameReader().feed(data))


class Keeper:
    """Owns one replica. It is for one use.

    Args:
        order: the link's, see `driver.SshDriver`.
        run: absolute path of the run folder, which is the working directory.
        listener: listens at the run folder's socket.
    """

    def __init__(self, order: Mapping[str, Any], run: str, listener: socket.socket) -> None:
        become_subreaper()
        self._order, self._run, self._listener = order, run, listener
        self._selector = selectors.DefaultSelector()
        self._link: socket.socket | None = None
        self._heard_s = time.monotonic() - float(order["lost_s"]) + _HELLO_LIMIT_S  # the first link says hello soon
        self._stays = False
        """Once the first link has said hello."""
        self._reset_link()
        self._code: int | None = None
        self._ended_s: float | None = None
        self._stop_s: float | None = None
        self._is_over = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._start()

    def run(self) -> None:
        """Run until the replica has ended and the link has all of it, or no link comes any more."""
        looked_s = 0.0
        while not self._is_over:
            for key, _ in self._selector.select(_LOOK_S):
                if key.fd in self._selector.get_map():
                    key.data()
            if time.monotonic() - looked_s >= _LOOK_S:
                looked_s = time.monotonic()
                self._look_at_files()
                self._look_at_clock(looked_s)
            self._push()

    # -- the replica ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        parent = os.getpid()

        def prepare() -> None:
            set_death_signal(signal.SIGTERM)
            for signum in _IGNORED:  # agents would keep them ignored
                signal.signal(signum, signal.SIG_DFL)
            if os.getppid() != parent:
                os._exit(1)

        command = list(self._order["command"])
        if not self._order["runs_agent"]:  # an agent brings its own guard
            command = [sys.executable, "-c", _GUARD, os.path.join(self._run, "muster-agent.zip"), "--", *command]
        self._outputs = OutputPipes()
        process = subprocess.Popen(
            command,
            env={**os.environ, **self._order["env"]},
            cwd=os.path.join(self._run, "work"),
            stdin=subprocess.DEVNULL,
            stdout=self._outputs.write_fds[0],
            stderr=self._outputs.write_fds[1],
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509  # this process has one thread
        )
        self._pid = process.pid
        self._pidfd = os.pidfd_open(process.pid)
        self._selector.register(self._pidfd, selectors.EVENT_READ, self._handle_end)
        self._outputs.close_write_ends()
        self._spool = _Spool()
        self._selector.register(self._outputs, selectors.EVENT_READ, lambda: self._keep(self._outputs.read()))

    def _keep(self, found: Iterable[tuple[int, bytes, bool]]) -> None:
        for number, data, _ in found:
            self._spool.add((OUT, ERR)[number - 1], data)

    def _handle_end(self) -> None:
        self._selector.unregister(self._pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._code = code if code >= 0 else 128 - code
        self._kill_rest()
        self._keep(self._outputs.drain())  # all writers have ended
        self._ended_s = time.monotonic()
        self._look_at_files()

    def _kill_rest(self) -> None:
        limit_s = time.monotonic() + _END_LIMIT_S
        while kill_descendants(os.getpid()) and time.monotonic() < limit_s:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.005)

    def _signal(self, name: str) -> None:
        if self._code is not None:
            return
        if name == "KILL":
            kill_descendants(os.getpid())
            return
        if self._stop_s is None:
            self._stop_s = time.monotonic()
        os.kill(self._pid, signal.Signals[f"SIG{name}"])

    # -- the link -------------------------------------------------------------------------------------------------

    def _reset_link(self) -> None:
        self._frames = FrameReader()
        self._pending = bytearray()
        self._greeted = self._told_exit = False
        self._files = ChangedFiles(self._run, FILE)

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        self._drop_link()
        self._link = link
        link.setblocking(False)
        self._selector.register(link, selectors.EVENT_READ, self._receive)

    def _drop_link(self) -> None:
        if self._link is not None:
            self._selector.unregister(self._link)
            self._link.close()
            self._link = None
        self._reset_link()

    def _receive(self) -> None:
        assert self._link is not None  # noqa: S101  # it is registered
        try:
            data = self._link.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop_link()
            return
        self._heard_s = time.monotonic()
        for kind, content in self._frames.feed(data):
            self._handle(kind, content)

    def _handle(self, kind: bytes, content: bytes) -> None:
        if kind == SIGNAL:
            self._signal(content.decode())
        elif kind == DONE:
            self._is_over = self._code is not None
        elif kind in (HELLO, ALIVE):
            received = json.loads(content)
            if kind == HELLO:
                self._spool.rewind(received["streams"])
                self._greeted, self._stays = True, self._order["stays"]
                self._files.rewind(received["files"])
                self._look_at_files()
            else:
                self._spool.confirm(received["streams"])
                if not self._pending:
                    self._files.rewind(received["files"])
                self._pending += pack(ALIVE)

    def _push(self) -> None:
        """Send what the connection takes now. If there is more, wait for room."""
        if self._link is None or not self._greeted:
            return
        try:
            while self._fill():
                del self._pending[: self._link.send(self._pending)]
            wanted = selectors.EVENT_READ
        except BlockingIOError:
            wanted = selectors.EVENT_READ | selectors.EVENT_WRITE
        except OSError:
            self._drop_link()
            return
        if self._selector.get_key(self._link).events != wanted:
            self._selector.modify(self._link, wanted, self._receive)

    def _fill(self) -> bool:
        """Return whether there is something to send."""
        self._pending += b"" if self._pending else self._spool.read()
        if not self._pending and self._code is not None and not self._told_exit:
            self._told_exit = True
            self._pending += pack(EXIT, str(self._code).encode())
        return bool(self._pending)

    # -- files and clock ------------------------------------------------------------------------------------------

    def _look_at_files(self) -> None:
        """Queue what the agent has written since the last look, and the replica's error file."""
        if self._link is not None and self._greeted:
            self._pending += self._files.read()

    def _look_at_clock(self, now_s: float) -> None:
        lost = now_s - self._heard_s > float(self._order["lost_s"])
        if lost and self._link is not None:
            self._drop_link()
        if self._ended_s is not None:
            kept_s = _KEPT_S if self._stays else float(self._order["lost_s"])
            self._is_over |= self._link is None and now_s - max(self._ended_s, self._heard_s) > kept_s
            self._is_over |= lost and not self._stays
        elif lost and not self._stays:
            if self._stop_s is None:
                self._signal("TERM")
            elif now_s - self._stop_s > float(self._order["grace_s"]):
                self._signal("KILL")


# -- what sshd starts -------------------------------------------------------------------------------------------------


def main(stdin: io.BufferedReader) -> None:
    """Do what the order says. Its first line is JSON.

    Args:
        stdin: the connection, after this program.
    """
    _say(MAGIC)
    order = json.loads(stdin.readline())
    if order["verb"] == "ask":
        _ask(order)
    run = order["run"]
    try:
        if order["verb"] == "start":
            _start(order, run, stdin)
        os.chdir(run)
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect("socket")
        except ConnectionRefusedError:  # a killed keeper, or a restarted host
            _remove(run)
            raise
    except EOFError:
        os._exit(1)
    except (OSError, tarfile.TarError) as error:
        reason = f"{getattr(error, 'filename', None) or run}: {getattr(error, 'strerror', None) or error}"
        _say(pack(FAILED, reason.encode()))
        os._exit(1)
    _say(pack(READY))
    _relay(stdin, link)


def _say(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def _start(order: Mapping[str, Any], run: str, stdin: io.BufferedReader) -> None:
    """Unpack the run folder and fork its keeper. Nothing is left if that fails."""
    parent = os.path.dirname(run)
    os.makedirs(os.path.dirname(parent), exist_ok=True)  # checked folders may not exist yet
    try:
        os.mkdir(parent, 0o700)
    except FileExistsError:
        status = os.lstat(parent)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(1, "belongs to another user, or others can use it", parent) from None
    _end_earlier(parent, os.path.basename(run))
    os.mkdir(run, 0o700)
    try:
        for name, size in order["files"]:
            _receive_file(os.path.join(run, name), size, stdin)
        os.mkdir(os.path.join(run, "log"))
        os.mkdir(os.path.join(run, "work"))
        packed = os.path.join(run, "workspace.tar")
        if os.path.exists(packed):
            _unpack(packed, os.path.join(run, "work"))
            os.unlink(packed)
        os.chdir(run)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("socket")
        listener.listen(8)
    except BaseException:
        _remove(run)
        raise
    if os.fork() == 0:
        _become_keeper(order, run, listener)
    listener.close()
    os.wait()


def _end_earlier(parent: str, name: str) -> None:
    """End earlier starts of this replica here: their link is gone, and they must not run beside this one."""
    stem = name.rpartition("-")[0]
    limit_s = time.monotonic() + _END_LIMIT_S
    for other in os.listdir(parent):
        if other.rpartition("-")[0] != stem or other == name:
            continue
        folder = os.path.join(parent, other)
        with contextlib.suppress(OSError):
            os.chdir(folder)
            with socket.socket(socket.AF_UNIX) as link:
                link.settimeout(_END_LIMIT_S)
                link.connect("socket")
                received = json.dumps({"streams": {}, "files": {}}).encode()
                link.sendall(pack(SIGNAL, b"KILL") + pack(HELLO, received))
                frames = FrameReader()
                while time.monotonic() < limit_s:
                    data = link.recv(_CHUNK_BYTES)
                    if not data or any(kind == EXIT for kind, _ in frames.feed(data)):
                        link.sendall(pack(DONE))
                        break
        os.chdir("/")
        _remove(folder, parent_too=False)


def _receive_file(path: str, size: int, stdin: io.BufferedReader) -> None:
    told_s = time.monotonic()
    with open(path, "xb") as file:
        while size:
            if time.monotonic() - told_s > _LOOK_S:
                told_s = time.monotonic()
                _say(pack(ALIVE))
            data = stdin.read1(min(size, 1 << 20))
            if not data:
                raise EOFError
            file.write(data)
            size -= len(data)


def _unpack(packed: str, into: str) -> None:
    with tarfile.open(packed) as archive:
        if hasattr(tarfile, "fully_trusted_filter"):
            archive.extractall(into, filter="fully_trusted")  # noqa: S202  # the user's own
        else:
            archive.extractall(into)  # noqa: S202  # the user's own


def _remove(run: str, *, parent_too: bool = True) -> None:
    remove_folder(run, ignores_errors=True)
    if parent_too:
        with contextlib.suppress(OSError):  # other replicas of the app are there
            os.rmdir(os.path.dirname(run))


def _become_keeper(order: Mapping[str, Any], run: str, listener: socket.socket) -> NoReturn:
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
    try:
        null = os.open(os.devnull, os.O_RDWR)
        errors = os.open("keeper.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for fd, number in ((null, 0), (null, 1), (errors, 2)):
            os.dup2(fd, number)
        for signum in _IGNORED:
            signal.signal(signum, signal.SIG_IGN)
        try:
            keeper = Keeper(order, run, listener)
        except OSError as error:
            listener.setblocking(True)
            link, _ = listener.accept()
            link.sendall(pack(FAILED, f"{error.filename or run}: {error.strerror}".encode()))
        else:
            keeper.run()
    finally:
        os.chdir("/")
        _remove(run)
        os._exit(0)


def _relay(stdin: io.BufferedReader, link: socket.socket) -> NoReturn:
    """Pass bytes between the connection and the keeper until one of the two ends."""

    def pass_on() -> None:
        with contextlib.suppress(OSError):
            while data := stdin.read1(_CHUNK_BYTES):
                link.sendall(data)
        os._exit(0)

    threading.Thread(target=pass_on, daemon=True).start()
    with contextlib.suppress(OSError):
        while data := link.recv(_CHUNK_BYTES):
            _say(data)
    os._exit(0)


def _ask(order: Mapping[str, Any]) -> NoReturn:
    """Run a command beside the replica and report how it has ended."""
    try:
        done = subprocess.run(
            order["command"],
            env={**os.environ, **order["env"]},
            cwd=order["run"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=order["limit_s"],
            check=False,
        )
        answer = [done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")]
    except (OSError, subprocess.TimeoutExpired) as error:
        answer = [1, "", str(error)]
    _say(json.dumps(answer).encode() + b"\n")
    os._exit(0)
