"""Serves torch's file timers (`torch.distributed.elastic.timer.FileTimerClient`) to the workers of one job.

As with torch's agent, TORCHELASTIC_ENABLE_FILE_TIMER=1 switches them on, and workers find the FIFO by
TORCHELASTIC_TIMER_FILE. A worker writes one JSON line to begin a timer, or, with a negative time, to end it. When a
timer expires, its process gets the signal that it asked for. The job goes on as after any failed worker. Torch's agent
sends the signal to itself, too.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

_SWITCH = "TORCHELASTIC_ENABLE_FILE_TIMER"
PATH_VARIABLE = "TORCHELASTIC_TIMER_FILE"
_CHUNK_BYTES = 65536


def are_switched_on(environ: Mapping[str, str]) -> bool:
    """Return whether the program wants file timers."""
    return environ.get(_SWITCH) == "1"


@dataclass(frozen=True, kw_only=True)
class _Timer:
    pidfd: int
    due_s: float
    """A time of the wall clock, which the worker has read on this machine."""
    signum: int


class FileTimers:
    """The FIFO and the timers. Register `fd`. Call `receive` when it is readable, and `expire` when time has passed."""

    def __init__(self, path: str) -> None:
        """Make the FIFO. A file in its place is removed, as torch does.

        Raises:
            OSError: it cannot be made.
        """
        self.path = path
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.mkfifo(path, 0o600)
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # writing too prevents end of file
        self._rest = b""
        self._timers: dict[tuple[int, str], _Timer] = {}

    def receive(self) -> bool:
        """Read what workers have written, one chunk at a time; return False if there is nothing more."""
        try:
            data = os.read(self.fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # any process may write there
                message = json.loads(line)
                self._set(
                    int(message["pid"]),
                    str(message["scope_id"]),
                    float(message["expiration_time"]),
                    int(message["signal"]),
                )
        return True

    def _set(self, pid: int, scope: str, due_s: float, signum: int) -> None:
        self._drop((pid, scope))
        if due_s >= 0:
            with contextlib.suppress(OSError):  # it has ended
                self._timers[pid, scope] = _Timer(pidfd=os.pidfd_open(pid), due_s=due_s, signum=signum)

    def _drop(self, key: tuple[int, str]) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            os.close(timer.pidfd)

    def find_wait_s(self) -> float | None:
        """Return the seconds until the next timer is due. None: there is none."""
        due_s = min((timer.due_s for timer in self._timers.values()), default=None)
        return None if due_s is None else max(0.0, due_s - time.time())

    def expire(self) -> None:
        """Send the signals of the timers that are due.

        What was written by now counts, because a timer may have been released in time while this process got no CPU.
        """
        if self.find_wait_s() != 0.0:
            return
        while self.receive():
            pass
        for (pid, scope), timer in list(self._timers.items()):
            if timer.due_s > time.time():
                continue
            if timer.signum > 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(timer.pidfd, timer.signum)
                    name = signal.Signals(timer.signum).name
                    print(f"[muster] the timer {scope!r} of process {pid} has expired: {name}", file=sys.stderr)
            self._drop((pid, scope))

    def close(self) -> None:
        """Remove the FIFO. Idempotent."""
        for key in list(self._timers):
            self._drop(key)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
