"""Workers forked from the image of the program that started the job; `muster.elastic.fork.image` is the other side.

The image is a template (`warm.template` describes the protocol) that nothing can replace. What it holds cannot be
imported, so no worker can start cold. When the image has ended, no worker can start at all. Global rank 0's worker
hosts the store, because in the image it would need one more copy of the program's page tables.
"""

import os
import socket
from collections.abc import Callable, Sequence

from muster.agent.errors import SpawnError
from muster.agent.runtime.loop import Loop
from muster.agent.workers.spec import WorkerSpec
from muster.agent.workers.warm.starter import TemplateStarter
from muster.agent.workers.warm.template_handle import TemplateHandle


class ImageHandle(TemplateHandle):
    """The image, which was forked before this process's exec."""

    is_image = True

    def __init__(self, loop: Loop, pid: int, control_fd: int) -> None:
        """Take over the image.

        Args:
            loop: calls back with messages.
            pid: a child of this process.
            control_fd: the socket to the image.
        """
        self._loop = loop
        self._on_message = None
        self.pending_sockets = []
        self.started_s = loop.clock.now_s()
        self._control = socket.socket(fileno=control_fd)
        self._control.setblocking(False)
        self._stderr_fd = os.memfd_create("stderr")  # stays empty
        self.pid = pid


class ImageStarter(TemplateStarter):
    """Starts workers by forking the image (see `spec.WorkerStarter`)."""

    max_template_ends = 1
    imports = False

    def can_host_store(self) -> bool:
        """Return False: see the module."""
        return False

    def _find_obstacle(self, specs: Sequence[WorkerSpec]) -> str | None:
        """Find an obstacle.

        Variables that are read early are no obstacle: the program has already read them, as with any fork.
        """
        prefixes = (spec.command_prefix[0] for spec in specs if spec.command_prefix)
        wrapper = next(prefixes, None)
        return self.cold_reason if wrapper is None else f"forked workers cannot be started through {wrapper}"

    def _start_cold(
        self,
        specs: Sequence[WorkerSpec],
        on_started: Callable[[int, int], None],  # noqa: ARG002  # none is started
        on_failed: Callable[[int, SpawnError], None],
        reason: str,
    ) -> None:
        """Report why the start fails: nothing can start cold here."""
        for spec in specs[:1]:
            on_failed(
                spec.local_rank, SpawnError(f"cannot fork a worker from the program that started the job: {reason}")
            )
