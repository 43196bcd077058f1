"""Sending to the members: the actions of `decisions.decide` as messages to the members that are connected.

This module also finds the address of each rank, and lets no member exit before all have acknowledged the job's end.
"""

from muster.agent.rendezvous.consensus.actions import (
    Action,
    BreakRound,
    CommitRound,
    EndJob,
    FailRendezvous,
    FormRound,
    Notify,
)
from muster.agent.rendezvous.consensus.state import JobPhase, JobState
from muster.agent.rendezvous.leader.connections import LeaderOptions, MemberConnection, MemberConnections
from muster.agent.rendezvous.protocol.framing import Broadcast, Message
from muster.agent.rendezvous.protocol.leader_messages import (
    Successor,
    build_exit,
    build_job_end,
    build_rank0_started,
    build_rendezvous_failure,
    build_round_break,
    build_round_committed,
    build_round_starts,
    build_round_summary,
)
from muster.agent.rendezvous.transport.addresses import is_loopback
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
        self._running_round: tuple[FormRound, tuple[Successor, ...]] | None = None
        """The running round and its successors, for members that join late."""
        self._unacknowledged: set[str] | None = None
        self._end_timer: Timer | None = None

    def send_action(self, action: Action, state: JobState) -> None:
        """Send one action. `state` is the state that `decide` returned with it."""
        if isinstance(action, FormRound):
            self._send_round(action, state)
        elif isinstance(action, BreakRound):
            self._send(action.ids, build_round_break(action))
        elif isinstance(action, CommitRound):
            self._send(tuple(state.assignments), build_round_committed(action.round_number))
        elif isinstance(action, EndJob):
            self._send_end(action)
        elif isinstance(action, FailRendezvous):
            self._send(self._connections.list_ids(), build_rendezvous_failure(action.reason))
        elif isinstance(action, Notify):
            self._options.notify(action.text)

    def _send(self, ids: tuple[str, ...], message: Message) -> None:
        copy = Broadcast(message).build_copy()
        for member_id in ids:
            connection = self._connections.find(member_id)
            if connection is not None:
                connection.link.send(copy)

    # -- rounds -----------------------------------------------------------------------------------------------------

    def _send_round(self, form: FormRound, state: JobState) -> None:
        found = [self._connections.find(assignment.id) for assignment in form.assignments]
        connections = [each for each in found if each is not None]  # all of them: a lost member gets no assignment
        own_host = self._find_own_host()
        hosts = [self._find_host(connection, own_host) for connection in connections]
        successors = tuple(
            Successor(group_rank=assignment.group_rank, index=assignment.index, host=host, port=connection.listen_port)
            for assignment, host, connection in zip(form.assignments, hosts, connections, strict=True)
            if not connection.is_local
        )[:SUCCESSORS]
        for connection, message in zip(connections, build_round_starts(form, hosts[0], successors), strict=True):
            connection.link.send(message)
        self._running_round = (form, successors)
        is_full = len(state.assignments) >= state.rules.max_nodes
        for spare_id in [each for each in self._connections.list_ids() if each not in state.assignments]:
            self._send((spare_id,), build_round_summary(form, spare_id, successors, is_spare=is_full))

    def send_rank0_started(self, round_number: int, member_id: str, state: JobState) -> None:
        """A member has started its workers. When it has global rank 0, the other members may start theirs."""
        assignment = state.assignments.get(member_id)
        if assignment is None or assignment.group_rank != 0:
            return
        if round_number != state.round_number or state.phase is not JobPhase.RUNNING:
            return
        self._send(tuple(other for other in state.assignments if other != member_id), build_rank0_started(round_number))

    def send_running_round(self, connection: MemberConnection, state: JobState) -> None:
        """Send the running round to a member that joins during it: it needs the successors to find the next leader."""
        if self._running_round is None or state.phase is not JobPhase.RUNNING or connection.id in state.assignments:
            return
        form, successors = self._running_round
        is_full = len(state.assignments) >= state.rules.max_nodes
        connection.link.send(build_round_summary(form, connection.id, successors, is_spare=is_full))

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

    def _send_end(self, end: EndJob) -> None:
        broadcast = build_job_end(succeeded=end.succeeded, report=end.report)
        for member_id in end.ids:
            connection = self._connections.find(member_id)
            if connection is not None:
                connection.link.send(broadcast.build_copy(prints_report=member_id == end.printer_id))
        if self._unacknowledged is None:
            self._unacknowledged = set(end.ids)
            limit_s = ACKNOWLEDGE_SILENCES * self._options.silence_s
            self._end_timer = self._loop.call_later(limit_s, self._send_exit)
        elif not self._unacknowledged:
            self._send(end.ids, build_exit())  # the other members have exited already

    def record_acknowledgement(self, member_id: str) -> None:
        """Record that a member has acknowledged the end, or that its process has ended."""
        if self._unacknowledged is None or member_id not in self._unacknowledged:
            return
        self._unacknowledged.discard(member_id)
        if not self._unacknowledged:
            self._send_exit()

    def _send_exit(self) -> None:
        """Let all members exit together, when all have acknowledged the end or the limit has passed."""
        self._unacknowledged = set()
        self._send(self._connections.list_ids(), build_exit())

    def close(self) -> None:
        """Stop the timer. Idempotent."""
        if self._end_timer is not None:
            self._end_timer.cancel()
