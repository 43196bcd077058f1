"""The leader: carries facts from links to `membership.advance`, and its outputs back to the members.

It decides nothing about rounds itself. What it adds is time and space: who is silent for too long, who is who, what
address a rank can be reached under, and that every member has the end before anybody leaves. Slightly longer than most:
all of it works on the one table of who is connected.
"""

from collections.abc import Callable
from typing import Any

from muster.agent.loop import Loop, Timer
from muster.agent.records import replace
from muster.agent.rendezvous.addresses import is_loopback
from muster.agent.rendezvous.contacts import Contact, Contender, LeaderOptions
from muster.agent.rendezvous.keepalive import find_margin_s
from muster.agent.rendezvous.letters import build_break, build_roster, build_rounds, read_event
from muster.agent.rendezvous.links import Closing, Link, LocalLink, Network
from muster.agent.rendezvous.membership import FOREVER, Phase, State, advance, next_due_s, start_state
from muster.agent.rendezvous.terms import (
    Break,
    Carry,
    End,
    Event,
    Failed,
    Form,
    GiveUp,
    Joined,
    Lost,
    Output,
    Peer,
    SawEnd,
    Settle,
    Tell,
    Tick,
)
from muster.agent.rendezvous.wire import Circular, Message

SUCCESSORS = 8
ACKNOWLEDGE_SILENCES = 3
"""How many silence limits the end waits for members that have not confirmed it. One that cannot be heard may come back
and must then find somebody who knows; else it would go on with others of its kind, and train what is trained."""
PAUSE_S = 1.0
"""Nothing done for this long: this process may have been stopped."""
DUPLICATE_S = 1.5
"""How long after a second node with the same index came the first must be heard again to be taken for alive."""


