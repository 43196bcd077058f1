"""A member's signs of life to whichever leader it has, its own or another's, and the lease of its workers."""

from collections.abc import Callable

from muster.agent.rendezvous.interface import Lease
from muster.agent.rendezvous.member.lease import FollowerLease, LeaderLease
from muster.agent.rendezvous.protocol.leader_messages import HeartbeatReply
from muster.agent.rendezvous.transport.links import Link
from muster.agent.runtime.loop import Loop

NEVER = float("inf")


class Heartbeats:
    """One of two kinds of keep-alive, or none while there is no leader."""

    def __init__(
        self,
        loop: Loop,
        lease: Lease | None,
        *,
        interval_s: float,
        silence_s: float,
        on_silent: Callable[[], None],
        on_outvoted: Callable[[], None],
    ) -> None:
        """What is called when the lease of this node's workers has ended.

        Args:
            loop: the agent's.
            lease: the guard's; None when there is no guard.
            interval_s: between two heartbeats.
            silence_s: how long one side may be silent before the other gives it up.
            on_silent: the leader elsewhere was not heard in time.
            on_outvoted: this node leads, and others may have taken over.
        """
        self._loop = loop
        self._lease = lease
        self._interval_s = interval_s
        self._silence_s = silence_s
        self._on_silent = on_silent
        self._on_outvoted = on_outvoted
        self._remote: FollowerLease | None = None
        self._own: LeaderLease | None = None

    def follow(self, link: Link, since_s: float) -> None:
        """Beat for a leader elsewhere; `since_s` is when it was asked for its welcome, CLOCK_BOOTTIME."""
        self._remote = FollowerLease(
            self._loop,
            link,
            interval_s=self._interval_s,
            silence_s=self._silence_s,
            since_s=since_s,
            lease=None,
            on_silent=self._on_silent,
        )

    def lead(self, until_s: Callable[[], float]) -> None:
        """This node leads; `until_s` says until when nobody else can."""
        self._own = LeaderLease(self._loop, interval_s=self._interval_s, until_s=until_s, on_expired=self._on_outvoted)

    @property
    def is_alive_elsewhere(self) -> bool:
        """True when a leader elsewhere cannot have given this member up, whatever the link says."""
        return self._remote is not None and not self._remote.is_expired

    @property
    def promise_s(self) -> float:
        """Until when this member joins no other leader than the one it heard last, CLOCK_BOOTTIME."""
        return -NEVER if self._remote is None else self._remote.heard_s + self._silence_s

    def note_heard(self) -> bool:
        """Something came from the leader. False when it comes too late: see `notice_expiry`."""
        if self._remote is None:
            return True
        if self.notice_expiry():
            return False  # what is read now was said to a member that may have been given up since
        self._remote.note_heard()
        return True

    def notice_expiry(self) -> bool:
        """True when the lease ran out while this process was stopped; whom it concerns has been told then."""
        if self._own is not None and self._own.is_expired:
            self._own.expire()
            return True
        if self._remote is not None and self._remote.is_expired:
            self._on_silent()
            return True
        return False

    def take_answer(self, answer: HeartbeatReply) -> None:
        """The leader elsewhere has answered a heartbeat."""
        if self._remote is not None:
            self._remote.take_answer(answer)

    def hold_lease(self, *, alone: bool) -> None:
        """Workers are about to start. Fencing matters only where others could go on without this node."""
        if self._own is not None:
            if alone and self._lease is not None:
                self._lease.release()
            self._own.hold_lease(self._lease, active=not alone)
        elif self._remote is not None:
            self._remote.hold_lease(self._lease)

    def drop_lease(self) -> None:
        """No worker is left to fence: at its end the guard would only kill the warm template."""
        if self._own is not None:
            self._own.hold_lease(None, active=False)
        if self._remote is not None:
            self._remote.hold_lease(None)
        if self._lease is not None:
            self._lease.release()

    def stop(self) -> None:
        """There is no leader any more. Idempotent."""
        if self._remote is not None:
            self._remote.stop()
            self._remote = None
        if self._own is not None:
            self._own.stop()
            self._own = None
