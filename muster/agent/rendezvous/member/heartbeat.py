"""Runs the lease of this node's workers: `FollowerLease` with a leader elsewhere, else `LeaderLease`."""

from collections.abc import Callable

from muster.agent.rendezvous.interface import Lease
from muster.agent.rendezvous.member.lease import FollowerLease, LeaderLease
from muster.agent.rendezvous.protocol.leader_messages import HeartbeatReply
from muster.agent.rendezvous.transport.links import Link
from muster.agent.runtime.loop import Loop

NEVER = float("inf")


class Heartbeats:
    """Heartbeats to a leader elsewhere, the leader's own lease, or nothing while there is no leader."""

    def __init__(
        self,
        loop: Loop,
        lease: Lease | None,
        *,
        interval_s: float,
        silence_s: float,
        on_silent: Callable[[], None],
        on_quorum_lost: Callable[[], None],
    ) -> None:
        """Start nothing yet.

        Args:
            loop: the agent's.
            lease: the guard's; None when there is no guard.
            interval_s: between two heartbeats.
            silence_s: the silence limit, after which one side takes the other for lost.
            on_silent: called when the lease has ended because the leader elsewhere sent nothing.
            on_quorum_lost: called when this node leads and its lease has ended: others may have taken over.
        """
        self._loop = loop
        self._lease = lease
        self._interval_s = interval_s
        self._silence_s = silence_s
        self._on_silent = on_silent
        self._on_quorum_lost = on_quorum_lost
        self._follower_lease: FollowerLease | None = None
        self._leader_lease: LeaderLease | None = None

    def follow(self, link: Link, since_s: float) -> None:
        """Send heartbeats to a leader elsewhere; `since_s` is when this node sent its join, CLOCK_BOOTTIME."""
        self._follower_lease = FollowerLease(
            self._loop,
            link,
            interval_s=self._interval_s,
            silence_s=self._silence_s,
            since_s=since_s,
            lease=None,
            on_silent=self._on_silent,
        )

    def lead(self, until_s: Callable[[], float]) -> None:
        """This node leads; `until_s` returns until when no other node can."""
        self._leader_lease = LeaderLease(
            self._loop, interval_s=self._interval_s, until_s=until_s, on_expired=self._on_quorum_lost
        )

    @property
    def is_leased_elsewhere(self) -> bool:
        """True while a leader elsewhere cannot have given this member up, even if the link has closed."""
        return self._follower_lease is not None and not self._follower_lease.is_expired

    @property
    def promise_until_s(self) -> float:
        """Until when this member joins no leader but its last one, CLOCK_BOOTTIME."""
        return -NEVER if self._follower_lease is None else self._follower_lease.received_s + self._silence_s

    def record_receipt(self) -> bool:
        """Record that the leader sent a message. False when it comes too late: see `check_expiry`."""
        if self._follower_lease is None:
            return True
        if self.check_expiry():
            return False  # the leader may have given this member up since it sent the message
        self._follower_lease.record_receipt()
        return True

    def check_expiry(self) -> bool:
        """True when the lease ended while this process was stopped; `on_silent` or `on_quorum_lost` has been called."""
        if self._leader_lease is not None and self._leader_lease.is_expired:
            self._leader_lease.expire()
            return True
        if self._follower_lease is not None and self._follower_lease.is_expired:
            self._on_silent()
            return True
        return False

    def record_reply(self, reply: HeartbeatReply) -> None:
        """Extend the lease: the leader elsewhere has answered a heartbeat."""
        if self._follower_lease is not None:
            self._follower_lease.record_reply(reply)

    def start_lease(self, *, alone: bool) -> None:
        """Renew the lease from now on: workers are about to start. A node alone needs no fencing."""
        if self._leader_lease is not None:
            if alone and self._lease is not None:
                self._lease.release()
            self._leader_lease.set_lease(self._lease, active=not alone)
        elif self._follower_lease is not None:
            self._follower_lease.set_lease(self._lease)

    def release_lease(self) -> None:
        """Release the lease: no worker is left. Without this, the guard would kill the warm template when it ends."""
        if self._leader_lease is not None:
            self._leader_lease.set_lease(None, active=False)
        if self._follower_lease is not None:
            self._follower_lease.set_lease(None)
        if self._lease is not None:
            self._lease.release()

    def stop(self) -> None:
        """Stop heartbeats and renewals: there is no leader any more. Idempotent."""
        if self._follower_lease is not None:
            self._follower_lease.stop()
            self._follower_lease = None
        if self._leader_lease is not None:
            self._leader_lease.stop()
            self._leader_lease = None
