"""Runs a command of the user beside the job, with a time limit. Only the agent's end waits for it.

The command leads its own session, which no sweep of workers ends. It is started in a thread, because its disk may hang.
The loop reads what it writes and collects it.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from muster._shared.contract import describe_end
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.signals import ChildWatch

_OUTPUT_LIMIT_BYTES = 1 << 16
"""Limit on its printed output; the rest is read and dropped."""
_KILLED_S = 1.0
"""How long the agent waits for a command that it has killed, because the kernel may not end it."""


class LimitedCommand:
    """One run of the command, started at once."""

    def __init__(
        self,
        loop: Loop,
        children: ChildWatch,
        argv: Sequence[str],
        *,
        prepare: Callable[[], Mapping[str, str] | None],
        text: str,
        limit_s: float,
        label: str,
        on_line: Callable[[str], None],
        on_trouble: Callable[[str], None],
        on_over: Callable[[], None] = lambda: None,
    ) -> None:
        """Start it. All callbacks run on the loop.

        Args:
            loop: the agent's.
            children: collects it.
            argv: the command.
            prepare: called in the thread; returns its environment, or None if it must not run.
            text: its standard input.
            limit_s: the time after which it is killed.
            label: its name in lines about it.
            on_line: gets each line that it writes.
            on_trouble: gets a line if it cannot be started, has failed, or is killed.
            on_over: called once, when it has ended or the agent no longer waits for it.
        """
        self._loop = loop
        self._children = children
        self._words = argv
        self._prepare = prepare
        self._text = text
        self._limit_s = limit_s
        self._label = label
        self._on_line = on_line
        self._on_trouble = on_trouble
        self._on_over = on_over
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._printed_bytes = 0
        self.is_killed = False
        self.is_over = False
        """Whether it has ended, or the agent no longer waits for it."""
        children.hold_orphans(True, self)
        self._timer = loop.call_later(limit_s, self.kill)
        loop.call_in_thread(self._start, self._on_started, without=str)

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _start(self) -> "subprocess.Popen[bytes] | str | None":
        """Return the process, or why there is none, or None if it must not run."""
        env = self._prepare()
        if env is None:
            return None
        try:
            fd = os.memfd_create("muster-input")
            try:
                with open(fd, "wb", closefd=False) as file:
                    file.write(self._text.encode("utf-8", "backslashreplace"))
                os.lseek(fd, 0, os.SEEK_SET)
                return self._children.sessions.start(
                    lambda: subprocess.Popen(
                        self._words,
                        stdin=fd,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        env=dict(env),
                        start_new_session=True,
                    )
                )
            finally:
                os.close(fd)
        except OSError as error:
            return error.strerror or str(error)

    # -- on the loop --------------------------------------------------------------------------------------------------

    def _on_started(self, result: "subprocess.Popen[bytes] | str | None") -> None:
        if isinstance(result, subprocess.Popen):
            self._process = result
            fd = self._get_fd(result)
            os.set_blocking(fd, False)
            self._loop.watch_readable(fd, self._read)
            self._children.watch(result.pid, lambda code: self._on_end(result, code))
            if self.is_killed:
                self._kill_session(result)
        else:
            if result is not None:
                self._on_trouble(f"{self._label} cannot be started: {result}")
            self._finish()
        self._children.hold_orphans(False, self)

    def _get_fd(self, process: "subprocess.Popen[bytes]") -> int:
        assert process.stdout is not None  # noqa: S101  # it has a pipe
        return process.stdout.fileno()

    def _read(self) -> None:
        process = self._process
        if process is None:
            return
        fd = self._get_fd(process)
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        if not data:
            self._loop.unwatch(fd)
        self._print_output(data)

    def _print_output(self, data: bytes) -> None:
        room = _OUTPUT_LIMIT_BYTES - self._printed_bytes
        self._printed_bytes += len(data)
        *lines, self._rest = (self._rest + data[: max(0, room)]).split(b"\n")
        for line in lines:
            self._on_line(line.decode("utf-8", "backslashreplace"))

    def _on_end(self, process: "subprocess.Popen[bytes]", code: int) -> None:
        process.returncode = code  # already collected
        self._children.sessions.remove(process.pid)
        self._read()
        fd = self._get_fd(process)
        self._loop.unwatch(fd)
        if process.stdout is not None:
            process.stdout.close()
        self._process = None
        if self._rest:
            self._print_output(b"\n")
        if code != 0 and not self.is_killed:
            self._on_trouble(f"{self._label} {describe_end(code)}")
        self._finish()

    def _finish(self) -> None:
        self._timer.cancel()
        if not self.is_over:
            self.is_over = True
            self._on_over()

    def shorten(self, limit_s: float) -> None:
        """End it after this time from now, unless its own limit is over sooner."""
        self._loop.call_later(limit_s, self.kill)
        self._limit_s = min(self._limit_s, limit_s)

    def kill(self) -> None:
        """Kill it, and print a line. Idempotent; it does nothing after the end."""
        if self.is_over or self.is_killed:
            return
        self.is_killed = True
        what = "has not ended" if self._process is not None else "could not be started"
        self._on_trouble(f"{self._label} {what} within {self._limit_s:g} s: killed")
        if self._process is not None:
            self._kill_session(self._process)
        self._loop.call_later(_KILLED_S, self._finish)

    def _kill_session(self, process: "subprocess.Popen[bytes]") -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
