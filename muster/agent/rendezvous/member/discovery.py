"""Finding a leader: where to look, whom to join, and when to stand for leadership oneself.

The old leader, the lowest surviving rank of the last round, or whoever is at the job's endpoint. Whether one who
stands may lead is `quorum`'s to say.
"""

from typing import Protocol

from muster.agent.rendezvous.member.recovery import RecoveryTracker
from muster.agent.rendezvous.member.search import Search, Target
from muster.agent.rendezvous.protocol.discovery_messages import QueryReply, build_leader_query
from muster.agent.rendezvous.protocol.job_rules import JobRules, describe_difference
from muster.agent.rendezvous.transport.links import Link, Network
from muster.agent.runtime.loop import Loop, Timer
from muster.agent.runtime.records import record

REFUSAL_HINTS = ("MUSTER_TOKEN", "of the protocol")
"""What every refusal names that is for the token's or for the version's sake."""
ENDPOINT_PATIENCE_S = 2.0
"""How long the node at the job's endpoint looks for a leader elsewhere before it leads those who come to it."""
NEVER = float("inf")


class DiscoveryOwner(Protocol):
    """Who looks for a leader."""

    @property
    def has_endpoint(self) -> bool:
        """True when those who look for the job's leader arrive here."""
        ...

    def can_join(self) -> bool:
        """It has no leader but itself, as a candidate, and no workers."""
        ...

    def can_stand(self) -> bool:
        """It has no leader at all, and no workers."""
        ...

    def join_at(self, link: Link, target: Target) -> None:
        """A leader, or a better candidate, is at the other end."""
        ...

    def stand(self, *, takeover: bool) -> None:
        """Nobody better is there."""
        ...

    def lose_all(self, reason: str) -> None:
        """There is no hope."""
        ...

    def tell(self, text: str) -> None:
        """One line for the console."""
        ...


@record
class DiscoveryOptions:
    """What is looked for."""

    run_id: str
    own_id: str
    endpoint: tuple[str, int]
    join_timeout_s: float
    job_rules: JobRules


class Discovery:
    """Looks while there is no leader. `stop` it with the member."""

    def __init__(
        self,
        loop: Loop,
        network: Network | None,
        options: DiscoveryOptions,
        memory: RecoveryTracker,
        seeker: DiscoveryOwner,
    ) -> None:
        self._loop = loop
        self._network = network
        self._options = options
        self._memory = memory
        self._seeker = seeker
        self._search: Search | None = None
        self._deadline: Timer | None = None
        self._refusal_told = self._misfit_told = False
        self.hint: Target | None = None
        """A place to look at first."""
        self.free_s = -NEVER
        """When this member's promise to its last leader ends, CLOCK_BOOTTIME."""

    def start(self) -> None:
        """Look around, unless that is going on."""
        if self._network is None or self._search is not None:
            return
        self._search = Search(
            self._loop,
            self._network,
            build_leader_query(self._options.run_id),
            self._on_status,
            self._on_search_round,
            self._seeker.lose_all,
        )
        self._search.start(self._list_targets())

    def hurry(self) -> None:
        """Something has changed on this side: ask again now."""
        if self._search is not None:
            self._search.hurry()

    def stop(self) -> None:
        """Look no more. Idempotent."""
        if self._search is not None:
            self._search.close()
            self._search = None

    def _list_targets(self) -> list[Target]:
        memory = self._memory
        targets = [self.hint] if self.hint is not None else []
        if memory.leader_place is not None and memory.leader_place[1]:
            targets.append(Target(host=memory.leader_place[0], port=memory.leader_place[1]))
        targets += [
            Target(host=one.host, port=one.port, rank=one.group_rank)
            for one in memory.successors
            if one.group_rank != memory.rank
        ]
        host, port = self._options.endpoint
        targets.append(Target(host=host, port=port))
        return list(dict.fromkeys(targets))

    # -- whom to join -----------------------------------------------------------------------------------------------

    def _on_status(self, link: Link, status: QueryReply, target: Target) -> bool:
        """Somebody answered: join it when it leads, or stands for leadership with a lower rank than ours."""
        if status.id == self._options.own_id or not self._seeker.can_join():
            return False
        if status.id != self._memory.leader_id:
            if self._memory.is_leaders_index(status.index):
                self.free_s = -NEVER  # it was started because the old leader's process had ended
            if self._loop.clock.boottime_s() < self.free_s:
                return False
        if self._is_misfit(status, target):
            return False
        if not self._is_better(status):
            if status.leader is not None and self._search is not None:
                self._search.add(Target(host=status.leader[0], port=status.leader[1]))
            return False
        self._search = self.hint = None
        self._seeker.join_at(link, target)
        return True

    def _is_misfit(self, status: QueryReply, target: Target) -> bool:
        """True for a leader with other rules that knows less of the job than this node: it could only refuse us.

        It was started anew with the wrong flags; whoever leads the others of the last round is elsewhere. A node that
        was never part of a round joins, and is refused.
        """
        if status.role != "leader" or status.round >= self._memory.round:
            return False
        difference = describe_difference(status.rules, self._options.job_rules)
        if difference is not None and not self._misfit_told:
            self._misfit_told = True
            self._seeker.tell(
                f"not joining the leader at {target.host}:{target.port}: it was started with {difference}"
            )
        return difference is not None

    def _is_better(self, status: QueryReply) -> bool:
        if status.role == "leader":
            return True
        if status.role != "candidate" or status.round < self._memory.round:
            return False
        own_rank = self._memory.rank
        is_later = status.round > self._memory.round
        return is_later or own_rank is None or (status.rank is not None and status.rank < own_rank)

    def _on_search_round(self) -> None:
        """Stand for leadership when nobody of a lower rank answers."""
        self._warn_of_refusal()
        if self._search is None or not self._seeker.can_stand():
            return
        if self._loop.clock.boottime_s() < self.free_s:
            return
        rank = self._memory.rank
        if any(one.group_rank == rank for one in self._memory.successors):
            if rank is not None and self._search.is_answered(rank):
                self._seeker.stand(takeover=True)
        elif self._seeker.has_endpoint and self._search.age_s() > ENDPOINT_PATIENCE_S:
            # Newcomers look for a leader here: gather them even without a part in the last round.
            self._seeker.stand(takeover=self._memory.round > 0)

    def _warn_of_refusal(self) -> None:
        """Said at once, not only at the join timeout: it never gets better by itself."""
        if self._search is None or self._refusal_told:
            return
        if any(hint in self._search.why for hint in REFUSAL_HINTS):
            self._refusal_told = True
            self._seeker.tell(f"cannot join: {self._search.why}")

    # -- how long ---------------------------------------------------------------------------------------------------

    def set_deadline(self) -> None:
        """Give up after the join timeout, counted from the first call."""
        if self._deadline is None:
            self._deadline = self._loop.call_later(self._options.join_timeout_s, self._on_deadline)

    def cancel_deadline(self) -> None:
        """There is a leader. Idempotent."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        why = f" ({self._search.why})" if self._search is not None and self._search.why else ""
        host, port = self._options.endpoint
        self._seeker.lose_all(f"no leader was found at {host}:{port} within {self._options.join_timeout_s:g} s{why}")
