"""An `ssh` that runs: its pipes, and how it is ended. It can be lent to another process. Standard library only."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from muster._shared.processes import READ, WRITE, wait_events, wait_readable

_CHUNK_BYTES: Final = 1 << 16
_ANSWER_LIMIT_BYTES: Final = 1 << 26


class Ssh:
    """One `ssh`. The user of its pipes closes them.

    Args:
        fds: its standard input, output and error here, and its pidfd.
        process: None: it is no child of this process.
    """

    def __init__(self, fds: Sequence[int], process: "subprocess.Popen[bytes] | None" = None) -> None:
        self.fds = tuple(fds)
        self.stdin, self.stdout, self.stderr, self._pidfd = fds
        self._process = process

    @staticmethod
    def start(
        command: Sequence[str], prepare: Callable[[], None] | None = None, env: Mapping[str, str] | None = None
    ) -> "Ssh":
        """Start one in a session of its own, or in what `prepare` makes between fork and exec.

        Ctrl-C is then not for it, but for the command that ends it.

        Raises:
            OSError: no process or descriptor is left, and nothing was started.
        """
        with contextlib.ExitStack() as inside, contextlib.ExitStack() as outside:
            pipes = []
            for ends in ((inside, outside), (outside, inside), (outside, inside)):
                pipes.append(os.pipe())
                for fd, end in zip(pipes[-1], ends, strict=True):
                    end.callback(os.close, fd)
            process = subprocess.Popen(
                command,
                stdin=pipes[0][0],
                stdout=pipes[1][1],
                stderr=pipes[2][1],
                env=env,
                preexec_fn=prepare,  # noqa: PLW1509  # it only makes system calls
                start_new_session=prepare is None,
            )
            outside.callback(process.kill)
            pidfd = os.pidfd_open(process.pid)
            outside.pop_all()
        return Ssh((pipes[0][1], pipes[1][0], pipes[2][0], pidfd), process)

    def ask(self, data: bytes, limit_s: float) -> tuple[int, bytes, bytes]:
        """Write, and return its exit code, all that it prints, and its errors. Use it once.

        Raises:
            subprocess.TimeoutExpired: it did not end in time, or prints without end.
        """
        received = {self.stdout: bytearray(), self.stderr: bytearray()}
        wanted = {self.stdin: WRITE, **dict.fromkeys(received, READ)}
        until_s = time.monotonic() + limit_s
        os.set_blocking(self.stdin, False)
        while wanted.keys() & received and (ready := wait_events(wanted, until_s - time.monotonic())):
            for fd in ready:
                if fd == self.stdin:
                    data = _write(fd, data)
                    has_more = bool(data)
                else:
                    piece = os.read(fd, _CHUNK_BYTES)
                    received[fd] += piece
                    has_more = bool(piece) and len(received[fd]) < _ANSWER_LIMIT_BYTES
                if not has_more:
                    del wanted[fd]
        for fd in (self.stdin, *received):
            os.close(fd)
        code = self.end(0.5)
        if code is None:
            raise subprocess.TimeoutExpired("ssh", limit_s)
        return code, bytes(received[self.stdout]), bytes(received[self.stderr])

    def end(self, limit_s: float) -> int | None:
        """Wait for its end, and kill it after `limit_s`. Return its exit code. None: it was killed, or is no child."""
        has_ended = wait_readable(self._pidfd, limit_s)
        if not has_ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        code = None if self._process is None else self._process.wait()
        os.close(self._pidfd)
        return code if has_ended else None

    def forget(self) -> None:
        """Forget the connection: another process has it now."""
        for fd in self.fds:
            os.close(fd)
        if self._process is not None:  # whose child it stays
            threading.Thread(target=self._process.wait, daemon=True).start()


def _write(fd: int, data: bytes) -> bytes:
    """Return what could not be written now. b"": all was, or its reader has gone."""
    try:
        return data[os.write(fd, data) :]
    except OSError:
        return b""
