"""The leader: turns messages and lost connections into events for `decisions.decide`, and sends the actions.

It decides nothing about rounds itself. It adds identity and time: which member is on which link, which member has been
silent for too long, and when the lease of its own workers ends.
"""

from collections.abc import Callable

from muster.agent.rendezvous.consensus.actions import DropMembers, FormRound
from muster.agent.rendezvous.consensus.decisions import decide, next_due_s
from muster.agent.rendezvous.consensus.events import (
    Event,
    Failed,
    Idle,
    Joined,
    Leaving,
    MemberLost,
    Prepared,
    ProcessEnded,
    RoundAcknowledged,
    Stopped,
    Succeeded,
    Tick,
)
from muster.agent.rendezvous.consensus.members import MemberRecord, find_margin_s
from muster.agent.rendezvous.consensus.quorum import QuorumRound, find_quorum_size
from muster.agent.rendezvous.consensus.state import FOREVER, JobState, build_initial_state
from muster.agent.rendezvous.leader.connections import (
    IndexClaim,
    LeaderOptions,
    MemberConnection,
    MemberConnections,
    describe_newcomer,
)
from muster.agent.rendezvous.leader.outgoing import OutgoingMessages
from muster.agent.rendezvous.protocol.codec import MalformedMessageError
from muster.agent.rendezvous.protocol.framing import Frame
from muster.agent.rendezvous.protocol.job_rules import describe_difference
from muster.agent.rendezvous.protocol.leader_messages import Goodbye, HeartbeatReply, Redirect, Rejected, Welcome
from muster.agent.rendezvous.protocol.member_messages import (
    MEMBER_MESSAGES,
    EndAcknowledged,
    Heartbeat,
    Join,
    MemberMessage,
    Started,
)
from muster.agent.rendezvous.protocol.messages import Message
from muster.agent.rendezvous.transport.links import Closing, Link, LocalLink, Network
from muster.agent.runtime.loop import Loop, Timer
from muster.agent.runtime.records import assert_never, replace

PAUSE_S = 1.0
"""Without activity for this long, this process may have been stopped."""
RETRY_S = 0.05
"""Delay before retrying a round that the leader's lease did not cover. Every heartbeat would be too often."""
DUPLICATE_S = 1.5
"""How long after an index claim the first node must send something to count as alive."""


