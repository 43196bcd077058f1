"""The leader: turns messages and lost connections into events for `decisions.decide`, and sends the actions.

It decides nothing about rounds itself. It adds identity and time: which member is on which link, which one has been
silent for too long, and when the lease of its own workers ends.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from muster._shared.codec import MalformedMessageError
from muster._shared.records import assert_never
from muster.agent.rendezvous.consensus.actions import (
    Action,
    CheckLease,
    DropMembers,
    Notify,
    Send,
    SetTimer,
)
from muster.agent.rendezvous.consensus.decisions import decide
from muster.agent.rendezvous.consensus.events import (
    Event,
    Joined,
    LeaseChecked,
    MemberLost,
    ProcessEnded,
    Reported,
    TimerFired,
)
from muster.agent.rendezvous.consensus.members import MemberRecord, find_margin_s
from muster.agent.rendezvous.consensus.state import FOREVER, Forming, JobState, build_initial_state
from muster.agent.rendezvous.consensus.waits import find_next_due_s
from muster.agent.rendezvous.faulty_nodes import describe_fault, find_fault
from muster.agent.rendezvous.interface import JobMembers, MemberStatus, Summary
from muster.agent.rendezvous.leader.connections import (
    LeaderOptions,
    MemberConnection,
    MemberConnections,
    OutgoingMessages,
    describe_newcomer,
    find_lease_limit_s,
)
from muster.agent.rendezvous.leader.newcomers import IndexClaims, PeerLines, refuse
from muster.agent.rendezvous.protocol.framing import Frame
from muster.agent.rendezvous.protocol.job_rules import describe_difference
from muster.agent.rendezvous.protocol.messages import (
    MEMBER_MESSAGES,
    EndAcknowledged,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Join,
    MemberMessage,
    Message,
    Redirect,
    Welcome,
)
from muster.agent.rendezvous.report_messages import Failed
from muster.agent.rendezvous.transport.addresses import is_loopback
from muster.agent.rendezvous.transport.links import Closing, Link, LinkEnd, LocalLink, Network
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
    """Detects that a member of one leader is lost. Close it with the leader.

    - Its connection closed: `record_closed`. This does not prove that its process has ended. Only a refused connection
      to the member's own port does: `probe`.
    - It sent nothing for the silence limit: `_sweep`. If the leader's own process may have been stopped (SIGSTOP, a
      suspended machine), silence is checked before anything else is decided: `check_pause`.

    `consensus.membership.on_member_lost` decides what follows. `consensus.membership.drop_stopping` also makes a member
    lost that takes too long to stop its workers. `member.seeking` is where a member detects the loss of its leader.
    """

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


def _describe_suspicion(state: JobState, member: MemberRecord) -> str:
    fault = find_fault(state, member)
    return "" if fault is None else describe_fault(fault)


def _find_outside(host: str) -> str:
    """Return the address, or "" for loopback: it is on this machine, which other nodes reach at another address."""
    return "" if is_loopback(host) else host


class Leader:
    """Leads until closed. From `admit` on it owns a link."""

    def __init__(self, loop: Loop, network: Network, options: LeaderOptions) -> None:
        self._loop = loop
        self._clock = loop.clock
        self._options = options
        self._connections = MemberConnections()
        self._outgoing = OutgoingMessages(loop, self._connections, options.silence_s)
        self._lines = PeerLines(options.notify)
        self._claims = IndexClaims(loop.clock, self._lines)
        self._losses = LossDetector(loop, network, self._connections, options.silence_s, self)
        self._timer: Timer | None = None
        self._summaries: dict[str, tuple[float, Summary]] = {}
        """The last summary of each member, and its arrival (CLOCK_BOOTTIME). It is for people; nothing is decided on
        it."""
        self._events: deque[Event] = deque()
        """Events to be decided; the first one is being decided."""
        self._closed = False
        self.state: JobState = build_initial_state(
            options.rules,
            loop.clock.now_s(),
            takeover=options.takeover,
            must_find_last_round=options.must_find_last_round,
        )
        self._set_timer(SetTimer(round_number=0, due_s=find_next_due_s(self.state, loop.clock.now_s())))

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
            refuse(link, f"its --rdzv-id is {run_id!r}, not {join.run_id[:80]!r}")
            return
        difference = describe_difference(join.rules, self._options.job_rules)
        if difference is not None:
            self._options.notify(f"refused {describe_newcomer(join)}: it was started with {difference}")
            refuse(link, f"this agent was started with {difference}", usage=True)
            return
        holder = None if join.index is None else self._connections.find_index(join.index)
        if holder is None or holder.id == join.id:
            self._add_member(link, join)
        elif holder.is_local and not self.state.has_formed_round:
            self._claims.refuse(holder, link, join)
        else:
            self._claims.add(holder, link, join)
            self._losses.probe(holder, lambda: self.record_loss(holder, "its process has ended"))

    def _add_member(self, link: Link, join: Join) -> None:
        old = self._connections.find(join.id)
        if old is not None:
            self.record_loss(old, "it reconnected")
        connection = MemberConnection(join, link, self._clock.boottime_s())
        self._connections.add(connection)
        link.trust()
        link.send(Welcome(leader_id=self._options.own_id, listen_port=self._options.listen_port))
        member = MemberRecord(
            id=join.id,
            index=join.index,
            nproc=join.nproc,
            role=join.role,
            host=connection.host,
            port=join.port,
            can_host_store=join.can_host_store,
            is_leader=connection.is_local,
            address=join.local_addr or _find_outside(link.peer_host),
            listen_port=self._options.listen_port if connection.is_local else join.listen_port,
            leader_address=_find_outside(link.local_host),
            recovery=join.recovery,
            group_ranks=join.group_ranks,
            highest_round=join.highest_round,
            last_leader_id=join.last_leader_id,
            is_prepared=join.is_prepared,
            stop_limit_s=join.stop_limit_s,
            offers=join.offers,
            saved=join.saved,
            machine=join.machine,
            machine_name=join.machine_name,
            segment=join.segment,
        )
        self._apply(Joined(member=member))
        if not connection.is_local:
            self._losses.start()

    # -- messages ---------------------------------------------------------------------------------------------------

    def on_message(self, link: Link, frame: Frame | Message) -> None:
        """See `LinkOwner`. A malformed message ends the connection."""
        connection = self._connections.find_link(link)
        try:
            message = MEMBER_MESSAGES.read(frame)
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
        self._losses.check_pause()
        if self._connections.find_link(connection.link) is not connection:
            return  # removed: silent while this process was stopped
        connection.received_s = self._clock.boottime_s()
        self._claims.record_message(connection)
        match message:
            case Heartbeat():
                self._reply_to_heartbeat(connection, message)
            case Summary():
                self._summaries[connection.id] = (connection.received_s, message)
            case EndAcknowledged():
                self._outgoing.record_acknowledgement(connection.id, message.peak_bytes)
            case Join() | None:  # repeated, or for another part of the agent
                return
            case _:
                is_first = isinstance(message, Failed) and not self.state.failures.seen
                is_assigned = self.state.assignments.__contains__
                suspicion_s = self._losses.compute_suspicion_s(is_assigned) if is_first else 0.0
                self._apply(Reported(id=connection.id, message=message, suspicion_s=suspicion_s))

    def _reply_to_heartbeat(self, connection: MemberConnection, heartbeat: Heartbeat) -> None:
        now_s = self._clock.boottime_s()
        if heartbeat.echo_s is not None:
            # At most now: no member can echo a later time stamp.
            connection.echoed_s = max(connection.echoed_s, min(heartbeat.echo_s, now_s))
        recovery = self.state.recovery
        is_known = heartbeat.recovery_version == recovery.value.version
        reply = HeartbeatReply(number=heartbeat.number, at_s=now_s, recovery=None if is_known else recovery)
        connection.link.send(reply)

    def on_closed(self, link: Link, end: LinkEnd) -> None:
        """See `LinkOwner`."""
        self._claims.remove(link)
        connection = self._connections.find_link(link)
        if connection is not None:
            self._losses.record_closed(connection, end.reason)

    # -- losses -----------------------------------------------------------------------------------------------------

    def record_process_end(self, member_id: str) -> None:
        """See `LossOwner`."""
        self._apply(ProcessEnded(id=member_id))
        self._outgoing.record_acknowledgement(member_id)

    def _disconnect(self, link: Link, reason: str) -> None:
        """Close a link from this side. `Goodbye` tells the member that this process has not ended."""
        connection = self._connections.find_link(link)
        link.send(Goodbye(reason=reason))
        link.close()
        self._claims.remove(link)
        if connection is not None:
            self.record_loss(connection, reason)

    def record_silence(self, connection: MemberConnection, reason: str) -> None:
        """See `LossOwner`."""
        self._disconnect(connection.link, reason)

    def record_loss(self, connection: MemberConnection, reason: str) -> None:
        """See `LossOwner`."""
        if not self._connections.remove(connection):
            return
        connection.link.close()
        self._summaries.pop(connection.id, None)
        self._apply(MemberLost(id=connection.id, reason=reason))
        claim = self._claims.pop(connection.id)
        if claim is not None and not self._closed:
            self.admit(claim.link, claim.join)

    def read_members(self) -> JobMembers:
        """Return what is known about the members."""
        now_s, found = self._clock.boottime_s(), []
        phase = self.state.phase
        stopping = phase.stopping if isinstance(phase, Forming) else ()
        for member in self.state.members.values():
            assignment = self.state.assignments.get(member.id)
            at_s, summary = self._summaries.get(member.id, (now_s, None))
            found.append(
                MemberStatus(
                    index=member.index,
                    host=member.host,
                    nproc=member.nproc,
                    group_rank=None if assignment is None else assignment.group_rank,
                    is_leader=member.is_leader,
                    is_stopping=member.id in stopping,
                    suspicion=_describe_suspicion(self.state, member),
                    summary=summary,
                    age_s=now_s - at_s,
                )
            )
        return JobMembers(members=tuple(found), max_nodes=self.state.rules.max_nodes, storm_s=self.find_storm_s())

    def find_storm_s(self) -> float:
        """Return how much longer the next round is held back after a storm of rounds; 0 if it is not."""
        return max(0.0, self.state.storm.wait_until_s - self._clock.now_s())

    def lease_until_s(self) -> float:
        """Return until when no other leader can have taken over (the lease of its own workers), by CLOCK_BOOTTIME."""
        return find_lease_limit_s(self.state.quorum_rounds, self._connections, self._options, self._clock.boottime_s())

    # -- decisions --------------------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        if self._closed:
            return
        self._events.append(event)
        if len(self._events) > 1:
            return  # from an action: finish the event before first
        while self._events:
            self.state, actions = decide(self.state, self._events[0], self._clock.now_s())
            for action in actions:
                self._act(action)
            self._events.popleft()

    def _act(self, action: Action) -> None:
        match action:
            case Send():
                self._outgoing.send(action)
            case Notify():
                self._options.notify(action.text, action.kind, action.ranks, action.feature)
            case CheckLease():
                limit_s = find_lease_limit_s(
                    action.quorum_rounds, self._connections, self._options, self._clock.boottime_s()
                )
                self._apply(LeaseChecked(is_held=limit_s > self._clock.boottime_s()))
            case SetTimer():
                self._set_timer(action)
            case DropMembers():
                self._drop_members(action)
            case _:
                assert_never(action)

    def _set_timer(self, timer: SetTimer) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if timer.due_s < FOREVER and not self._closed:
            self._timer = self._loop.call_at(timer.due_s, lambda: self._on_timer(timer.round_number))

    def _on_timer(self, round_number: int) -> None:
        self._losses.check_pause()
        self._apply(TimerFired(round_number=round_number))

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
        """Close every link.

        Idempotent. Members see this as the end of this process, unless they were redirected before.
        """
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._losses.close()
        self._outgoing.close()
        self._claims.close()
        self._connections.close_all()
