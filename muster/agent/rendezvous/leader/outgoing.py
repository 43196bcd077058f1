"""Sending to the members. No member exits before all have acknowledged the job's end."""

from muster.agent.rendezvous.consensus.actions import JobEnd, Send
from muster.agent.rendezvous.leader.connections import MemberConnections
from muster.agent.rendezvous.protocol.leader_messages import Exit, LeaderMessage
from muster.agent.runtime.loop import Loop, Timer

ACKNOWLEDGE_SILENCES = 3
"""How many silence limits the end waits for members that have not acknowledged it.

An unreachable member may come back and must then find a node that knows the end. Otherwise it would continue with
others and repeat finished work.
"""


class OutgoingMessages:
    """One leader's outgoing messages. Close it with the leader."""

    def __init__(self, loop: Loop, connections: MemberConnections, silence_s: float) -> None:
        self._loop = loop
        self._connections = connections
        self._silence_s = silence_s
        self._unacknowledged: set[str] | None = None
        self._peak_bytes = 0
        self._end_timer: Timer | None = None

    def send(self, send: Send) -> None:
        """Send a message to its connected recipients."""
        self._send(send.ids, send.message)
        if isinstance(send.message, JobEnd):
            self._await_acknowledgements(send.ids)

    def _send(self, ids: tuple[str, ...], message: LeaderMessage) -> None:
        for member_id in ids:
            connection = self._connections.find(member_id)
            if connection is not None:
                connection.link.send(message)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _await_acknowledgements(self, ids: tuple[str, ...]) -> None:
        if self._unacknowledged is None:
            self._unacknowledged = set(ids)
            limit_s = ACKNOWLEDGE_SILENCES * self._silence_s
            self._end_timer = self._loop.call_later(limit_s, self._send_exit)
        elif not self._unacknowledged:
            self._send(ids, Exit(peak_bytes=self._peak_bytes))  # the others have exited

    def record_acknowledgement(self, member_id: str, peak_bytes: int = 0) -> None:
        """Record that a member has acknowledged the end, or that its process has ended.

        Args:
            member_id: the member.
            peak_bytes: the peak memory of its largest worker; 0 if unknown.
        """
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        if self._unacknowledged is None or member_id not in self._unacknowledged:
            return
        self._unacknowledged.discard(member_id)
        if not self._unacknowledged:
            self._send_exit()

    def _send_exit(self) -> None:
        """Let all members exit together, once all have acknowledged the end or the limit has passed."""
        self._unacknowledged = set()
        self._send(self._connections.list_ids(), Exit(peak_bytes=self._peak_bytes))

    def close(self) -> None:
        """Stop the timer. Idempotent."""
        if self._end_timer is not None:
            self._end_timer.cancel()
