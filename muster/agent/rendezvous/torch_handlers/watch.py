"""How the nodes of one round agree on the job's end through the round's store, which torch's handlers do not do.

A job succeeds only when every worker has, and torch's stores do not report lost nodes. So each node writes heartbeats
and how it ended. A node that has succeeded waits without a limit for those that still send heartbeats::

    <nonce>/beat/<rank>    a number that grows while the node's agent runs
    <nonce>/done/<rank>    all of the node's workers have succeeded
    <nonce>/failed         the job has failed for good: why, and the root cause
    <nonce>/seen/<rank>    the node knows the end: the node whose process holds the store leaves last
    <nonce>/still/<rank>   1: all of the node's workers stand still; 0: they go on

The nonce is the round's, because some handlers return one store for all rounds. Each node watches the next one, so that
the work does not grow with the job. If neighbours are lost together, the watcher of the first one reports. Every call
waits for the store, so nothing here is called on the agent's loop.
"""

import json
from collections.abc import Callable
from typing import Protocol

from muster._shared.codec import MalformedMessageError, decode, encode
from muster._shared.fields import GroupRank, Line, Seconds
from muster._shared.records import record
from muster._shared.reports import Failure

HEARTBEAT_S = 1.0
HEARTBEATS_PER_SILENCE = 5
FAILED_LIMIT_BYTES = 1 << 20


@record
class AllDone:
    """Every worker of the job has succeeded."""


@record
class FailedElsewhere:
    """The job has failed for good on another node."""

    reason: Line
    root: Failure | None


@record
class NodeLost:
    """A node whose workers had not succeeded sends no heartbeat."""

    rank: GroupRank
    silence_s: Seconds
    """How long it has sent none."""


Finding = AllDone | FailedElsewhere | NodeLost


class Store(Protocol):
    """The used part of a `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Read a value, and wait until the key is written."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 before, and return the sum."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are written."""
        ...


class RoundWatch:
    """One node's view of one round."""

    def __init__(
        self, store: Store, nonce: str, *, rank: int, size: int, silence_s: float, now_s: Callable[[], float]
    ) -> None:
        """Start with the first heartbeat due now.

        Args:
            store: the round's.
            nonce: the same on all nodes of this round, and never used before.
            rank: this node's group rank.
            size: nodes of the round.
            silence_s: how long a node may send no heartbeat before it is lost.
            now_s: this node's own monotonic clock.
        """
        self._store = store
        self._nonce = nonce
        self._rank = rank
        self._size = size
        self._now_s = now_s
        self.silence_s = silence_s
        self._interval_s = min(HEARTBEAT_S, silence_s / HEARTBEATS_PER_SILENCE)
        self._next_heartbeat_s = now_s()
        self._done_count = 0
        """All nodes with a lower rank are known to be done."""
        self._seen_count = 0
        self._is_done = False
        self._awaits_still = False
        """Whether to find out if the workers of all nodes stand still; `_next_look_s` says when."""
        self._next_look_s = 0.0
        self._watched = rank
        self._last_count, self._last_change_s = -1, 0.0
        self._watch_next()

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"{self._nonce}/{what}" if rank is None else f"{self._nonce}/{what}/{rank}"

    def send_heartbeat(self) -> None:
        """Send a heartbeat, if one is due."""
        now_s = self._now_s()
        if now_s >= self._next_heartbeat_s:
            self._next_heartbeat_s = now_s + self._interval_s
            self._store.add(self._key("beat", self._rank), 1)

    def post_done(self) -> None:
        """Write that all workers of this node have succeeded."""
        self._is_done = True
        self._store.set(self._key("done", self._rank), "1")

    def post_failed(self, reason: str, root: Failure | None) -> None:
        """Write that the job has failed for good here."""
        failed = encode(FailedElsewhere(reason=reason, root=root), FAILED_LIMIT_BYTES)
        self._store.set(self._key("failed"), failed)

    def post_seen(self) -> None:
        """Write that this node knows the job's end."""
        self._store.set(self._key("seen", self._rank), "1")

    def post_still(self, *, is_still: bool) -> None:
        """Write whether all workers of this node stand still.

        If so, `find_all_still` reports when those of all nodes do.
        """
        self._awaits_still = is_still
        self._store.set(self._key("still", self._rank), "1" if is_still else "0")

    def find_all_still(self) -> bool:
        """Return True once after `post_still`, when the workers of all nodes that are not done stand still."""
        now_s = self._now_s()
        if not self._awaits_still or now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + self._interval_s
        self._awaits_still = not all(self._is_still(rank) for rank in range(self._size))
        return not self._awaits_still

    def _is_still(self, rank: int) -> bool:
        key = self._key("still", rank)
        is_written = self._store.check([key])
        return (is_written and self._store.get(key) == b"1") or self._store.check([self._key("done", rank)])

    def check(self) -> Finding | None:
        """Return the first reason found to end the round; None while it continues."""
        failed = self.read_failed()
        if failed is not None:
            return failed
        if self._is_done:
            self._done_count = self._count("done", self._done_count)
            if self._done_count == self._size:
                return AllDone()
        return self._find_lost()

    def is_end_seen_by_all(self) -> bool:
        """Return whether every node knows the end."""
        self._seen_count = self._count("seen", self._seen_count)
        return self._seen_count == self._size

    def _count(self, what: str, known: int) -> int:
        """Return how many ranks from 0 on have written the key without a gap. A key is never removed."""
        while known < self._size and self._store.check([self._key(what, known)]):
            known += 1
        return known

    def read_failed(self) -> FailedElsewhere | None:
        """Return what a node wrote when the job failed for good; None if none did."""
        key = self._key("failed")
        if not self._store.check([key]):
            return None
        try:
            return decode(FailedElsewhere, json.loads(self._store.get(key)))
        except (ValueError, RecursionError, MalformedMessageError):
            return FailedElsewhere(reason="the job has failed on another node", root=None)

    # -- lost nodes -------------------------------------------------------------------------------------------------

    def _watch_next(self) -> None:
        self._watched = (self._watched + 1) % self._size
        self._last_count, self._last_change_s = -1, self._now_s()

    def _find_lost(self) -> NodeLost | None:
        """Return the watched node if it sends no heartbeat and is not done.

        A node that is done is not needed any more.
        """
        if self._watched == self._rank:
            return None
        now_s, count = self._now_s(), int(self._store.add(self._key("beat", self._watched), 0))
        if count != self._last_count:
            self._last_count, self._last_change_s = count, now_s
        elif now_s - self._last_change_s >= self.silence_s:
            if not self._store.check([self._key("done", self._watched)]):
                return NodeLost(rank=self._watched, silence_s=self.silence_s)
            self._watch_next()
        return None
