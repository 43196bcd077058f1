"""The part: asks workers to leave a round, and starts them in the next one."""

import contextlib
import json
import socket
from typing import TYPE_CHECKING

from muster.agent.features.in_place.links import Link, connect
from muster.agent.node.events import WorkerLeft, WorkersCanLeave
from muster.agent.node.round_parts import PartContext, RoundPart, Start

if TYPE_CHECKING:
    from muster.agent.features.in_place.spares import Spares
    from muster.agent.round import Round
    from muster.agent.workers.pool import WorkerEnd
    from muster.agent.workers.spec import WorkerSpec


class InPlacePart(RoundPart):
    """The workers of this node that stay over rounds, and its spares."""

    def __init__(self, context: PartContext) -> None:
        self._context = context
        self._links: dict[int, Link] = {}
        """Of workers of the round, by local rank."""
        self._left: dict[int, Link] = {}
        """Of workers that wait for the next round."""
        self._posted: frozenset[int] = frozenset()
        """Those that were last posted as able to leave."""
        self._begins: set[int] = set()
        """Those that begin another round: their slots of its page say nothing yet."""
        self._spares = _create_spares(context)

    def begin_round(self, formed: "Round", start: Start | None) -> None:
        """See `RoundPart`."""
        if start is not None:
            self._posted = frozenset()
            self._begins.clear()
            # The state that they have is no round's. Without its connection each exits.
            for local_rank, link in [] if formed.continued_step is not None else list(self._left.items()):
                self._forget(local_rank, link)

    def look(self) -> None:
        """See `RoundPart`."""
        formed = self._context.workers.formed
        if formed is None:
            return
        for worker in self._context.workers.live:
            if worker.local_rank not in self._links and worker.pid == self._read_stays(worker.local_rank):
                link = connect(worker.pid)
                if link is not None:
                    self._add_link(worker.local_rank, link)
        can_leave = frozenset(rank for rank, link in self._links.items() if self._read_stays(rank) == link.pid)
        self._begins -= can_leave
        self._post(formed, can_leave | self._begins)
        if self._spares is not None:
            self._spares.fill()

    def _post(self, formed: "Round", can_leave: frozenset[int]) -> None:
        if can_leave != self._posted:
            self._posted = can_leave
            self._context.post(WorkersCanLeave(round_number=formed.number, local_ranks=can_leave))

    def _read_stays(self, local_rank: int) -> int | None:
        page = self._context.get_page()
        return None if page is None else page.read_stays(local_rank)

    def _add_link(self, local_rank: int, link: Link) -> None:
        self._links[local_rank] = link
        self._context.loop.watch_readable(link.socket.fileno(), lambda: self._receive(local_rank, link))

    def _receive(self, local_rank: int, link: Link) -> None:
        try:
            message = link.socket.recv(64)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        formed = self._context.workers.formed
        if message == b"left" and self._links.get(local_rank) is link and formed is not None:
            del self._links[local_rank]
            self._left[local_rank] = link
            self._context.keep_process(link.pid, lambda: self._forget(local_rank, link))
            self._context.post(WorkerLeft(round_number=formed.number, local_rank=local_rank))
        elif not message:
            self._close(link)
            self._forget(local_rank, link)

    def _forget(self, local_rank: int, link: Link) -> None:
        self._begins.discard(local_rank)
        for links in (self._links, self._left):
            if links.get(local_rank) is link:
                del links[local_rank]
                self._close(link)

    def _close(self, link: Link) -> None:
        if link.socket.fileno() >= 0:
            self._context.loop.unwatch(link.socket.fileno())
            link.socket.close()

    def leave_round(self, local_ranks: frozenset[int]) -> None:
        """See `RoundPart`."""
        for local_rank in local_ranks & self._links.keys():
            with contextlib.suppress(OSError):  # it is ending
                self._links[local_rank].socket.send(b'{"leave": true}')

    def start_kept(self, formed: "Round", spec: "WorkerSpec") -> int | None:
        """See `RoundPart`."""
        if formed.continued_step is None:
            return None
        link = self._left.pop(spec.local_rank, None)
        if link is None and self._spares is not None:
            link = self._spares.take()
        if link is None:
            return None
        own = {name: value for name, value in spec.env.items() if self._context.config.base_env.get(name) != value}
        files = {"error_file": spec.error_file, "stack_file": spec.stack_file, "crash_file": spec.crash_file}
        try:
            text = json.dumps({"start": {"env": own, **files}})
            socket.send_fds(link.socket, [text.encode()], [spec.stdout_fd, spec.stderr_fd])
        except OSError:
            self._close(link)
            return None
        self._context.loop.unwatch(link.socket.fileno())
        self._add_link(spec.local_rank, link)
        self._begins.add(spec.local_rank)
        self._post(formed, self._posted | {spec.local_rank})
        self._context.event_log.write("worker_released", how="kept", local_rank=spec.local_rank, pid=link.pid)
        return link.pid

    def end_worker(self, end: "WorkerEnd") -> None:
        """See `RoundPart`."""
        link = self._links.get(end.worker.local_rank)
        if link is not None and link.pid == end.worker.pid:
            self._forget(end.worker.local_rank, link)

    def close(self) -> None:
        """See `RoundPart`."""
        for links in (self._links, self._left):
            for link in links.values():
                self._close(link)
        if self._spares is not None:
            self._spares.close()


def _create_spares(context: PartContext) -> "Spares | None":
    if not context.config.features.get("in_place"):
        return None
    from muster.agent.features.in_place.spares import Spares

    return Spares(context)


def create_part(context: PartContext) -> InPlacePart:
    """Create the part of one agent."""
    return InPlacePart(context)
