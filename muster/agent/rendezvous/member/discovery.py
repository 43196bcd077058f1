"""Discovery of a leader: which addresses to ask, which leader to join, and when to attempt a takeover.

The leader is the old one, the member of the lowest surviving rank of the last round, or the process at the job's
endpoint. `consensus.quorum.may_take_over` decides whether a candidate may lead.
"""

from typing import Protocol

from muster._shared.records import record
from muster.agent.rendezvous.member.recovery import RecoveryTracker
from muster.agent.rendezvous.member.search import Search, Target
from muster.agent.rendezvous.protocol.job_rules import JobRules, describe_difference
from muster.agent.rendezvous.protocol.messages import DiscoveryRole, LeaderQuery, QueryReply
from muster.agent.rendezvous.transport.links import Cause, Link, LinkEnd, Network
from muster.agent.runtime.loop import Loop, Timer

ENDPOINT_SEARCH_S = 2.0
"""How long the node at the job's endpoint searches for a leader elsewhere before it leads the nodes that join it."""
NEVER = float("inf")


class DiscoveryOwner(Protocol):
    """What discovery asks of the session."""

    @property
    def has_endpoint(self) -> bool:
        """True when this process listens at the job's endpoint."""
        ...

    def can_join(self) -> bool:
        """True without workers and without a leader other than this node as a candidate."""
        ...

    def can_start_leading(self) -> bool:
        """True without workers and without any leader."""
        ...

    def join_at(self, link: Link, target: Target) -> None:
        """Join the leader, or the better candidate, at the other end of the link."""
        ...

    def start_leading(self, *, takeover: bool) -> None:
        """Lead, or become a candidate: no better leader was found."""
        ...

    def fail(self, reason: str) -> None:
        """End rendezvous: no leader can be found or joined."""
        ...

    def post_notice(self, text: str) -> None:
        """Post one line for the console."""
        ...


@record
class DiscoveryOptions:
    """The job and the node that discovery works for."""

    run_id: str
    own_id: str
    endpoint: tuple[str, int]
    join_timeout_s: float
    job_rules: JobRules


