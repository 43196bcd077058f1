"""The program on one node, from this side: its text, what is to be done there, and what comes back.

The program is one text with the modules that it imports. Its last module, `command`, `keeper` or `held_run`, says what
the frames mean that are in no other one.
"""

import base64
import json
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from muster._shared import folders, holder_socket, processes
from muster._shared.control import CommandExit, ControlError
from muster._shared.processes import WRITE, wait_events
from muster.schedulers.node_program import agents, frames, output_pipes, run_files, served
from muster.schedulers.node_program.frames import FRAME_LIMIT_BYTES, LOST_S, Channel, Kind
from muster.schedulers.node_program.pipe import NodePipe

WINDOW_BYTES: Final = 1 << 16
"""How much input may be under way. What comes after it, such as a signal, must not wait behind it."""
OUTPUT_FRAME_LIMIT_BYTES: Final = 1 << 18
"""Of a node on which only a command runs: it sends nothing longer than its output."""
ALIVE_S: Final = 5.0
_START_LIMIT_S: Final = 60.0
_CAPTURE_LIMIT_BYTES: Final = 1 << 26
_BOOT: Final = 'import io; stdin=io.open(0,"rb",closefd=False); exec(stdin.read(int(stdin.readline())).decode("utf-8"))'
WORDS: Final = ("-c", _BOOT)
"""What follows the interpreter on the node. It is short, because it is part of a URL on Kubernetes, and works in every
Python, so that an old one can say which it is."""
_PARTS: Final = {
    "command": (processes, frames, agents, served),
    "keeper": (folders, processes, frames, output_pipes, run_files, served),
    "held_run": (folders, processes, holder_socket, frames, output_pipes, run_files, served),
}
"""What goes before each program."""
_PROGRAM: Final = """\
import sys, types
for name, text in {modules!r}.items():
    sys.modules[name] = types.ModuleType(name)
    exec(text, sys.modules[name].__dict__)
{source}
{call}
"""


@cache
def build_program(name: str, call: str = "main(stdin)") -> str:
    """Return the source of a program.

    Args:
        name: of its last module.
        call: its last line. `stdin` is the connection, after the program.
    """
    modules = {each.__name__: Path(str(each.__file__)).read_text() for each in _PARTS[name]}
    source = Path(__file__).with_name(f"{name}.py").read_text()
    text = _PROGRAM.format(modules=modules, source=source, call=call)
    packed = base64.b64encode(zlib.compress(text.encode()))  # a pipe that is not read yet takes 64 KiB
    return f"import base64, zlib\nexec(zlib.decompress(base64.b64decode({packed!r})).decode())\n"


def build_input(program: bytes) -> bytes:
    """Return what a Python with `WORDS` reads first."""
    return b"%d\n" % len(program) + program


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is to run on a node."""

    app: str
    """The app's name, without a namespace."""
    index: int
    """The index of the node."""
    command: Sequence[str] | None
    """None: a shell."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Beside the workers' variables."""
    tty: bool = False
    size: tuple[int, int] = (24, 80)
    """Rows and columns of the terminal."""
    is_hold: bool = False
    """The app is a hold, and the command gets what its holder was started with. See `command.complete_order`."""
    cwd: str | None = None
    """It runs in this folder, with the variables of the program, wherever the app's agent is."""
    takes_over: bool = False
    """It takes the program's place, and sends and receives frames itself."""


class LostNodeError(ControlError):
    """A node is not reached, or was lost.

    Args:
        line: see `ControlError`.
        why: the connection has ended. "": it is not known.
        was_reached: the program has begun there.
    """

    def __init__(self, line: str, why: str, *, was_reached: bool) -> None:
        super().__init__(line, CommandExit.LOST)
        self.why = why
        self.was_reached = was_reached


