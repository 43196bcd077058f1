"""Renews the fencing lease of this node's workers. The lease fires in the guard: `_shared.guard.Guard._turn`.

`LeaseRenewal` runs the renewal that fits the current leader. With a leader elsewhere, `FollowerRenewal` sends
heartbeats, and each answer renews the lease. The leader gives a member up when it has received nothing for the silence
limit. The member counts from when it *sent* the last answered heartbeat, which is earlier than when the leader received
it, and its lease ends a margin before the limit. So by the time the leader forms a round without the member, the
member's workers are gone, even if the agent is stopped and only the guard runs. When this node leads, `LeaderRenewal`
renews the lease as long as no other node can have taken over (`leader.connections`).

It uses CLOCK_BOOTTIME throughout, so that the time of a suspended machine counts.
"""

from collections.abc import Callable

from muster.agent.rendezvous.consensus.members import find_margin_s
from muster.agent.rendezvous.interface import Lease
from muster.agent.rendezvous.protocol.messages import Heartbeat, HeartbeatReply
from muster.agent.rendezvous.transport.links import Link
from muster.agent.runtime.loop import Loop, Timer

NEVER = float("inf")
_DRIFT = 50e-6
"""Seconds per second by which the clocks of two machines drift apart."""


class LeaseRenewal:
    """Heartbeats to a leader elsewhere, the leader's own lease, or nothing while there is no leader."""

    def __init__(
        self,
        loop: Loop,
        lease: Lease | None,
        *,
        interval_s: float,
        silence_s: float,
        get_version: Callable[[], int],
        on_silent: Callable[[], None],
        on_quorum_lost: Callable[[], None],
    ) -> None:
        """Start nothing yet.

        Args:
            loop: the agent's.
            lease: the guard's; None if there is no guard.
            interval_s: the time between two heartbeats.
            silence_s: the silence limit, after which one side counts the other as lost.
            get_version: returns the version of the recovery record that the leader sent last.
            on_silent: called when the lease has ended because the leader elsewhere sent nothing.
            on_quorum_lost: called when this node leads and its lease has ended, so that others may have taken over.
        """
        self._loop = loop
        self._lease = lease
        self._interval_s = interval_s
        self._silence_s = silence_s
        self._get_version = get_version
        self._on_silent = on_silent
        self._on_quorum_lost = on_quorum_lost
        self._follower: FollowerRenewal | None = None
        self._leader: LeaderRenewal | None = None

    def follow(self, link: Link, since_s: float) -> None:
        """Send heartbeats to a leader elsewhere. `since_s` is when this node sent its join, by CLOCK_BOOTTIME."""
        self._follower = FollowerRenewal(
            self._loop,
            link,
            interval_s=self._interval_s,
            silence_s=self._silence_s,
            since_s=since_s,
            get_version=self._get_version,
            on_silent=self._on_silent,
        )
        self._follower.start()

    def lead(self, until_s: Callable[[], float]) -> None:
        """Renew the lease of a node that leads. `until_s` returns until when no other node can lead."""
        self._leader = LeaderRenewal(
            self._loop, interval_s=self._interval_s, until_s=until_s, on_expired=self._on_quorum_lost
        )

    @property
    def is_leased_elsewhere(self) -> bool:
        """Whether a leader elsewhere cannot have given this member up yet, even if the link has closed."""
        return self._follower is not None and not self._follower.is_expired

    @property
    def promise_until_s(self) -> float:
        """Until when this member joins no leader except its last one, by CLOCK_BOOTTIME."""
        return -NEVER if self._follower is None else self._follower.received_s + self._silence_s

    def record_receipt(self) -> bool:
        """Record that the leader sent a message. Return False if it comes too late: see `check_expiry`."""
        if self._follower is None:
            return True
        if self.check_expiry():
            return False  # perhaps given up since
        self._follower.record_receipt()
        return True

    def check_expiry(self) -> bool:
        """Return whether the lease ended while this process was stopped.

        If it did, `on_silent` or `on_quorum_lost` has been called.
        """
        if self._leader is not None and self._leader.is_expired:
            self._leader.expire()
            return True
        if self._follower is not None and self._follower.is_expired:
            self._on_silent()
            return True
        return False

    def record_reply(self, reply: HeartbeatReply) -> None:
        """Extend the lease, because the leader elsewhere has answered a heartbeat."""
        if self._follower is not None:
            self._follower.record_reply(reply)

    def read_clock(self) -> tuple[float, float] | None:
        """Return by how many seconds the clock of a leader elsewhere is ahead, and the uncertainty; None if unknown."""
        return None if self._follower is None else self._follower.read_clock()

    def start_lease(self, *, alone: bool) -> None:
        """Renew the lease from now on, because workers are about to start. A node alone needs no fencing."""
        if self._leader is not None:
            if alone and self._lease is not None:
                self._lease.release()
            self._leader.set_lease(self._lease, active=not alone)
        elif self._follower is not None:
            self._follower.set_lease(self._lease)

    def release_lease(self) -> None:
        """Release the lease, because no worker is left. Otherwise the guard would kill the warm template at its end."""
        if self._leader is not None:
            self._leader.set_lease(None, active=False)
        if self._follower is not None:
            self._follower.set_lease(None)
        if self._lease is not None:
            self._lease.release()

    def stop(self) -> None:
        """Stop heartbeats and renewals, because there is no leader any more. Idempotent."""
        if self._follower is not None:
            self._follower.stop()
            self._follower = None
        if self._leader is not None:
            self._leader.stop()
            self._leader = None