class Discovery:
    """Searches while there is no leader. `stop` it with the member."""

    def __init__(
        self,
        loop: Loop,
        network: Network | None,
        options: DiscoveryOptions,
        recovery: RecoveryTracker,
        owner: DiscoveryOwner,
    ) -> None:
        self._loop = loop
        self._network = network
        self._options = options
        self._recovery = recovery
        self._owner = owner
        self._search: Search | None = None
        self._deadline: Timer | None = None
        self._has_reported_rules = False
        self._refusal: LinkEnd | None = None
        """The first failure that waiting cannot repair: it says more than a refused connection after it."""
        self.first_target: Target | None = None
        """The address to ask first."""
        self.promise_until_s = -NEVER
        """Until when this member joins no leader but its last one, CLOCK_BOOTTIME."""

    def start(self) -> None:
        """Start the search, unless it is running."""
        if self._network is None or self._search is not None:
            return
        self._search = Search(
            self._loop,
            self._network,
            LeaderQuery(run_id=self._options.run_id),
            self._on_query_reply,
            self._on_search_progress,
            self._owner.fail,
        )
        self._search.start(self._list_targets())

    @property
    def last_error(self) -> str:
        """Why the job's endpoint did not answer last; "" when it did, or was not asked."""
        return self._search.explain_missing_leader() if self._search is not None else ""

    def ask_now(self) -> None:
        """Ask all addresses again now: this node's state has changed."""
        if self._search is not None:
            self._search.ask_now()

    def stop(self) -> None:
        """Stop searching. Idempotent."""
        if self._search is not None:
            self._search.close()
            self._search = None

    def _list_targets(self) -> list[Target]:
        recovery = self._recovery
        targets = [self.first_target] if self.first_target is not None else []
        if recovery.leader_address is not None and recovery.leader_address[1]:
            targets.append(Target(host=recovery.leader_address[0], port=recovery.leader_address[1]))
        targets += [
            Target(host=one.host, port=one.port, group_rank=one.group_rank)
            for one in recovery.successors
            if one.group_rank != recovery.group_rank
        ]
        host, port = self._options.endpoint
        targets.append(Target(host=host, port=port))
        return list(dict.fromkeys(targets))

    # -- which leader to join ---------------------------------------------------------------------------------------

    def _on_query_reply(self, link: Link, reply: QueryReply, target: Target) -> bool:
        """Join the node that answered when it leads, or is a candidate with a lower rank than ours."""
        if reply.id == self._options.own_id or not self._owner.can_join():
            return False
        if reply.id != self._recovery.leader_id:
            if self._recovery.is_leaders_index(reply.index):
                self.promise_until_s = -NEVER  # it was started because the old leader's process had ended
            if self._loop.clock.boottime_s() < self.promise_until_s:
                return False
        if self._has_other_rules(reply, target):
            return False
        if not self._is_better(reply):
            if reply.leader is not None and self._search is not None:
                self._search.add(Target(host=reply.leader[0], port=reply.leader[1]))
            return False
        self._search = self.first_target = None
        self._owner.join_at(link, target)
        return True

    def _has_other_rules(self, reply: QueryReply, target: Target) -> bool:
        """True for a leader with other rules that knows an older round than this node: it could only refuse us.

        It was restarted with the wrong flags; the leader of the last round's members is elsewhere. A node that was
        never part of a round joins, and is refused.
        """
        if reply.role is not DiscoveryRole.LEADER or reply.round_number >= self._recovery.round_number:
            return False
        difference = describe_difference(reply.rules, self._options.job_rules)
        if difference is not None and not self._has_reported_rules:
            self._has_reported_rules = True
            self._owner.post_notice(
                f"not joining the leader at {target.host}:{target.port}: it was started with {difference}"
            )
        return difference is not None

    def _is_better(self, reply: QueryReply) -> bool:
        if reply.role is DiscoveryRole.LEADER:
            return True
        if reply.role is not DiscoveryRole.CANDIDATE or reply.round_number < self._recovery.round_number:
            return False
        own_group_rank = self._recovery.group_rank
        if reply.round_number > self._recovery.round_number or own_group_rank is None:
            return True
        return reply.group_rank is not None and reply.group_rank < own_group_rank

    def _on_search_progress(self) -> None:
        """Attempt a takeover when no member of a lower rank answers."""
        self._report_refusal()
        if self._search is None or not self._owner.can_start_leading():
            return
        if self._loop.clock.boottime_s() < self.promise_until_s:
            return
        group_rank = self._recovery.group_rank
        if any(one.group_rank == group_rank for one in self._recovery.successors):
            if group_rank is not None and self._search.is_answered_below(group_rank):
                self._owner.start_leading(takeover=True)
        elif self._owner.has_endpoint and self._search.age_s() > ENDPOINT_SEARCH_S:
            # New nodes search for a leader here: gather them even if this node was not in the last round.
            self._owner.start_leading(takeover=self._recovery.round_number > 0)

    def _report_refusal(self) -> None:
        """Post at once a failure that waiting cannot repair, not only at the join timeout."""
        failure = self._search.last_failure if self._search is not None else None
        if failure is not None and failure.cause is not Cause.BROKEN and self._refusal is None:
            self._refusal = failure
            self._owner.post_notice(f"cannot join the job at {failure.reason}")

    # -- join timeout ------------------------------------------------------------------------------------------------

    def set_deadline(self) -> None:
        """Fail after the join timeout, counted from the first call."""
        if self._deadline is None:
            self._deadline = self._loop.call_later(self._options.join_timeout_s, self._on_deadline)

    def cancel_deadline(self) -> None:
        """A leader was found. Idempotent."""
        self._refusal = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        failure = self._refusal or (self._search.last_failure if self._search is not None else None)
        why = "" if failure is None else f" ({failure.reason})"
        host, port = self._options.endpoint
        self._owner.fail(f"found no leader at {host}:{port} within {self._options.join_timeout_s:g} s{why}")
