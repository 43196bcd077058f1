"""The supervisor's `ReplicaDriver` of replicas on other machines: each has a link, which stands for it here."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from muster._shared.foreign_files import read_whole
from muster.schedulers.node_program.frames import LOST, STATE_NAME
from muster.schedulers.processes.driver import ProcessDriver
from muster.schedulers.processes.launch import Launch
from muster.schedulers.supervision.driver import Handle
from muster.schedulers.supervision.state import ReplicaId

_PROGRAM: Final = (
    "import sys; sys.path[:] = [*(path for path in sys.path if path), sys.argv[1]]\n"
    "from {} import main\n"
    "sys.exit(main(int(sys.argv[2])))"
)


class LinkDriver(ProcessDriver):
    """Starts links."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._orders: dict[ReplicaId, list[int]] = {}
        """Descriptors for a link that is about to start: its order, and what is lent to it."""

    def build_link(
        self,
        replica: ReplicaId,
        module: str,
        order: Mapping[str, Any],
        *,
        flags: Sequence[str] = (),
        lent: Sequence[int] = (),
    ) -> Launch:
        """Build a link's command. Its order is in a file without a name, because it holds secrets.

        Args:
            replica: it stands for this one.
            module: has its `main`.
            order: what it gets.
            flags: of Python.
            lent: descriptors that it gets, and that are closed here.
        """
        fd = os.memfd_create("order")
        os.write(fd, json.dumps(order).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        self._close_order(replica)
        self._orders[replica] = [fd, *lent]
        return Launch(
            command=[sys.executable, *flags, "-c", _PROGRAM.format(module), self.spec.import_root, str(fd)],
            env=self.spec.details["environment"],
            cwd=self.spec.folder,
            keep_fds=self._orders[replica],
        )

    def launch(self, replica: ReplicaId, build: Callable[[], Launch]) -> Handle:
        """See `ProcessDriver`."""
        try:
            return super().launch(replica, build)
        finally:
            self._close_order(replica)

    def _close_order(self, replica: ReplicaId) -> None:
        for fd in self._orders.pop(replica, ()):
            os.close(fd)

    def end_link(self, replica: ReplicaId, limit_s: float) -> None:
        """Kill a replica. Its link tells the node, and does not wait for it for long.

        Args:
            replica: the one to kill.
            limit_s: the link is killed then.
        """
        self.send_signal(replica, signal.SIGQUIT)
        self._event_queue.set_timer(f"kill {replica}", limit_s, lambda: self.send_signal(replica, signal.SIGKILL))

    def read_loss(self, replica: ReplicaId, code: int) -> str:
        """Return why a link says that its replica is lost. "": the exit code is the replica's own."""
        self._event_queue.clear_timer(f"kill {replica}")
        if code == LOST:
            with contextlib.suppress(OSError, ValueError):
                return str(json.loads(read_whole(self.folder.replica_dir(replica) / STATE_NAME))["reason"])
        return ""
