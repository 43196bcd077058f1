"""Detects that a member of the leader is lost.

- Its connection closed: `LossDetector.record_closed`. This does not prove that its process has ended. Only a refused
  connection to the member's own port does: `probe`.
- It sent nothing for the silence limit: `LossDetector._sweep`. If the leader's own process may have been stopped
  (SIGSTOP, a suspended machine), silence is checked before anything else is decided: `check_pause`.

`consensus.membership.on_member_lost` decides what follows. `consensus.membership.drop_stopping` also makes a member
lost that takes too long to stop its workers. `member.seeking` is where a member detects the loss of its leader.
"""

from collections.abc import Callable
from typing import Protocol

from muster.agent.rendezvous.consensus.members import find_margin_s
from muster.agent.rendezvous.leader.connections import MemberConnection, MemberConnections
from muster.agent.rendezvous.transport.links import Closing, Network
from muster.agent.runtime.limits import PAUSE_S
from muster.agent.runtime.loop import Loop, Timer

LEAST_DELAY_S = 0.02
"""The least time between two sweeps."""


class LossOwner(Protocol):
    """What loss detection reports to the leader."""

    def record_loss(self, connection: MemberConnection, reason: str) -> None:
        """Record the loss of a member, which may have been removed already."""
        ...

    def record_silence(self, connection: MemberConnection, reason: str) -> None:
        """Record the loss of a member whose connection is open, so that it may still be alive."""
        ...

    def record_process_end(self, member_id: str) -> None:
        """Record that the process of a lost member has ended."""
        ...


class LossDetector:
    """Watches the members of one leader. Close it with the leader."""

    def __init__(
        self,
        loop: Loop,
        network: Network,
        connections: MemberConnections,
        silence_s: float,
        owner: LossOwner,
    ) -> None:
        self._loop = loop
        self._clock = loop.clock
        self._network = network
        self._connections = connections
        self._silence_s = silence_s
        self._owner = owner
        self._probes: set[Closing] = set()
        self._timer: Timer | None = None
        self._last_active_s = loop.clock.boottime_s()
        self._closed = False

    # -- closed connections -----------------------------------------------------------------------------------------

    def record_closed(self, connection: MemberConnection, reason: str) -> None:
        """Record the loss of a member whose connection closed, and find out whether its process has ended."""
        self.probe(connection, lambda: self._owner.record_process_end(connection.id))
        self._owner.record_loss(connection, reason)

    def probe(self, connection: MemberConnection, on_ended: Callable[[], None]) -> None:
        """Connect to a member's own port: a refused connection proves that its process has ended."""
        if not connection.listen_port:
            return
        probes: list[Closing] = []

        def on_result(refused: bool) -> None:
            self._probes.difference_update(probes)
            if refused and not self._closed:
                on_ended()

        probes.append(self._network.probe(connection.link.peer_host, connection.listen_port, on_result))
        self._probes.update(probes)

    # -- silence ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Watch for silence from now on, unless this is done already, because a member on another node has joined."""
        if self._timer is None or self._timer.cancelled:
            self._timer = self._loop.call_later(self._silence_s, self._sweep)

    def check_pause(self) -> None:
        """Remove silent members after a pause of this process or machine, before anything is decided."""
        now_s = self._clock.boottime_s()
        paused_s, self._last_active_s = now_s - self._last_active_s, now_s
        if paused_s >= PAUSE_S:
            self._sweep()

    def _sweep(self) -> None:
        """Report members that were silent for too long. Run again when the next one could be."""
        now_s = self._clock.boottime_s()
        limit_s = self._silence_s
        for connection in [each for each in self._connections.list_remote() if now_s - each.received_s >= limit_s]:
            self._owner.record_silence(connection, f"silent for {limit_s:g} s")
        oldest_s = min((each.received_s for each in self._connections.list_remote()), default=None)
        if self._timer is not None:
            self._timer.cancel()
        if oldest_s is not None and not self._closed:
            self._timer = self._loop.call_later(max(LEAST_DELAY_S, oldest_s + limit_s - now_s), self._sweep)

    def compute_suspicion_s(self, is_assigned: Callable[[str], bool]) -> float:
        """Return how long until every possibly fenced member of the round has been removed; 0 if there is none."""
        now_s, silence_s = self._clock.boottime_s(), self._silence_s
        limit_s = (silence_s - find_margin_s(silence_s)) / 2
        received_s = [each.received_s for each in self._connections.list_remote() if is_assigned(each.id)]
        return max((at_s + silence_s - now_s for at_s in received_s if now_s - at_s >= limit_s), default=0.0)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for probe in self._probes:
            probe.close()
