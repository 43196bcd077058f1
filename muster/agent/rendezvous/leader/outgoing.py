"""Sending to the members: the messages of `decisions.decide`, and each round with the addresses of its ranks.

It also lets no member exit before all have acknowledged the job's end.
"""

from muster._shared.fields import Shared
from muster.agent.rendezvous.consensus.actions import FormRound, JobEnd, Send
from muster.agent.rendezvous.consensus.quorum import RecoveredRound
from muster.agent.rendezvous.consensus.state import JobState, RoundRunning
from muster.agent.rendezvous.leader.connections import LeaderOptions, MemberConnection, MemberConnections
from muster.agent.rendezvous.protocol.leader_messages import (
    Exit,
    LeaderMessage,
    RoundFacts,
    RoundStart,
    RoundSummary,
    Successor,
)
from muster.agent.rendezvous.transport.addresses import is_loopback
from muster.agent.round import Checkpoint
from muster.agent.runtime.loop import Loop, Timer

SUCCESSORS = 8
ACKNOWLEDGE_SILENCES = 3
"""How many silence limits the end waits for members that have not acknowledged it. An unreachable member may come back
and must then find a node that knows the end; otherwise it would continue with others and repeat finished work."""


class OutgoingMessages:
    """One leader's outgoing messages. Close it with the leader."""

    def __init__(self, loop: Loop, connections: MemberConnections, options: LeaderOptions) -> None:
        self._loop = loop
        self._connections = connections
        self._options = options
        self._running_round: tuple[FormRound, Shared[RoundFacts]] | None = None
        """The running round, for members that join late."""
        self._unacknowledged: set[str] | None = None
        self._peak_bytes = 0
        self._end_timer: Timer | None = None

    def send(self, send: Send) -> None:
        """Send a message to those of its recipients that are connected."""
        self._send(send.ids, send.message)
        if isinstance(send.message, JobEnd):
            self._await_acknowledgements(send.ids)

    def _send(self, ids: tuple[str, ...], message: LeaderMessage) -> None:
        for member_id in ids:
            connection = self._connections.find(member_id)
            if connection is not None:
                connection.link.send(message)

    # -- rounds -----------------------------------------------------------------------------------------------------

    def send_round(self, form: FormRound, state: JobState) -> None:
        """Send each member of a new round its ranks, and all others what they must know of it."""
        found = [self._connections.find(assignment.id) for assignment in form.assignments]
        connections = [each for each in found if each is not None]  # all of them: a lost member gets no assignment
        own_host = self._find_own_host()
        hosts = [self._find_host(connection, own_host) for connection in connections]
        successors = tuple(
            Successor(group_rank=assignment.group_rank, index=assignment.index, host=host, port=connection.listen_port)
            for assignment, host, connection in zip(form.assignments, hosts, connections, strict=True)
            if not connection.is_local
        )[:SUCCESSORS]
        facts = Shared(_build_facts(form, hosts[0], successors, state.checkpoint))
        for connection, assignment in zip(connections, form.assignments, strict=True):
            connection.link.send(
                RoundStart(
                    facts=facts,
                    quorum_rounds=_list_recovered_rounds(form, assignment.id),
                    group_rank=assignment.group_rank,
                    rank_offset=assignment.rank_offset,
                    role_rank_offset=assignment.role_rank_offset,
                    role_world_size=assignment.role_world_size,
                )
            )
        self._running_round = (form, facts)
        for spare_id in [each for each in self._connections.list_ids() if each not in state.assignments]:
            self._send((spare_id,), _build_round_summary(form, facts, spare_id, state))

    def send_running_round(self, connection: MemberConnection, state: JobState) -> None:
        """Send the running round to a member that joins during it: it needs the successors to find the next leader."""
        if (
            self._running_round is None
            or not isinstance(state.phase, RoundRunning)
            or connection.id in state.assignments
        ):
            return
        connection.link.send(_build_round_summary(*self._running_round, connection.id, state))

    def _find_own_host(self) -> str:
        """This node's address as the other nodes see it; loopback when all are on this machine."""
        if self._options.local_addr:
            return self._options.local_addr
        seen = (connection.link.local_host for connection in self._connections.list_remote())
        return next((host for host in seen if not is_loopback(host)), "127.0.0.1")

    def _find_host(self, connection: MemberConnection, own_host: str) -> str:
        if connection.local_addr:
            return connection.local_addr
        peer_host = connection.link.peer_host
        # Connected through loopback, it is on this machine, which other nodes reach at another address.
        return own_host if not peer_host or is_loopback(peer_host) else peer_host

    # -- the end ----------------------------------------------------------------------------------------------------

    def _await_acknowledgements(self, ids: tuple[str, ...]) -> None:
        if self._unacknowledged is None:
            self._unacknowledged = set(ids)
            limit_s = ACKNOWLEDGE_SILENCES * self._options.silence_s
            self._end_timer = self._loop.call_later(limit_s, self._send_exit)
        elif not self._unacknowledged:
            self._send(ids, Exit(peak_bytes=self._peak_bytes))  # the other members have exited already

    def record_acknowledgement(self, member_id: str, peak_bytes: int = 0) -> None:
        """Record that a member has acknowledged the end, or that its process has ended.

        Args:
            member_id: the member.
            peak_bytes: the peak memory of its largest worker; 0: not known.
        """
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        if self._unacknowledged is None or member_id not in self._unacknowledged:
            return
        self._unacknowledged.discard(member_id)
        if not self._unacknowledged:
            self._send_exit()

    def _send_exit(self) -> None:
        """Let all members exit together, when all have acknowledged the end or the limit has passed."""
        self._unacknowledged = set()
        self._send(self._connections.list_ids(), Exit(peak_bytes=self._peak_bytes))

    def close(self) -> None:
        """Stop the timer. Idempotent."""
        if self._end_timer is not None:
            self._end_timer.cancel()


def _build_facts(
    form: FormRound, master_addr: str, successors: tuple[Successor, ...], checkpoint: Checkpoint | None
) -> RoundFacts:
    return RoundFacts(
        round_number=form.round_number,
        attempt=form.attempt,
        startup_signature=form.startup_signature,
        successors=successors,
        restarts_left=form.restarts_left,
        group_world_size=len(form.assignments),
        world_size=form.world_size,
        master_addr=master_addr,
        master_port=form.master_port,
        use_agent_store=form.use_agent_store,
        checkpoint=checkpoint,
    )


def _build_round_summary(form: FormRound, facts: Shared[RoundFacts], member_id: str, state: JobState) -> RoundSummary:
    return RoundSummary(
        facts=facts,
        quorum_rounds=_list_recovered_rounds(form, member_id),
        is_spare=len(state.assignments) >= state.rules.max_nodes,
    )


def _list_recovered_rounds(form: FormRound, member_id: str) -> tuple[RecoveredRound, ...]:
    return tuple(each.build_recovered(member_id) for each in form.quorum_rounds)
