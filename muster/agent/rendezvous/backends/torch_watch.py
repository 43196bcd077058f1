"""How the nodes of one round agree on its end through the round's store, where torch's handlers agree on none.

A job has ended well only when every worker has, and torch's stores tell nothing of peers that are gone. So each node
writes that it lives, and how it ended; whoever is done waits without a limit for those who still show life::

    <nonce>/beat/<rank>    a number that grows while the node's agent lives
    <nonce>/done/<rank>    all of the node's workers have ended well
    <nonce>/failed         the job has failed for good: why, and the root cause
    <nonce>/seen/<rank>    the node knows the end: the one whose process holds the store leaves after all others

The nonce is the round's: some handlers hand out one store for all rounds. Each node watches the next one, so that the
work does not grow with the job; of neighbours that are gone together, the first one's watcher tells. Every call waits
for the store; nothing here is called on the agent's loop.
"""

import json
from collections.abc import Callable
from typing import Any

from muster.agent.diagnosis.report import Failure
from muster.agent.rendezvous.protocol.fields import MalformedMessageError, mapping, optional, read_field, text
from muster.agent.rendezvous.protocol.payloads import read_failure
from muster.agent.runtime.records import record

BEAT_S = 1.0
BEATS_PER_SILENCE = 5


@record
class AllDone:
    """Every worker of the job has ended well."""


@record
class FailedElsewhere:
    """The job has failed for good on another node."""

    reason: str
    root: Failure | None


@record
class NodeLost:
    """A node whose workers had not ended well shows no life."""

    rank: int


Finding = AllDone | FailedElsewhere | NodeLost


class RoundWatch:
    """One node's part in one round's end."""

    def __init__(
        self, store: Any, nonce: str, *, rank: int, size: int, silence_s: float, now_s: Callable[[], float]
    ) -> None:
        """Begin to show life.

        Args:
            store: the round's, a `torch.distributed.Store`.
            nonce: the same on all nodes of this round, and never used before.
            rank: this node's group rank.
            size: nodes of the round.
            silence_s: how long a node may show no life before it is lost.
            now_s: this node's own monotonic clock.
        """
        self._store = store
        self._nonce = nonce
        self._rank = rank
        self._size = size
        self._now_s = now_s
        self.silence_s = silence_s
        self._beat_s = min(BEAT_S, silence_s / BEATS_PER_SILENCE)
        self._next_beat_s = now_s()
        self._done_before = 0
        """All nodes of a lower rank are known to be done."""
        self._seen_before = 0
        self._is_done = False
        self._watched = rank
        self._beats, self._beats_since_s = -1, 0.0
        self._watch_next()

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"{self._nonce}/{what}" if rank is None else f"{self._nonce}/{what}/{rank}"

    def beat(self) -> None:
        """Show life, when it is time to."""
        now_s = self._now_s()
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._beat_s
            self._store.add(self._key("beat", self._rank), 1)

    def post_done(self) -> None:
        """All workers of this node have ended well."""
        self._is_done = True
        self._store.set(self._key("done", self._rank), "1")

    def post_failed(self, reason: str, root: Failure | None) -> None:
        """The job has failed for good here."""
        data = {"reason": reason, "root": None if root is None else root.to_json()}
        self._store.set(self._key("failed"), json.dumps(data))

    def post_seen(self) -> None:
        """This node knows the job's end."""
        self._store.set(self._key("seen", self._rank), "1")

    def look(self) -> Finding | None:
        """What has become of the round; None while nothing has."""
        failed = self.read_failed()
        if failed is not None:
            return failed
        if self._is_done:
            self._done_before = self._count("done", self._done_before)
            if self._done_before == self._size:
                return AllDone()
        return self._find_lost()

    def is_end_seen_by_all(self) -> bool:
        """True when every node knows the end."""
        self._seen_before = self._count("seen", self._seen_before)
        return self._seen_before == self._size

    def _count(self, what: str, known: int) -> int:
        """How many ranks from 0 on have written it without a gap. What one has written it never takes back."""
        while known < self._size and self._store.check([self._key(what, known)]):
            known += 1
        return known

    def read_failed(self) -> FailedElsewhere | None:
        """Whether some node has said that the job has failed for good."""
        key = self._key("failed")
        if not self._store.check([key]):
            return None
        try:
            data = mapping(json.loads(self._store.get(key)))
            return FailedElsewhere(
                reason=read_field(data, "reason", text), root=read_field(data, "root", optional(read_failure))
            )
        except (ValueError, RecursionError, MalformedMessageError):
            return FailedElsewhere(reason="the job has failed on another node", root=None)

    # -- who lives --------------------------------------------------------------------------------------------------

    def _watch_next(self) -> None:
        self._watched = (self._watched + 1) % self._size
        self._beats, self._beats_since_s = -1, self._now_s()

    def _find_lost(self) -> NodeLost | None:
        """The watched node, when it shows no life and is not done. One that is done is not needed any more."""
        if self._watched == self._rank:
            return None
        now_s, beats = self._now_s(), int(self._store.add(self._key("beat", self._watched), 0))
        if beats != self._beats:
            self._beats, self._beats_since_s = beats, now_s
        elif now_s - self._beats_since_s >= self.silence_s:
            if not self._store.check([self._key("done", self._watched)]):
                return NodeLost(rank=self._watched)
            self._watch_next()
        return None
