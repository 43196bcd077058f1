"""The MASTER_PORT that this node offers for the next round, and the one it keeps while it hosts rank 0."""

from collections.abc import Callable

from muster.agent.rendezvous.transport.links import Reservation


class MasterPorts:
    """A fresh port for every round, so that no round reuses the store of an older one. Close it."""

    def __init__(self, reserve: Callable[[], Reservation]) -> None:
        self._reserve = reserve
        self._offer: Reservation | None = None
        self._held: Reservation | None = None

    @property
    def offered(self) -> int:
        """The port on offer; 0 if there is none."""
        return self._offer.port if self._offer is not None else 0

    def offer(self) -> None:
        """Reserve a port for the next round, unless one is reserved already."""
        if self._offer is None:
            self._offer = self._reserve()

    def begin_round(self, *, hosts_rank_0: bool) -> None:
        """Keep the offered port for the round if this node hosts rank 0; otherwise release it."""
        if self._held is not None:
            self._held.close()
            self._held = None
        if hosts_rank_0:
            self._held = self._offer
        elif self._offer is not None:
            self._offer.close()
        self._offer = None

    def close(self) -> None:
        """Release both ports. Idempotent."""
        for reservation in (self._offer, self._held):
            if reservation is not None:
                reservation.close()
