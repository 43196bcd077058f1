"""The program on a host, which arrives over the connection's standard input and owns a replica there.

It is standard library only.
`start` unpacks what the link sends into a run folder and forks the keeper, which owns the replica, leads a session of
its own, and listens at a socket in the run folder. What sshd has started, then as after a later `attach`, only passes
bytes between the connection and that socket. So a connection can break and another one take its place: output waits in
files until the link has it. HELLO, and ALIVE, of the link is JSON: how many bytes it has of the frames with output, and
of each file that only grows.

The keeper ends the replica when no link has been heard for `lost_s` seconds, unless the replica `stays`. The run folder
is removed when the link has got the exit code, or by the keeper when no link comes any more.
"""

import contextlib
import io
import json
import os
import signal
import socket
import sys
import tarfile
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from muster._shared.folders import remove_folder
from muster._shared.processes import (
    READ,
    become_subreaper,
    kill_descendants,
    open_wake_pipe,
    read_wake_pipe,
    spawn_program,
    wait_events,
)
from muster.schedulers.node_program.frames import CHUNK_BYTES, NUMBER, Channel, FrameReader, Kind, pack, write_all
from muster.schedulers.node_program.output_pipes import OutputPipes
from muster.schedulers.node_program.run_files import ChangedFiles
from muster.schedulers.node_program.served import collect_children, end_descendants, read_frame, read_order

_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE)
"""By the keeper."""
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
        self._dropped = 0
        """Bytes before those in the file."""

    def add(self, kind: bytes, data: bytes) -> None:
        """Append output. A full disk costs output, and not the replica."""
        for begin in range(0, len(data), CHUNK_BYTES):
            frame = pack(kind, data[begin : begin + CHUNK_BYTES])
            with contextlib.suppress(OSError):
                if os.pwrite(self._fd, frame, self._size) == len(frame):
                    self._size += len(frame)

    def read(self) -> bytes:
        """Return the next frames for the link."""
        data = os.pread(self._fd, min(self._size - self._sent, 2 * CHUNK_BYTES), self._sent)
        frames = b"".join(pack(*each) for each in FrameReader().feed(data))
        self._sent += len(frames)
        return frames

    def confirm(self, received: int) -> None:
        """Drop what need not be kept, because the link has all of it.

        Args:
            received: bytes of frames that it has.
        """
        if received == self._dropped + self._size and self._size > _SPOOL_LIMIT_BYTES:
            os.ftruncate(self._fd, 0)
            self._sent = self._size = 0
            self._dropped = received

    def rewind(self, received: int) -> None:
        """Go back to the first output that another link does not have yet. See `confirm`."""
        self._sent = min(max(0, received - self._dropped), self._size)