class Session:
    """A program that is being started on a node, runs or has ended. Close it. One thread receives, any may send.

    Args:
        pipe: of the node. `close` closes it.
        program: its name, see `build_program`.
        order: what it is to do.
        window_bytes: see `WINDOW_BYTES`.
        lost_s: after this long without a frame the node is lost,
        start_s: and after this long without the first.
        frame_limit_bytes: a longer frame of the node ends the session.
    """

    def __init__(
        self,
        pipe: NodePipe,
        program: str,
        order: Mapping[str, Any],
        *,
        window_bytes: int = WINDOW_BYTES,
        lost_s: float = LOST_S,
        start_s: float = _START_LIMIT_S,
        frame_limit_bytes: int = FRAME_LIMIT_BYTES,
    ) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._channel = Channel(pipe.stdout, pipe.stdin, has_noise=True, limit_bytes=frame_limit_bytes)
        self._window_bytes, self._lost_s, self._start_s = window_bytes, lost_s, start_s
        self._under_way = 0
        self._closed = threading.Event()
        self.end = ""
        """Why the connection has ended, if it is known."""
        self.has_started = False
        self.code: int | None = None
        """The exit code. None: it runs, or how it has ended is not known: then `failure` says why."""
        self.failure = ""
        """Why nothing runs, or not any more. "": it runs, or has ended."""
        self.is_refused = False
        """The node has said so, or has sent something else: another connection would not help."""
        try:
            self._channel.write(build_input(build_program(program).encode()))
            self.send(Kind.ORDER, json.dumps(order).encode())
        except BaseException:  # such as: muster was removed meanwhile
            self.close()
            raise

    @property
    def wanted(self) -> Mapping[int, int]:
        """What to wait for: `receive` then has something to do."""
        return {} if self._closed.is_set() else self._channel.wanted

    @property
    def heard_s(self) -> float:
        """When something came from the program, by the monotonic clock, or when it was started."""
        return self._channel.heard_s

    @property
    def was_reached(self) -> bool:
        """Whether the program has begun there."""
        return self._channel.has_begun

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.code is not None or bool(self.failure)

    @property
    def room_bytes(self) -> int:
        """How much input can be sent now."""
        return self._window_bytes - self._under_way

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Send a frame."""
        self._channel.send(kind, content)

    def send_input(self, data: bytes) -> None:
        """Send input of the command, at most `room_bytes`. b"": there is no more."""
        self._under_way += len(data)
        self.send(Kind.INPUT if data else Kind.CLOSED, data)

    def send_signal(self, name: str) -> None:
        """Send a signal, by its name without SIG, to the command. KILL goes to all that it has started."""
        self.send(Kind.SIGNAL, name.encode())

    def send_size(self, rows: int, columns: int) -> None:
        """Tell the size of the terminal."""
        self.send(Kind.SIZE, rows.to_bytes(2, "big") + columns.to_bytes(2, "big"))

    def say_alive(self, *, is_early: bool) -> None:
        """Say every `ALIVE_S` that this side is there, in a thread, whatever the others do.

        Args:
            is_early: also before the command has started.
        """
        while not self._closed.wait(ALIVE_S):
            if is_early or self.has_started:
                self.send(Kind.ALIVE)

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Send what is pending, read what has come, and yield output: 1 or 2, and bytes."""
        for kind, content in self.receive_frames():
            if kind in (Kind.OUT, Kind.ERR):
                yield int(kind), content

    def receive_frames(self) -> Iterator[tuple[bytes, bytes]]:
        """Send what is pending, read what has come, and yield what is not the session's own."""
        if self._closed.is_set():
            return
        self._channel.flush()
        found = self._channel.receive()
        if found is None:
            self._lose()
            return
        try:
            for kind, content in found:
                if kind == Kind.TAKEN:
                    self._under_way -= int.from_bytes(content, "big")
                elif kind == Kind.READY:
                    self.has_started = True
                elif kind == Kind.EXIT:
                    self.code = int(content)
                elif kind == Kind.FAILED:
                    self._refuse(content.decode(errors="replace"))
                yield kind, content
        except (OSError, ValueError) as error:
            self._refuse(str(error))

    def check(self) -> None:
        """Give up a node of which nothing was heard for too long."""
        limit_s = self._lost_s if self.has_started else self._start_s
        if not self.is_over and time.monotonic() - self.heard_s > limit_s:
            self.failure = f"no answer came for {limit_s:.0f} s"

    def flush(self, limit_s: float) -> None:
        """Send what is pending, at most for so long."""
        until_s = time.monotonic() + limit_s
        while self._channel.pending and (left_s := until_s - time.monotonic()) > 0:
            wait_events({self._pipe.stdin: WRITE}, left_s)  # nothing is read here
            self._channel.flush()

    def close(self) -> str:
        """End the command if it runs. Returns why the connection has ended, if it is known. Idempotent."""
        with self._lock:
            if not self._closed.is_set():
                self._closed.set()
                self._channel.close()
                self.end = self._pipe.end()
        return self.end

    def _refuse(self, failure: str) -> None:
        self.failure = failure
        self.is_refused = True

    def _lose(self) -> None:
        if not self.is_over:
            why = self.close()
            lost = "its node was lost" if self.has_started else "its node is not reached"
            self.failure = f"{lost}: {why}" if why else lost


def start_command(pipe: NodePipe, order: Order, *, window_bytes: int = WINDOW_BYTES) -> Session:
    """Start a command on a node. See `Session`. A thread says that this side is there.

    Raises:
        OSError: no thread is left.
    """
    limit_bytes = FRAME_LIMIT_BYTES if order.takes_over else OUTPUT_FRAME_LIMIT_BYTES
    data = {**asdict(order), "root": pipe.root}
    session = Session(pipe, "command", data, window_bytes=window_bytes, frame_limit_bytes=limit_bytes)
    # A program that takes over must find only whole frames before its own.
    alive = threading.Thread(target=session.say_alive, kwargs={"is_early": not order.takes_over}, daemon=True)
    try:
        alive.start()
    except RuntimeError as error:
        session.close()
        raise OSError(str(error)) from error
    return session


def run_captured(pipe: NodePipe, order: Order, limit_s: float) -> tuple[int, str, str]:
    """Run a command to its end, without input. Returns its exit code, standard output and standard error.

    Raises:
        LostNodeError: it does not run there.
        ControlError: it does not end within the limit, or prints without end.
    """
    deadline_s = time.monotonic() + limit_s
    outputs = {1: bytearray(), 2: bytearray()}
    session = start_command(pipe, order)
    try:
        session.send_input(b"")
        while not session.is_over:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise ControlError(f"the command did not end in {limit_s:g} s", CommandExit.LATE)
            if wait_events(session.wanted, min(left_s, ALIVE_S)):
                for stream, data in session.receive():
                    outputs[stream] += data
                    if len(outputs[stream]) > _CAPTURE_LIMIT_BYTES:
                        raise ControlError("the command prints without end", CommandExit.LOST)
            session.check()
    finally:
        session.close()
    if session.code is None:
        raise LostNodeError(session.failure, session.end, was_reached=session.was_reached)
    output, errors = (bytes(outputs[stream]).decode(errors="replace") for stream in (1, 2))
    return session.code, output, errors


def find_name(app_id: str) -> str:
    """Return what an app's agents know it by: its id without a namespace."""
    return app_id.rpartition(":")[2]
