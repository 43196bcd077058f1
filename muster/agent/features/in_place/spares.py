"""Processes that have run the script up to its `main` and wait there to take a lost rank's place."""

import os
from typing import TYPE_CHECKING, Final

from muster._shared.contract import Env
from muster.agent.features.in_place.links import Link, connect
from muster.agent.workers.environment import build_common_env, substitute_macros
from muster.agent.workers.spec import WorkerSpec

if TYPE_CHECKING:
    from muster.agent.errors import SpawnError
    from muster.agent.node.round_parts import PartContext

_LOCAL_RANK: Final = -1
"""A spare has none yet."""
_MOST_ENDS: Final = 3
"""After so many spares that ended before they waited, no more are started."""


class Spares:
    """The spares of one node. Close them."""

    def __init__(self, context: "PartContext") -> None:
        """Start none yet: the workers come first."""
        self._context = context
        self._count: int = context.config.features["in_place"]
        self._starting: set[int] = set()
        """Processes that do their setup."""
        self._ready: list[Link] = []
        self._requested: list[int] | None = None
        """The streams of a spare that is being started."""
        self._stderr: dict[int, int] = {}
        """What spares that are no workers yet have written, by process."""
        self._ends = 0

    def fill(self) -> None:
        """Start a spare if one is missing, and connect to those that wait. Called four times a second."""
        for pid in list(self._starting):
            link = connect(pid)
            if link is not None:
                self._starting.discard(pid)
                self._ready.append(link)
        if (
            self._requested is not None
            or self._ends >= _MOST_ENDS
            or len(self._starting) + len(self._ready) >= self._count
        ):
            return
        config = self._context.config
        if substitute_macros(config.program, 0) != config.program:
            self._give_up("the script's arguments have ${local_rank}")
            return
        env = {**build_common_env(config), Env.SPARE: "1"}
        try:
            fds = [os.memfd_create(name) for name in ("stdout", "stderr")]
        except OSError:  # no descriptors left: the next look tries again
            return
        self._requested = fds
        spec = WorkerSpec(local_rank=_LOCAL_RANK, program=config.program, env=env, stdout_fd=fds[0], stderr_fd=fds[1])
        self._context.start_process(
            spec, lambda pid: self._on_started(pid, fds), lambda error: self._on_failed(error, fds)
        )

    def _on_started(self, pid: int, fds: list[int]) -> None:
        self._requested = None
        self._starting.add(pid)
        os.close(fds[0])
        self._stderr[pid] = fds[1]
        self._context.keep_process(pid, lambda: self._on_end(pid))

    def _on_failed(self, error: "SpawnError", fds: list[int]) -> None:
        self._requested = None
        self._ends += 1
        for fd in fds:
            os.close(fd)
        self._context.logs.print_line(f"no spare worker: {error}")

    def _on_end(self, pid: int) -> None:
        """Note the end of a process that has not become a worker."""
        stderr_fd = self._stderr.pop(pid)
        size = os.fstat(stderr_fd).st_size
        lines = os.pread(stderr_fd, 4096, max(0, size - 4096)).decode(errors="replace").strip().split("\n")
        os.close(stderr_fd)
        self._ready = [link for link in self._ready if link.pid != pid]
        if pid in self._starting:
            self._starting.discard(pid)
            self._ends += 1
            if self._ends == _MOST_ENDS:
                self._give_up(f"{_MOST_ENDS} have ended before they called main (worker.in_place): {lines[-1]}")

    def _give_up(self, why: str) -> None:
        self._ends = _MOST_ENDS
        self._context.logs.print_line(f"no spare workers: {why}")

    def take(self) -> Link | None:
        """Return a spare that waits; None if there is none."""
        if not self._ready:
            return None
        link = self._ready.pop(0)
        os.close(self._stderr.pop(link.pid))
        return link

    def close(self) -> None:
        """End the spares that wait."""
        for link in self._ready:
            link.socket.close()
        for fd in (*self._stderr.values(), *(self._requested or ())):
            os.close(fd)