class Keeper:
    """Owns one replica. It is for one use.

    Args:
        order: the link's, see `ssh.driver.SshDriver`.
        run: absolute path of the run folder, which is the working directory.
        listener: listens at the run folder's socket.
    """

    def __init__(self, order: Mapping[str, Any], run: str, listener: socket.socket) -> None:
        become_subreaper()
        self._order, self._run, self._listener = order, run, listener
        self._link: socket.socket | None = None
        self._heard_s = time.monotonic() - float(order["lost_s"]) + _HELLO_LIMIT_S  # the first link says hello soon
        self._stays = False
        """Once the first link has said hello."""
        self._code: int | None = None
        self._ended_s: float | None = None
        self._stop_s: float | None = None
        self._is_over = False
        listener.setblocking(False)
        self._wake = open_wake_pipe([signal.SIGCHLD])
        self._start()

    def run(self) -> None:
        """Run until the replica has ended and the link has all of it, or no link comes any more."""
        looked_s = 0.0
        while not self._is_over:
            self._act(wait_events(self._choose_events(), _LOOK_S))
            if time.monotonic() - looked_s >= _LOOK_S:
                looked_s = time.monotonic()
                self._look_at_files()
                self._look_at_clock(looked_s)
            self._push()

    def _choose_events(self) -> dict[int, int]:
        wanted = {self._wake: READ, self._listener.fileno(): READ}
        if self._code is None:
            wanted[self._outputs.fileno()] = READ
        return wanted if self._link is None else {**wanted, **self._channel.wanted}

    def _act(self, ready: Mapping[int, int]) -> None:
        if self._link is not None and self._link.fileno() in ready:
            self._receive()
        if self._code is None:
            self._keep(self._outputs.read())
        if self._wake in ready:
            read_wake_pipe(self._wake)
            self._collect()
        if self._listener.fileno() in ready:
            self._accept()

    # -- the replica ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        command = list(self._order["command"])
        if not self._order["runs_agent"]:  # an agent brings its own guard
            command = [sys.executable, "-c", _GUARD, os.path.join(self._run, "muster-agent.zip"), "--", *command]
        self._outputs = OutputPipes()
        env = {**os.environ, **self._order["env"]}
        streams = (0, *self._outputs.write_fds)
        self._pid = spawn_program(command, env, os.path.join(self._run, "work"), streams, death_signal=signal.SIGTERM)
        self._outputs.close_write_ends()
        self._spool = _Spool()

    def _keep(self, found: Iterable[tuple[int, bytes, bool]]) -> None:
        for number, data, _ in found:
            self._spool.add((Kind.OUT, Kind.ERR)[number - 1], data)

    def _collect(self) -> None:
        ended = collect_children()
        if self._pid in ended:
            self._code = ended[self._pid]
            end_descendants()
            self._keep(self._outputs.drain())  # all writers have ended
            self._ended_s = time.monotonic()
            self._look_at_files()

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

    def _accept(self) -> None:
        link, _ = self._listener.accept()
        self._drop_link()
        self._link = link
        self._channel = Channel(link.fileno(), link.fileno())
        self._greeted = self._told_exit = False
        self._files = ChangedFiles(self._run)

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _receive(self) -> None:
        frames = self._channel.receive()
        if frames is None:
            self._drop_link()
            return
        self._heard_s = self._channel.heard_s
        for kind, content in frames:
            self._handle(kind, content)

    def _handle(self, kind: bytes, content: bytes) -> None:
        if kind == Kind.SIGNAL:
            self._signal(content.decode())
        elif kind == Kind.DONE:
            self._is_over = self._code is not None
        elif kind in (Kind.HELLO, Kind.ALIVE):
            received = json.loads(content)
            if kind == Kind.HELLO:
                self._spool.rewind(received["output"])
                self._greeted, self._stays = True, self._order["stays"]
                self._files.rewind(received["files"])
                self._look_at_files()
            else:
                self._spool.confirm(received["output"])
                if not self._channel.pending:
                    self._files.rewind(received["files"])
                self._channel.send(Kind.ALIVE)

    def _push(self) -> None:
        """Send what the connection takes now."""
        if self._link is None or not self._greeted:
            return
        self._channel.flush()
        while not self._channel.pending and (data := self._spool.read()):
            self._channel.write(data)
        if not self._channel.pending and self._code is not None and not self._told_exit:
            self._told_exit = True
            self._channel.send(Kind.EXIT, str(self._code).encode())
        if self._channel.is_broken:
            self._drop_link()

    # -- files and clock ------------------------------------------------------------------------------------------

    def _look_at_files(self) -> None:
        """Send what the agent has written since the last look, and the replica's error file."""
        if self._link is not None and self._greeted:
            self._channel.write(self._files.read())

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
    """Do what the order says.

    Args:
        stdin: the connection, after this program.
    """
    order = read_order(stdin)
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
        write_all(1, pack(Kind.FAILED, reason.encode()))
        os._exit(1)
    write_all(1, pack(Kind.READY))
    _relay(stdin, link)


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
        for name in order["files"]:
            _receive_file(os.path.join(run, name), stdin)
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
                received = json.dumps({"output": 0, "files": {}}).encode()
                link.sendall(pack(Kind.SIGNAL, b"KILL") + pack(Kind.HELLO, received))
                frames = FrameReader()
                while time.monotonic() < limit_s:
                    data = link.recv(CHUNK_BYTES)
                    if not data or any(kind == Kind.EXIT for kind, _ in frames.feed(data)):
                        link.sendall(pack(Kind.DONE))
                        break
        os.chdir("/")
        _remove(folder, parent_too=False)


def _receive_file(path: str, stdin: io.BufferedReader) -> None:
    with open(path, "xb") as file:
        while (frame := read_frame(stdin))[0] != Kind.CLOSED:
            file.write(frame[1])
            write_all(1, pack(Kind.TAKEN, NUMBER.pack(len(frame[1]))))


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
            link.sendall(pack(Kind.FAILED, f"{error.filename or run}: {error.strerror}".encode()))
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
            while data := stdin.read1(CHUNK_BYTES):
                link.sendall(data)
        os._exit(0)

    threading.Thread(target=pass_on, daemon=True).start()
    with contextlib.suppress(OSError):
        while data := link.recv(CHUNK_BYTES):
            write_all(1, data)
    os._exit(0)
