"""What programs on nodes have in common: the order, the loop that serves one connection, and the end of all below.

It is sent to nodes. Standard library only. The other side is gone at the end of the connection, or when no answer came
for `LOST_S`.
"""

import contextlib
import io
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from muster._shared.processes import READ, kill_descendants, open_wake_pipe, read_wake_pipe, wait_events
from muster.schedulers.node_program.frames import FRAME, FRAME_LIMIT_BYTES, LOST_S, MAGIC, Channel, Kind

_PENDING_LIMIT_BYTES = 1 << 18
"""How much output may wait. A command that writes more waits, too."""
_LOOK_S = 0.5
_GRACE_S = 3.0
"""Between the polite signal and SIGKILL, when the other side is gone."""
_KILL_LIMIT_S = 10.0


def read_order(stdin: io.BufferedReader) -> dict[str, Any]:
    """Say that the program has begun, and return its order. If the other side is gone, this process ends.

    Args:
        stdin: the connection, after the program.
    """
    os.write(1, MAGIC)
    try:
        order: dict[str, Any] = json.loads(read_frame(stdin)[1])
    except EOFError:
        os._exit(1)
    return order


def read_frame(stdin: io.BufferedReader) -> tuple[bytes, bytes]:
    """Return the next frame, however long it takes.

    Raises:
        EOFError: the other side is gone.
    """
    head = stdin.read(FRAME.size)
    if len(head) == FRAME.size:
        kind, length = FRAME.unpack(head)
        content = stdin.read(length + 1) if length <= FRAME_LIMIT_BYTES else b""
        if len(content) > length:
            return kind, content[:-1]
    raise EOFError


class Served:
    """Serves one connection until nothing is left to say. For a subclass; it is for one use.

    Args:
        channel: the connection.
        signums: signals that only wake it.
    """

    def __init__(self, channel: Channel, signums: Iterable[int]) -> None:
        self.channel = channel
        self.last: bytes | None = None
        """The last frame, once it is known."""
        self._told_last = False
        self._is_suspended = False
        self._is_lost = False
        self._kill_s = self._end_s = math.inf
        """Once the other side is gone: when what runs is killed, and when it is not waited for any more."""
        self._wake = open_wake_pipe(signums)

    def run(self, rest: bytes = b"") -> None:
        """Run until all output is sent, and the last frame, or the other side is gone and what ran has ended.

        Args:
            rest: what has come already.
        """
        self._handle_all(self.channel.feed(rest))
        while not self._is_over():
            wanted = {} if self._is_lost else dict(self.channel.wanted)
            wanted |= {self._wake: READ, **self.list_sources()}
            ready = wait_events(wanted, _LOOK_S)
            if self._wake in ready:
                self.pass_on(read_wake_pipe(self._wake))
            if not self._is_lost and ready.keys() & self.channel.wanted.keys():
                self._receive()
            self.act(ready)
            self._look_at_clock()

    # -- for subclasses

    def list_sources(self) -> dict[int, int]:
        """Return what to wait for, besides the connection."""
        raise NotImplementedError

    def act(self, ready: Mapping[int, int]) -> None:
        """Read and write what is ready, and look at what may have changed."""
        raise NotImplementedError

    def has_output(self) -> bool:
        """Return whether output may come before the last frame."""
        raise NotImplementedError

    def handle(self, kind: bytes, content: bytes) -> None:
        """Handle a frame that not all programs know."""
        raise NotImplementedError

    def pass_on(self, signums: bytes) -> None:
        """Handle signals to this process."""

    def send_signal(self, name: str) -> None:
        """Send a signal, by its name without SIG, to what runs."""
        raise NotImplementedError

    def choose_last_signal(self) -> str:
        """Return the polite signal when the other side is gone."""
        return "TERM"

    def kill(self) -> None:
        """Kill what runs."""
        raise NotImplementedError

    def has_room(self) -> bool:
        """Return whether output can be sent."""
        return len(self.channel.pending) < _PENDING_LIMIT_BYTES

    # -- the connection

    def _is_over(self) -> bool:
        if time.monotonic() > self._end_s:
            return True
        if self.last is None or self.has_output():
            return False
        if not self._told_last:
            self._told_last = True
            self.channel.write(self.last)
        return not self.channel.pending

    def _receive(self) -> None:
        self.channel.flush()
        frames = self.channel.receive()
        if frames is None or self.channel.is_broken:
            self._lose()
        else:
            self._handle_all(frames)

    def _handle_all(self, frames: Iterable[tuple[bytes, bytes]]) -> None:
        for kind, content in frames:
            self._is_suspended = False
            if kind == Kind.ALIVE:
                self.channel.send(Kind.ALIVE)
            elif kind != Kind.SIGNAL:
                self.handle(kind, content)
            elif content == b"KILL":
                self.kill()
            else:
                self._is_suspended = content == b"STOP"
                self.send_signal(content.decode())

    def _lose(self) -> None:
        """End what runs: the other side is gone."""
        if self._is_lost:
            return
        self._is_lost = True
        self.channel.close()
        self.send_signal(self.choose_last_signal())
        self.send_signal("CONT")
        self._kill_s = time.monotonic() + _GRACE_S
        self._end_s = self._kill_s + _KILL_LIMIT_S

    def _look_at_clock(self) -> None:
        now_s = time.monotonic()
        if self.channel.is_broken or (not self._is_suspended and now_s - self.channel.heard_s > LOST_S):
            self._lose()
        if now_s > self._kill_s:
            self._kill_s = math.inf
            self.kill()


def collect_children() -> dict[int, int]:
    """Collect the children of this process that have ended. Returns exit codes, 128 + n for signal n, by process id."""
    codes: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            codes[ended[0]] = code if code >= 0 else 128 - code
    return codes


def end_descendants() -> dict[int, int]:
    """Kill and collect all below this process, a subreaper. Returns what `collect_children` does."""
    codes: dict[int, int] = {}
    until_s = time.monotonic() + _KILL_LIMIT_S
    while time.monotonic() < until_s:
        below = kill_descendants(os.getpid())
        codes |= collect_children()
        if not below:
            break
        time.sleep(0.005)
    return codes
