"""The supervisor's `ReplicaDriver` of replicas on other machines: each has a link, which stands for it here."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from muster._shared.foreign_files import read_whole
from muster.schedulers.node_program.frames import LOST, STATE_NAME
from muster.schedulers.processes.driver import Launch, ProcessDriver
from muster.schedulers.supervision.driver import Handle
from muster.schedulers.supervision.state import ReplicaId
from muster.schedulers.wording.reasons import Reasons, parse_reasons

_KILL_LIMIT_S: Final = 15.0
"""The link is killed then."""
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
            order: what it gets, beside the folders here.
            flags: of Python.
            lent: descriptors that it gets, and that are closed here.
        """
        folders = {
            "replica_dir": str(self.folder.replica_dir(replica)),
            "role_dir": str(self.folder.role_dir(replica.role)),
        }
        fd = os.memfd_create("order")
        os.write(fd, json.dumps({**order, **folders}).encode())
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

    def kill(self, replica: ReplicaId) -> None:
        """See `ReplicaDriver`. The link tells the node, and does not wait for it for long."""
        self.send_signal(replica, signal.SIGQUIT)
        self._event_queue.set_timer(f"kill {replica}", _KILL_LIMIT_S, lambda: self.send_signal(replica, signal.SIGKILL))

    def find_log_dir(self, replica: ReplicaId) -> Path | None:
        """See `ProcessDriver`: where the link puts it."""
        return self.folder.role_dir(replica.role)

    def explain_end(self, replica: ReplicaId, code: int) -> tuple[int | None, Reasons]:
        """See `ProcessDriver`. A link says why its replica is lost, else the exit code is the replica's own."""
        self._event_queue.clear_timer(f"kill {replica}")
        if code == LOST:
            with contextlib.suppress(OSError, LookupError, TypeError, ValueError):
                return None, parse_reasons(
                    json.loads(read_whole(self.folder.replica_dir(replica) / STATE_NAME))["lost"]
                )
        return super().explain_end(replica, code)
