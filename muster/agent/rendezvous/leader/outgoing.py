"""What goes out to the members: the outputs of `membership.advance` as letters, to whoever is connected.

Where a rank can be reached is found out here, and that every member has the end before anybody leaves.
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
"""How many silence limits the end waits for members that have not confirmed it. One that cannot be heard may come back
and must then find somebody who knows; else it would go on with others of its kind, and train what is trained."""


class OutgoingMessages:
    """One leader's outgoing post. Close it with the leader."""

    def __init__(self, loop: Loop, contacts: MemberConnections, options: LeaderOptions) -> None:
        self._loop = loop
        self._contacts = contacts
        self._options = options
        self._roster: tuple[FormRound, tuple[Successor, ...]] | None = None
        """The running round and its successors, for who comes late."""
        self._awaiting: set[str] | None = None
        self._end_timer: Timer | None = None

    def carry_out(self, output: Action, state: JobState) -> None:
        """Send what `advance` made, in the state that it left."""
        if isinstance(output, FormRound):
            self._send_round(output, state)
        elif isinstance(output, BreakRound):
            self._send(output.ids, build_round_break(output))
        elif isinstance(output, CommitRound):
            self._send(tuple(state.seats), build_round_committed(output.number))
        elif isinstance(output, EndJob):
            self._send_end(output)
        elif isinstance(output, FailRendezvous):
            self._send(self._contacts.list_ids(), build_rendezvous_failure(output.reason))
        elif isinstance(output, Notify):
            self._options.tell(output.text)

    def _send(self, ids: tuple[str, ...], message: Message) -> None:
        copy = Broadcast(message).address()
        for member_id in ids:
            contact = self._contacts.find(member_id)
            if contact is not None:
                contact.link.send(copy)

    # -- rounds -----------------------------------------------------------------------------------------------------

    def _send_round(self, form: FormRound, state: JobState) -> None:
        found = [self._contacts.find(seat.id) for seat in form.seats]
        contacts = [contact for contact in found if contact is not None]  # all of them: `advance` was told who left
        own_host = self._own_host()
        hosts = [self._host_of(contact, own_host) for contact in contacts]
        successors = tuple(
            Successor(group_rank=seat.group_rank, index=seat.index, host=host, port=contact.listen_port)
            for seat, host, contact in zip(form.seats, hosts, contacts, strict=True)
            if not contact.is_local
        )[:SUCCESSORS]
        for contact, message in zip(contacts, build_round_starts(form, hosts[0], successors), strict=True):
            contact.link.send(message)
        self._roster = (form, successors)
        is_full = len(state.seats) >= state.rules.max_nodes
        for spare_id in [member_id for member_id in self._contacts.list_ids() if member_id not in state.seats]:
            self._send((spare_id,), build_round_summary(form, spare_id, successors, is_spare=is_full))

    def open_round(self, number: int, member_id: str, state: JobState) -> None:
        """A member has started its workers: when it has global rank 0, the others may start theirs."""
        seat = state.seats.get(member_id)
        if seat is None or seat.group_rank != 0 or number != state.round or state.phase is not JobPhase.RUNNING:
            return
        self._send(tuple(other for other in state.seats if other != member_id), build_rank0_started(number))

    def send_late_roster(self, contact: MemberConnection, state: JobState) -> None:
        """Who comes while a round runs must know of it: its next leader may not be where this one was found."""
        if self._roster is None or state.phase is not JobPhase.RUNNING or contact.id in state.seats:
            return
        form, successors = self._roster
        is_full = len(state.seats) >= state.rules.max_nodes
        contact.link.send(build_round_summary(form, contact.id, successors, is_spare=is_full))

    def _own_host(self) -> str:
        """This node's address as the others see it; loopback when all are on this machine."""
        if self._options.local_addr:
            return self._options.local_addr
        seen = (contact.link.local_host for contact in self._contacts.list_remote())
        return next((host for host in seen if not is_loopback(host)), "127.0.0.1")

    def _host_of(self, contact: MemberConnection, own_host: str) -> str:
        if contact.local_addr:
            return contact.local_addr
        peer = contact.link.peer_host
        # Seen through loopback it is on this machine, and the others know this machine by another address.
        return own_host if not peer or is_loopback(peer) else peer

    # -- the end ----------------------------------------------------------------------------------------------------

    def _send_end(self, end: EndJob) -> None:
        circular = build_job_end(succeeded=end.succeeded, report=end.report)
        for member_id in end.ids:
            contact = self._contacts.find(member_id)
            if contact is not None:
                contact.link.send(circular.address(prints=member_id == end.printer))
        if self._awaiting is None:
            self._awaiting = set(end.ids)
            limit_s = ACKNOWLEDGE_SILENCES * self._options.silence_s
            self._end_timer = self._loop.call_later(limit_s, self._send_exit)
        elif not self._awaiting:
            self._send(end.ids, build_exit())  # the others have left already

    def acknowledge(self, member_id: str) -> None:
        """A member has the end, or its process has ended."""
        if self._awaiting is None or member_id not in self._awaiting:
            return
        self._awaiting.discard(member_id)
        if not self._awaiting:
            self._send_exit()

    def _send_exit(self) -> None:
        """All have the end, or had their time: everybody leaves now, so that no exit code comes long before others."""
        self._awaiting = set()
        self._send(self._contacts.list_ids(), build_exit())

    def close(self) -> None:
        """Nothing is sent any more. Idempotent."""
        if self._end_timer is not None:
            self._end_timer.cancel()
