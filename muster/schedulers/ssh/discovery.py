"""Runs a discovery script again and again, in a thread of the supervisor. Standard library only."""

import os
import threading
import time
from typing import Final

from muster._shared.contract import print_line
from muster.schedulers.ssh.hosts import HostError, run_discovery

_PAUSE_S: Final = 1.0
"""As Horovod."""


class Discovery:
    """Tells the supervisor's loop when the hosts have changed.

    Args:
        script: absolute path of the program.
        processes: of each node. Hosts with fewer slots do not count.
    """

    def __init__(self, script: str, processes: int) -> None:
        self._script, self._processes = script, processes
        self.wake_fd, self._wake_write = os.pipe()
        """It can be read when there is something to take."""
        self._found: list[str] = []
        threading.Thread(target=self._run, daemon=True).start()

    def take(self) -> list[str]:
        """Return the names of all hosts that there are, in the script's order."""
        os.read(self.wake_fd, 4096)
        return self._found

    def _run(self) -> None:
        told: list[str] | None = None
        trouble = ""
        while True:
            time.sleep(_PAUSE_S)
            try:
                hosts = run_discovery(self._script)
            except HostError as error:  # a failed script tells nothing
                if str(error) != trouble:
                    trouble = str(error)
                    print_line(f"muster: {trouble}")
                continue
            trouble = ""
            fits = [host.name for host in hosts if host.slots is None or host.slots >= self._processes]
            found = list(dict.fromkeys(fits))
            if found != told:
                told = self._found = found
                os.write(self._wake_write, b"x")
