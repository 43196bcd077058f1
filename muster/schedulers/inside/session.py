"""One command on one node, from this side. It sends the program, then frames. See `program` for what they mean."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from muster._shared.control import ControlError, ExitCode
from muster._shared.processes import wait_readable
from muster.schedulers.inside import program
from muster.schedulers.inside.frames import FrameReader, build_program, pack
from muster.schedulers.inside.pipe import NodePipe

WINDOW_BYTES: Final = 1 << 16
"""How much input may be under way. What comes after it, such as a signal, must not wait behind it."""
ALIVE_S: Final = 5.0
_START_LIMIT_S: Final = 60.0
_CHUNK_BYTES: Final = 1 << 16
_FRAME_LIMIT_BYTES: Final = 1 << 18
_NOISE_LIMIT_BYTES: Final = 1 << 16
_CAPTURE_LIMIT_BYTES: Final = 1 << 26
_BOOT: Final = 'import io,sys; stdin=io.open(0,"rb",closefd=False); exec(stdin.read(int(sys.argv[1])).decode("utf-8"))'
"""Short, because it is part of a URL on Kubernetes."""


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
    """The app is a hold, and the command gets what its holder was started with. See `program.complete_order`."""


def build_words() -> list[str]:
    """Return what follows the interpreter on the node."""
    return ["-c", _BOOT, str(len(_build_program()))]


def _build_program() -> bytes:
    return build_program(program.__file__, "main(stdin)").encode()


class Session:
    """A command that is being started, runs or has ended. Close it. It is thread-safe, except for `receive`.

    Args:
        pipe: of the node. `close` closes it.
        order: what is to run.
    """

    def __init__(self, pipe: NodePipe, order: Order) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._noise = b""
        self._frames = FrameReader(_FRAME_LIMIT_BYTES)
        self._in_frames = False
        self._under_way = 0
        self._end = ""
        self._is_closed = False
        self.heard_s = time.monotonic()
        self.has_started = False
        self.code: int | None = None
        """The exit code. None: it runs, or how it has ended is not known: then `failure` says why."""
        self.failure = ""
        """Why no command runs, or not any more. "": one runs, or has ended."""
        data = json.dumps({**asdict(order), "root": pipe.root}).encode()
        self._write(_build_program() + pack(program.ORDER, data))

    @property
    def fd(self) -> int:
        """Readable when there is something for `receive`."""
        return self._pipe.stdout

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.code is not None or bool(self.failure)

    @property
    def room_bytes(self) -> int:
        """How much input can be sent now."""
        return WINDOW_BYTES - self._under_way

    def send_input(self, data: bytes) -> None:
        """Send input of the command, at most `room_bytes`. b"": there is no more."""
        self._under_way += len(data)
        self._send(program.INPUT if data else program.CLOSED, data)

    def send_signal(self, name: str) -> None:
        """Send a signal, by its name without SIG, to the command. KILL goes to all that it has started."""
        self._send(program.SIGNAL, name.encode())

    def send_size(self, rows: int, columns: int) -> None:
        """Tell the size of the terminal."""
        self._send(program.SIZE, rows.to_bytes(2, "big") + columns.to_bytes(2, "big"))

    def send_alive(self) -> None:
        """Say that this side is there, at least every `ALIVE_S`."""
        self._send(program.ALIVE)

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Read what has come, and yield output: 1 or 2, and bytes."""
        try:
            data = os.read(self._pipe.stdout, _CHUNK_BYTES)
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        if not self._in_frames:
            self._noise, found, data = (self._noise + data).partition(program.MAGIC)
            if not found:
                if len(self._noise) > _NOISE_LIMIT_BYTES:
                    self._lose()
                return
            self._in_frames = True
        self.heard_s = time.monotonic()
        try:
            yield from self._handle(data)
        except (OSError, ValueError) as error:
            self.failure = str(error)

    def _handle(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        for kind, content in self._frames.feed(data):
            if kind in (program.OUT, program.ERR):
                yield int(kind), content
            elif kind == program.TAKEN:
                self._under_way -= int.from_bytes(content, "big")
            elif kind == program.STARTED:
                self.has_started = True
            elif kind == program.EXIT:
                self.code = int(content)
            elif kind == program.FAILED:
                self.failure = content.decode(errors="replace")

    def check(self) -> None:
        """Give up a node of which nothing was heard for too long."""
        limit_s = program.LOST_S if self.has_started else _START_LIMIT_S
        if not self.is_over and time.monotonic() - self.heard_s > limit_s:
            self.failure = f"no answer came for {limit_s:.0f} s"

    def close(self) -> str:
        """End the command if it runs. Returns why the connection has ended, if it is known. Idempotent."""
        with self._lock:
            if self._is_closed:
                return self._end
            self._is_closed = True
        self._end = self._pipe.end()
        return self._end

    def _lose(self) -> None:
        if not self.is_over:
            why = self.close()
            lost = "its node was lost" if self.has_started else "its node is not reached"
            self.failure = f"{lost}: {why}" if why else lost

    def _send(self, kind: bytes, content: bytes = b"") -> None:
        self._write(pack(kind, content))

    def _write(self, data: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):  # it has ended: `receive` sees why
            while data and not self._is_closed:
                data = data[os.write(self._pipe.stdin, data) :]


def run_captured(pipe: NodePipe, order: Order, limit_s: float) -> tuple[int, str, str]:
    """Run a command to its end, without input. Returns its exit code, standard output and standard error.

    Raises:
        ControlError: it does not run there, or does not end within the limit.
    """
    deadline_s = time.monotonic() + limit_s
    outputs = {1: bytearray(), 2: bytearray()}
    session = Session(pipe, order)
    try:
        session.send_input(b"")
        while not session.is_over:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise ControlError(f"the command did not end in {limit_s:g} s", ExitCode.LATE)
            if wait_readable(session.fd, min(left_s, ALIVE_S)):
                for stream, data in session.receive():
                    outputs[stream] += data
                    if len(outputs[stream]) > _CAPTURE_LIMIT_BYTES:
                        raise ControlError("the command prints without end", ExitCode.LOST)
            else:
                session.send_alive()
                session.check()
    finally:
        session.close()
    if session.code is None:
        raise ControlError(session.failure, ExitCode.LOST)
    output, errors = (bytes(outputs[stream]).decode(errors="replace") for stream in (1, 2))
    return session.code, output, errors


def find_name(app_id: str) -> str:
    """Return what an app's agents know it by: its id without a namespace."""
    return app_id.rpartition(":")[2]