class Leader:
    """Leads until closed. Links are handed to it with their first message (`admit`); it owns them from then on."""

    def __init__(self, loop: Loop, network: Network | None, options: LeaderOptions) -> None:
        self._loop = loop
        self._clock = loop.clock
        self._network = network
        self._options = options
        self._contacts: dict[str, Contact] = {}
        self._by_link: dict[Link, Contact] = {}
        self._by_index: dict[int, Contact] = {}
        self._contenders: dict[str, Contender] = {}
        self._probes: set[Closing] = set()
        self._timer: Timer | None = None
        self._sweep: Timer | None = None
        self._awaiting: set[str] | None = None
        self._roster: tuple[Form, list[Any]] | None = None
        """The running round and its successors, for who comes late."""
        self._closed = False
        self._awake_s = loop.clock.boottime_s()
        self.state: State = start_state(options.rules, loop.clock.now_s(), takeover=options.takeover)
        self._set_timer()

    # -- links in ---------------------------------------------------------------------------------------------------

    def attach_local(self) -> LocalLink:
        """A link for the member of the leader's own node."""
        mine, theirs = LocalLink.pair(self._loop)
        mine.owner = self
        return theirs

    def admit(self, link: Link, message: Message) -> None:
        """Take a link whose first message was `join`."""
        link.owner = self
        run_id = self._options.rules.run_id
        if message.get("run_id") != run_id:
            link.send({"t": "reject", "reason": f"this is run {run_id!r}, not {str(message.get('run_id'))[:80]!r}"})
            link.close()
            return
        rival = self._find_rival(message)
        if rival is None:
            self._enrol(link, message)
        else:
            self._contend(rival, link, message)

    def _find_rival(self, message: Message) -> Contact | None:
        rival = None if message["index"] is None else self._by_index.get(int(message["index"]))
        return None if rival is None or rival.id == message["id"] else rival

    def _contend(self, rival: Contact, link: Link, message: Message) -> None:
        """Two nodes with one index: either the first is gone and we do not know it yet, or it is a mistake."""
        self._contenders[rival.id] = Contender(link=link, message=message, since_s=self._clock.boottime_s())
        self._probe(rival, lambda: self._lose(rival, "its process has ended"))

    def _enrol(self, link: Link, message: Message) -> None:
        now_s = self._clock.boottime_s()
        local = isinstance(link, LocalLink)
        peer = Peer(
            id=str(message["id"]),
            index=None if message["index"] is None else int(message["index"]),
            nproc=int(message["nproc"]),
            role=str(message["role"]),
            host=str(message["host"]),
            port=int(message["port"]),
            is_leader=local,
            carry=Carry.from_json(message["carry"]),
        )
        old = self._contacts.get(peer.id)
        if old is not None:
            self._lose(old, "it came back on another connection")
        contact = Contact(peer, link, message, now_s)
        self._contacts[peer.id] = contact
        self._by_link[link] = contact
        if contact.index is not None:
            self._by_index[contact.index] = contact
        link.send({"t": "welcome", "id": self._options.own_id, "listen": self._options.listen_port})
        self._feed(Joined(peer=peer))
        self._send_late_roster(contact)
        if not local:
            self._arm_sweep()

    def _send_late_roster(self, contact: Contact) -> None:
        """Who comes while a round runs must know of it: its next leader may not be where this one was found."""
        if self._roster is None or self.state.phase is not Phase.RUNNING or contact.id in self.state.seats:
            return
        form, successors = self._roster
        is_full = len(self.state.seats) >= self.state.rules.max_nodes
        contact.link.send({**build_roster(form, contact.id, successors), "spare": is_full})

    # -- links: what they say ---------------------------------------------------------------------------------------

    def on_message(self, link: Link, message: Message) -> None:
        """See `LinkOwner`. Whoever sends nonsense is dropped."""
        try:
            self._take(link, message)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._options.tell(f"dropped {link.peer_host}: a message made no sense ({type(error).__name__}: {error})")
            self._drop(link, "it sent a message that makes no sense")

    def _take(self, link: Link, message: Message) -> None:
        contact = self._by_link.get(link)
        if contact is None:
            if message["t"] == "join":
                self.admit(link, message)
            return
        self._notice_pause()
        if self._by_link.get(link) is not contact:
            return  # silent for too long while this process was stopped: given up, whatever it had sent
        contact.heard_s = self._clock.boottime_s()
        if self._contenders:
            self._settle_contest(contact)
        kind = message["t"]
        if kind == "beat":
            self._answer_beat(contact, message)
        elif kind == "ended":
            self._acknowledge(contact.id)
        else:
            event = read_event(contact.id, message)
            if isinstance(event, Failed) and not self.state.failures:
                event = replace(event, excuse_s=self._find_excuse_s())
            if event is not None:
                self._feed(event)

    def _find_excuse_s(self) -> float:
        """How long until those are given up who may have been fenced by now, and whose peers fail because of it.

        A lease can end an interval and a margin before the silence limit; who was heard lately still holds his.
        """
        now_s, silence_s = self._clock.boottime_s(), self._options.silence_s
        limit_s = (silence_s - find_margin_s(silence_s)) / 2
        heard_s = [contact.heard_s for contact in self._remote() if contact.id in self.state.seats]
        return max((at_s + silence_s - now_s for at_s in heard_s if now_s - at_s >= limit_s), default=0.0)

    def _answer_beat(self, contact: Contact, message: Message) -> None:
        if message["echo"] is not None:
            contact.promise_s = max(contact.promise_s, float(message["echo"]))
        answer: Message = {"t": "beat", "n": message["n"], "at": self._clock.boottime_s()}
        bases = self.state.bases
        if bases and bases[-1].ended:
            answer["ended"] = [bases[-1].number, sorted(bases[-1].ended)]
        contact.link.send(answer)

    def _settle_contest(self, contact: Contact) -> None:
        contender = self._contenders.get(contact.id)
        if contender is None or self._clock.boottime_s() < contender.since_s + DUPLICATE_S:
            return
        del self._contenders[contact.id]
        reason = f"node rank {contact.index} is already taken by {contact.host}: every node needs its own --node-rank"
        contender.link.send({"t": "reject", "reason": reason, "usage": True})
        contender.link.close()

    def on_closed(self, link: Link, reason: str) -> None:
        """See `LinkOwner`."""
        for rival_id, contender in list(self._contenders.items()):
            if contender.link is link:
                del self._contenders[rival_id]
        contact = self._by_link.get(link)
        if contact is not None:
            self._probe(contact, lambda: self._note_end(contact.id))
            self._lose(contact, reason)

    def _note_end(self, member_id: str) -> None:
        self._feed(SawEnd(id=member_id))
        self._acknowledge(member_id)

    def _probe(self, contact: Contact, on_ended: Callable[[], None]) -> None:
        """Dial a member at once: a refusal is the proof that its process has ended."""
        if self._network is None or not contact.listen_port:
            return
        probes: list[Closing] = []

        def on_result(refused: bool) -> None:
            self._probes.difference_update(probes)
            if refused and not self._closed:
                on_ended()

        probes.append(self._network.probe(contact.link.peer_host, contact.listen_port, on_result))
        self._probes.update(probes)

    def _drop(self, link: Link, reason: str) -> None:
        """Close a link ourselves. `bye` tells the member that this is not our process's end."""
        contact = self._by_link.get(link)
        link.send({"t": "bye", "reason": reason})
        link.close()
        if contact is not None:
            self._lose(contact, reason)

    def _lose(self, contact: Contact, reason: str) -> None:
        if self._contacts.get(contact.id) is not contact:
            return
        del self._contacts[contact.id]
        del self._by_link[contact.link]
        if contact.index is not None and self._by_index.get(contact.index) is contact:
            del self._by_index[contact.index]
        contact.link.close()
        self._feed(Lost(id=contact.id, reason=reason))
        contender = self._contenders.pop(contact.id, None)
        if contender is not None and not self._closed:
            self.admit(contender.link, contender.message)

    # -- time -------------------------------------------------------------------------------------------------------

    def _arm_sweep(self) -> None:
        if self._sweep is None or self._sweep.cancelled:
            self._sweep = self._loop.call_later(self._options.silence_s, self._sweep_silent)

    def _sweep_silent(self) -> None:
        """Drop who was silent for too long; come again when the next one could be."""
        now_s = self._clock.boottime_s()
        limit_s = self._options.silence_s
        for contact in [r for r in self._remote() if now_s - r.heard_s >= limit_s]:
            self._drop(contact.link, f"silent for {limit_s:g} s")
        oldest_s = min((contact.heard_s for contact in self._remote()), default=None)
        if self._sweep is not None:
            self._sweep.cancel()
        if oldest_s is not None and not self._closed:
            self._sweep = self._loop.call_later(max(0.02, oldest_s + limit_s - now_s), self._sweep_silent)

    def _notice_pause(self) -> None:
        """After a stop of this process or its machine, find out who is still with us before anything is decided."""
        now_s = self._clock.boottime_s()
        paused_s, self._awake_s = now_s - self._awake_s, now_s
        if paused_s >= PAUSE_S:
            self._sweep_silent()

    def _on_due(self) -> None:
        self._notice_pause()
        self._feed(Tick())

    def _remote(self) -> list[Contact]:
        return [contact for contact in self._contacts.values() if not isinstance(contact.link, LocalLink)]

    def lease_until_s(self) -> float:
        """Until when nobody can have taken over: what the leader's own workers may live until. CLOCK_BOOTTIME.

        Others can take over without having seen this process end only with more than half of the round, and only when
        fewer than `min` are left. As long as enough members have promised to stay, that cannot be.
        """
        now_s = self._clock.boottime_s()
        lease_s = self._options.silence_s - find_margin_s(self._options.silence_s)
        base = self.state.bases[-1] if self.state.bases else None
        if base is None:
            return now_s + lease_s
        needed = min(self.state.rules.min_nodes, (base.size - len(base.ended) + 1) // 2) - 1
        promises = sorted((r.promise_s for r in self._remote() if r.id in base.held), reverse=True)
        if needed <= 0:
            return now_s + lease_s
        if len(promises) < needed:
            return -FOREVER
        return promises[needed - 1] + lease_s

    def _set_timer(self) -> None:
        due_s = next_due_s(self.state, self._clock.now_s())
        if self._timer is not None:
            if self._timer.due_s == due_s and not self._timer.cancelled:
                return
            self._timer.cancel()
            self._timer = None
        if due_s < FOREVER and not self._closed:
            self._timer = self._loop.call_at(due_s, self._on_due)

    # -- decisions out ----------------------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        if self._closed:
            return
        self.state, outputs = advance(self.state, event, self._clock.now_s())
        self._set_timer()
        for output in outputs:
            self._carry_out(output)

    def _carry_out(self, output: Output) -> None:
        if isinstance(output, Form):
            self._send_round(output)
        elif isinstance(output, Break):
            self._send(output.ids, build_break(output))
        elif isinstance(output, Settle):
            self._send(tuple(self.state.seats), {"t": "settled", "round": output.number})
        elif isinstance(output, End):
            self._send_end(output)
        elif isinstance(output, GiveUp):
            self._send(tuple(self._contacts), {"t": "give_up", "reason": output.reason})
        elif isinstance(output, Tell):
            self._options.tell(output.text)

    def _send(self, ids: tuple[str, ...], message: Message) -> None:
        copy = Circular(message).address()
        for member_id in ids:
            contact = self._contacts.get(member_id)
            if contact is not None:
                contact.link.send(copy)

    def _send_round(self, form: Form) -> None:
        contacts = [self._contacts[seat.id] for seat in form.seats]
        own_host = self._own_host()
        hosts = [self._host_of(contact, own_host) for contact in contacts]
        successors: list[Any] = [
            [seat.group_rank, seat.index, host, contact.listen_port]
            for seat, host, contact in zip(form.seats, hosts, contacts, strict=True)
            if not isinstance(contact.link, LocalLink)
        ][:SUCCESSORS]
        for contact, message in zip(contacts, build_rounds(form, hosts[0], successors), strict=True):
            contact.link.send(message)
        self._roster = (form, successors)
        for spare_id in [member_id for member_id in self._contacts if member_id not in self.state.seats]:
            self._send((spare_id,), {**build_roster(form, spare_id, successors), "spare": True})

    def _own_host(self) -> str:
        """This node's address as the others see it; loopback when all are on this machine."""
        if self._options.local_addr:
            return self._options.local_addr
        seen = (contact.link.local_host for contact in self._remote())
        return next((host for host in seen if not is_loopback(host)), "127.0.0.1")

    def _host_of(self, contact: Contact, own_host: str) -> str:
        if contact.local_addr:
            return contact.local_addr
        peer = contact.link.peer_host
        # Seen through loopback it is on this machine, and the others know this machine by another address.
        return own_host if not peer or is_loopback(peer) else peer

    # -- the end ----------------------------------------------------------------------------------------------------

    def _send_end(self, end: End) -> None:
        report = None if end.report is None else end.report.to_json()
        circular = Circular({"t": "end", "succeeded": end.succeeded, "report": report})
        for member_id in end.ids:
            contact = self._contacts.get(member_id)
            if contact is not None:
                contact.link.send(circular.address(prints=member_id == end.printer))
        if self._awaiting is None:
            self._awaiting = set(end.ids)
            self._loop.call_later(ACKNOWLEDGE_SILENCES * self._options.silence_s, self._send_exit)
        elif not self._awaiting:
            self._send(end.ids, {"t": "exit"})  # the others have left already

    def _acknowledge(self, member_id: str) -> None:
        if self._awaiting is None or member_id not in self._awaiting:
            return
        self._awaiting.discard(member_id)
        if not self._awaiting:
            self._send_exit()

    def _send_exit(self) -> None:
        """All have the end, or had their time: everybody leaves now, so that no exit code comes long before others."""
        if not self._closed:
            self._awaiting = set()
            self._send(tuple(self._contacts), {"t": "exit"})

    def redirect(self, host: str, port: int) -> None:
        """Send every member to another leader, which knows a later round."""
        for contact in self._remote():
            contact.link.send({"t": "redirect", "host": host, "port": port})
        self.close()

    def close(self) -> None:
        """Release every link. Idempotent. To the members it looks as if this process ended, unless told before."""
        if self._closed:
            return
        self._closed = True
        for timer in (self._timer, self._sweep):
            if timer is not None:
                timer.cancel()
        for closing in (*self._probes, *(c.link for c in self._contenders.values())):
            closing.close()
        for contact in self._contacts.values():
            contact.link.close()
        self._contacts.clear()
        self._by_link.clear()
        self._by_index.clear()
