"""An `ssh` that runs: its pipes, and how it is ended. It can be lent to another process. Standard library only."""

import contextlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence


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
    def start(command: Sequence[str], prepare: Callable[[], None] | None = None) -> "Ssh":
        """Start one in a session of its own, or in what `prepare` makes between fork and exec.

        Ctrl-C is then not for it, but for the command that ends it.
        """
        inside, outside = zip(os.pipe(), *(pair[::-1] for pair in (os.pipe(), os.pipe())), strict=True)
        try:
            process = subprocess.Popen(
                command,
                stdin=inside[0],
                stdout=inside[1],
                stderr=inside[2],
                preexec_fn=prepare,  # noqa: PLW1509  # it only makes system calls
                start_new_session=prepare is None,
            )
        finally:
            for fd in inside:
                os.close(fd)
        return Ssh((*outside, os.pidfd_open(process.pid)), process)

    def end(self, limit_s: float) -> int | None:
        """Wait for its end, and kill it after `limit_s`. Return its exit code. None: it was killed, or is no child."""
        has_ended = self._wait(limit_s)
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

    def _wait(self, limit_s: float) -> bool:
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(1000 * limit_s))