class FollowerRenewal:
    """Heartbeats over one link to a leader elsewhere. Call `stop` when the link is gone."""

    def __init__(
        self,
        loop: Loop,
        link: Link,
        *,
        interval_s: float,
        silence_s: float,
        since_s: float,
        get_version: Callable[[], int],
        on_silent: Callable[[], None],
    ) -> None:
        """Begin. `since_s` is when the member sent its join over this link, by CLOCK_BOOTTIME. Call `start` next."""
        self._loop = loop
        self._clock = loop.clock
        self._link = link
        self._interval_s = interval_s
        self._silence_s = silence_s
        self._lease: Lease | None = None
        self._get_version = get_version
        self._on_silent = on_silent
        self._sent_s: dict[int, float] = {}
        self._count = 0
        self._echo: float | None = None
        self._timer: Timer | None = None
        self._expiry_timer: Timer | None = None
        self.received_s = self._clock.boottime_s()
        """When the leader last sent a message: at first now, with the answer to the join.

        This member joins no other leader until the silence limit after it.
        """
        self.until_s = since_s + silence_s - find_margin_s(silence_s)
        """When the lease ends."""
        self._stopped = False
        self._ahead_s, self._uncertainty_s, self._compared_s = 0.0, NEVER, self.received_s
        """The best comparison with the leader's clock, and when it was made."""

    def start(self) -> None:
        """Send the first heartbeat. If the answer to the join came too late, end the lease at once: `on_silent`."""
        self._schedule_expiry()
        self.send_heartbeat()

    @property
    def is_expired(self) -> bool:
        """Whether the leader may have given this member up, even if the link is open."""
        return self._clock.boottime_s() >= self.until_s

    def set_lease(self, lease: Lease | None) -> None:
        """Renew this lease from now on, or none if it is None."""
        self._lease = lease
        self._renew()

    def send_heartbeat(self) -> None:
        """Send a heartbeat now, and the next one after the interval."""
        if self._stopped:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._count += 1
        self._sent_s[self._count] = self._clock.boottime_s()
        self._link.send(Heartbeat(number=self._count, echo_s=self._echo, recovery_version=self._get_version()))
        self._timer = self._loop.call_later(self._interval_s, self.send_heartbeat)

    def record_reply(self, reply: HeartbeatReply) -> None:
        """Extend the lease, because the leader has answered a heartbeat."""
        number = reply.number
        sent_s = self._sent_s.pop(number, None)
        if sent_s is None:
            return
        self._sent_s = {n: s for n, s in self._sent_s.items() if n > number}
        self._echo = reply.at_s
        self._compare_clocks(sent_s, reply.at_s)
        self.until_s = max(self.until_s, sent_s + self._silence_s - find_margin_s(self._silence_s))
        self._renew()

    def _compare_clocks(self, sent_s: float, leader_s: float) -> None:
        """Compare the clocks.

        The leader read its clock at some moment between these two, so the quickest answer says the most.
        """
        now_s = self._clock.boottime_s()
        uncertainty_s = (now_s - sent_s) / 2
        if uncertainty_s <= self._uncertainty_s + _DRIFT * (now_s - self._compared_s):
            self._ahead_s = leader_s - (now_s + sent_s) / 2
            self._uncertainty_s, self._compared_s = uncertainty_s, now_s

    def read_clock(self) -> tuple[float, float] | None:
        """See `LeaseRenewal`."""
        age_s = self._clock.boottime_s() - self._compared_s
        return None if self._uncertainty_s == NEVER else (self._ahead_s, self._uncertainty_s + _DRIFT * age_s)

    def record_receipt(self) -> None:
        """Record that the leader sent a message."""
        self.received_s = self._clock.boottime_s()

    def _renew(self) -> None:
        if self._lease is not None:
            self._lease.renew(self.until_s)

    def _schedule_expiry(self) -> None:
        left_s = self.until_s - self._clock.boottime_s()
        if left_s <= 0:
            self._on_silent()
        else:
            self._expiry_timer = self._loop.call_later(max(left_s, 0.01), self._check)

    def _check(self) -> None:
        if not self._stopped:
            self._schedule_expiry()

    def stop(self) -> None:
        """Stop sending heartbeats. The lease ends by itself. Idempotent."""
        self._stopped = True
        for timer in (self._timer, self._expiry_timer):
            if timer is not None:
                timer.cancel()


class LeaderRenewal:
    """The lease of the leader's own workers, renewed as long as no other node can have taken over."""

    def __init__(
        self, loop: Loop, *, interval_s: float, until_s: Callable[[], float], on_expired: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._until_s = until_s
        self._on_expired = on_expired
        self._lease: Lease | None = None
        self._timer: Timer | None = None
        self._active = self._expired = False
        self._last_s = float("inf")

    def set_lease(self, lease: Lease | None, *, active: bool) -> None:
        """Renew this lease from now on if `active`: the round has other members, which could continue alone."""
        self._lease = lease
        self._active = active
        self._expired = False
        self._last_s = float("inf")
        if self._timer is not None:
            self._timer.cancel()
        self._tick()

    @property
    def is_expired(self) -> bool:
        """Whether the lease as last renewed has ended. Workers that ended since were killed by the guard."""
        return self._expired or (self._active and self._loop.clock.boottime_s() >= self._last_s)

    def expire(self) -> None:
        """Call `on_expired`, once per lease."""
        if self._active and not self._expired:
            self._expired = True
            self._on_expired()

    def _tick(self) -> None:
        if self._active and not self._expired:
            until_s = self._until_s()
            if self.is_expired or until_s <= self._loop.clock.boottime_s():
                self.expire()
            else:
                self._last_s = until_s
                if self._lease is not None:
                    self._lease.renew(until_s)
        self._timer = self._loop.call_later(self._interval_s / 2, self._tick)

    def stop(self) -> None:
        """Stop renewing. Idempotent."""
        self._active = False
        if self._timer is not None:
            self._timer.cancel()