class Leader:
    """Leads until closed. It owns a link from `admit` on."""

    def __init__(self, loop: Loop, network: Network | None, options: LeaderOptions) -> None:
        self._loop = loop
        self._clock = loop.clock
        self._network = network
        self._options = options
        self._connections = MemberConnections()
        self._outgoing = OutgoingMessages(loop, self._connections, options)
        self._claims: dict[str, IndexClaim] = {}
        """By the id of the member whose index they claim."""
        self._probes: set[Closing] = set()
        self._due_timer: Timer | None = None
        self._sweep_timer: Timer | None = None
        self._retry_timer: Timer | None = None
        self._closed = False
        self._last_active_s = loop.clock.boottime_s()
        self.state: JobState = build_initial_state(
            options.rules,
            loop.clock.now_s(),
            takeover=options.takeover,
            must_find_last_round=options.must_find_last_round,
        )
        self._set_timer()

    # -- joins ------------------------------------------------------------------------------------------------------

    def attach_local(self) -> LocalLink:
        """Create a link for the member of the leader's own node."""
        mine, theirs = LocalLink.pair(self._loop)
        mine.owner = self
        return theirs

    def admit(self, link: Link, join: Join) -> None:
        """Accept or reject the node that sent `join` on this link."""
        link.owner = self
        run_id = self._options.rules.run_id
        if join.run_id != run_id:
            link.send(Rejected(reason=f"this is run {run_id!r}, not {join.run_id[:80]!r}"))
            link.close()
            return
        difference = describe_difference(join.rules, self._options.job_rules)
        if difference is not None:
            self._options.notify(f"refused {describe_newcomer(join)}: it was started with {difference}")
            link.send(Rejected(reason=f"this agent was started with {difference}", usage=True))
            link.close()
            return
        holder = None if join.index is None else self._connections.find_index(join.index)
        if holder is None or holder.id == join.id:
            self._add_member(link, join)
        else:
            self._start_claim(holder, link, join)

    def _start_claim(self, holder: MemberConnection, link: Link, join: Join) -> None:
        """Two nodes have one index: either the first is gone, which is not known yet, or it is a usage error."""
        self._claims[holder.id] = IndexClaim(link=link, join=join, since_s=self._clock.boottime_s())
        self._probe(holder, lambda: self._remove_member(holder, "its process has ended"))

    def _add_member(self, link: Link, join: Join) -> None:
        old = self._connections.find(join.id)
        if old is not None:
            self._remove_member(old, "it reconnected")
        connection = MemberConnection(join, link, self._clock.boottime_s())
        self._connections.add(connection)
        link.trust()
        link.send(Welcome(leader_id=self._options.own_id, listen_port=self._options.listen_port))
        member = MemberRecord(
            id=join.id,
            index=join.index,
            nproc=join.nproc,
            role=join.role,
            host=join.host,
            port=join.port,
            is_leader=connection.is_local,
            recovery_state=join.recovery_state,
            is_prepared=join.is_prepared,
            stop_limit_s=join.stop_limit_s,
        )
        self._outgoing.send_running_round(connection, self.state)
        self._apply(Joined(member=member))
        if not connection.is_local:
            self._start_sweep()

    # -- messages ---------------------------------------------------------------------------------------------------

    def on_message(self, link: Link, frame: Frame | Message) -> None:
        """See `LinkOwner`. A malformed message ends the connection."""
        connection = self._connections.find_link(link)
        known = {} if connection is None else {"id": connection.id, "suspicion_s": 0.0}
        try:
            message = MEMBER_MESSAGES.read(frame, **known)
        except MalformedMessageError as error:
            self._reject_malformed(link, str(error))
            return
        if connection is not None:
            self._handle_message(connection, message)
        elif isinstance(message, Join):
            self.admit(link, message)

    def _reject_malformed(self, link: Link, why: str) -> None:
        self._options.notify(f"disconnected {link.peer_host}: invalid message ({why})")
        self._disconnect(link, "disconnected after an invalid message")

    def _handle_message(self, connection: MemberConnection, message: MemberMessage | None) -> None:
        self._check_pause()
        if self._connections.find_link(connection.link) is not connection:
            return  # it was silent for too long while this process was stopped, and has just been removed
        connection.received_s = self._clock.boottime_s()
        if self._claims:
            self._settle_claim(connection)
        match message:
            case Heartbeat():
                self._reply_to_heartbeat(connection, message)
            case EndAcknowledged():
                self._outgoing.record_acknowledgement(connection.id)
            case Started():
                self._outgoing.send_rank0_started(message.round_number, connection.id, self.state)
            case Failed() if not self.state.failures:
                self._apply(replace(message, suspicion_s=self._compute_suspicion_s()))
            case Failed() | Idle() | Leaving() | Prepared() | RoundAcknowledged() | Stopped() | Succeeded():
                self._apply(message)
            case Join() | None:  # it has joined already; a message of a newer version
                return
            case _:
                assert_never(message)

    def _compute_suspicion_s(self) -> float:
        """How long until every member that may already be fenced has been removed.

        Fencing kills workers, so that workers of other nodes may fail first.

        A lease can end a heartbeat interval and a margin before the silence limit. A member that sent something
        recently still holds its lease.
        """
        now_s, silence_s = self._clock.boottime_s(), self._options.silence_s
        limit_s = (silence_s - find_margin_s(silence_s)) / 2
        remote = self._connections.list_remote()
        received_s = [connection.received_s for connection in remote if connection.id in self.state.assignments]
        return max((at_s + silence_s - now_s for at_s in received_s if now_s - at_s >= limit_s), default=0.0)

    def _reply_to_heartbeat(self, connection: MemberConnection, heartbeat: Heartbeat) -> None:
        now_s = self._clock.boottime_s()
        if heartbeat.echo_s is not None:
            # At most now: no member can have received a time stamp that was not sent yet.
            connection.echoed_s = max(connection.echoed_s, min(heartbeat.echo_s, now_s))
            if self.state.lacks_lease and self._retry_timer is None and not self._closed:
                self._retry_timer = self._loop.call_later(RETRY_S, self._retry_round)
        last = self.state.quorum_rounds[-1] if self.state.quorum_rounds else None
        ended = (last.round_number, last.ended) if last is not None and last.ended else None
        connection.link.send(HeartbeatReply(number=heartbeat.number, at_s=now_s, ended=ended))

    def _retry_round(self) -> None:
        self._retry_timer = None
        self._apply(Tick())

    def _settle_claim(self, connection: MemberConnection) -> None:
        claim = self._claims.get(connection.id)
        if claim is None or self._clock.boottime_s() < claim.since_s + DUPLICATE_S:
            return
        del self._claims[connection.id]
        taken = f"node rank {connection.index} is already taken by {connection.host}"
        reason = f"{taken}: every node needs its own --node-rank"
        claim.link.send(Rejected(reason=reason, usage=True))
        claim.link.close()

    def on_closed(self, link: Link, reason: str) -> None:
        """See `LinkOwner`."""
        self._remove_claim(link)
        connection = self._connections.find_link(link)
        if connection is not None:
            self._probe(connection, lambda: self._record_process_end(connection.id))
            self._remove_member(connection, reason)

    def _remove_claim(self, link: Link) -> None:
        for holder_id, claim in list(self._claims.items()):
            if claim.link is link:
                del self._claims[holder_id]

    def _record_process_end(self, member_id: str) -> None:
        self._apply(ProcessEnded(id=member_id))
        self._outgoing.record_acknowledgement(member_id)

    def _probe(self, connection: MemberConnection, on_ended: Callable[[], None]) -> None:
        """Connect to a member's own port: a refused connection proves that its process has ended."""
        if self._network is None or not connection.listen_port:
            return
        probes: list[Closing] = []

        def on_result(refused: bool) -> None:
            self._probes.difference_update(probes)
            if refused and not self._closed:
                on_ended()

        probes.append(self._network.probe(connection.link.peer_host, connection.listen_port, on_result))
        self._probes.update(probes)

    def _disconnect(self, link: Link, reason: str) -> None:
        """Close a link from this side. `Goodbye` tells the member that this process has not ended."""
        connection = self._connections.find_link(link)
        link.send(Goodbye(reason=reason))
        link.close()
        self._remove_claim(link)
        if connection is not None:
            self._remove_member(connection, reason)

    def _remove_member(self, connection: MemberConnection, reason: str) -> None:
        if not self._connections.remove(connection):
            return
        connection.link.close()
        self._apply(MemberLost(id=connection.id, reason=reason))
        claim = self._claims.pop(connection.id, None)
        if claim is not None and not self._closed:
            self.admit(claim.link, claim.join)

    # -- time -------------------------------------------------------------------------------------------------------

    def _start_sweep(self) -> None:
        if self._sweep_timer is None or self._sweep_timer.cancelled:
            self._sweep_timer = self._loop.call_later(self._options.silence_s, self._sweep_silent)

    def _sweep_silent(self) -> None:
        """Disconnect members that were silent for too long; run again when the next one could be."""
        now_s = self._clock.boottime_s()
        limit_s = self._options.silence_s
        for connection in [c for c in self._connections.list_remote() if now_s - c.received_s >= limit_s]:
            self._disconnect(connection.link, f"silent for {limit_s:g} s")
        oldest_s = min((connection.received_s for connection in self._connections.list_remote()), default=None)
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        if oldest_s is not None and not self._closed:
            self._sweep_timer = self._loop.call_later(max(0.02, oldest_s + limit_s - now_s), self._sweep_silent)

    def _check_pause(self) -> None:
        """After a pause of this process or its machine, remove silent members before anything is decided."""
        now_s = self._clock.boottime_s()
        paused_s, self._last_active_s = now_s - self._last_active_s, now_s
        if paused_s >= PAUSE_S:
            self._sweep_silent()

    def _on_due(self) -> None:
        self._check_pause()
        self._apply(Tick())

    def lease_until_s(self) -> float:
        """Until when no other leader can have taken over: the lease of the leader's own workers. CLOCK_BOOTTIME.

        Other members can take over without having seen this process end only with more than half of the round, and only
        when fewer than `min` are left. That is impossible while enough members have promised to stay with this leader.
        """
        lease_s = self._options.silence_s - find_margin_s(self._options.silence_s)
        # Until a round is committed, members that never received it act on earlier rounds, this leader's own included.
        last = self.state.quorum_rounds[-1:]
        quorum_rounds = [*(each for each in self.state.quorum_rounds[:-1] if each.has_missing()), *last]
        return min((self._find_echoed_s(each) for each in quorum_rounds), default=self._clock.boottime_s()) + lease_s

    def _find_echoed_s(self, quorum_round: QuorumRound) -> float:
        """When the oldest promise was made of those that are needed to rule out a takeover."""
        needed = find_quorum_size(quorum_round, self.state.rules.min_nodes) - (
            self._options.own_id in quorum_round.connected
        )
        if needed <= 0:
            return self._clock.boottime_s()
        promises = sorted(
            (r.echoed_s for r in self._connections.list_remote() if r.id in quorum_round.connected), reverse=True
        )
        return promises[needed - 1] if len(promises) >= needed else -FOREVER

    def _set_timer(self) -> None:
        due_s = next_due_s(self.state, self._clock.now_s())
        if self._due_timer is not None:
            if self._due_timer.due_s == due_s and not self._due_timer.cancelled:
                return
            self._due_timer.cancel()
            self._due_timer = None
        if due_s < FOREVER and not self._closed:
            self._due_timer = self._loop.call_at(due_s, self._on_due)

    # -- decisions --------------------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        if self._closed:
            return
        state = replace(self.state, lacks_lease=False) if self.state.lacks_lease else self.state
        now_s = self._clock.now_s()
        self.state, actions = decide(state, event, now_s)
        is_formed = any(isinstance(action, FormRound) for action in actions)
        if is_formed and self.lease_until_s() <= self._clock.boottime_s():
            # Members that are needed may be free to join another leader by now: this leader would have no lease.
            self.state, actions = decide(replace(state, lacks_lease=True), event, now_s)
        self._set_timer()
        for action in actions:
            if isinstance(action, DropMembers):
                self._drop_members(action)
            else:
                self._outgoing.send_action(action, self.state)

    def _drop_members(self, drop: DropMembers) -> None:
        for member_id in drop.ids:
            connection = self._connections.find(member_id)
            if connection is not None:
                self._disconnect(connection.link, drop.reason)

    def redirect(self, host: str, port: int) -> None:
        """Redirect every member to another leader, which knows a later round."""
        for connection in self._connections.list_remote():
            connection.link.send(Redirect(host=host, port=port))
        self.close()

    def close(self) -> None:
        """Close every link. Idempotent. Members see it as the end of this process, unless redirected before."""
        if self._closed:
            return
        self._closed = True
        for timer in (self._due_timer, self._sweep_timer, self._retry_timer):
            if timer is not None:
                timer.cancel()
        self._outgoing.close()
        for closing in (*self._probes, *(c.link for c in self._claims.values())):
            closing.close()
        self._connections.close_all()
