"""The leader: carries facts from links to `membership.decide`, and its outputs back to the members (`dispatch`).

It decides nothing about rounds itself. What it adds is who is who, and time: who is silent for too long, and until when
its own workers may live.
"""

from collections.abc import Callable

from muster.agent.rendezvous.consensus.actions import FormRound
from muster.agent.rendezvous.consensus.decisions import decide, next_due_s
from muster.agent.rendezvous.consensus.events import Event, Failed, Joined, MemberLost, ProcessEnded, Tick
from muster.agent.rendezvous.consensus.members import MemberRecord
from muster.agent.rendezvous.consensus.quorum import QuorumBase, count_votes
from muster.agent.rendezvous.consensus.state import FOREVER, JobState, build_initial_state
from muster.agent.rendezvous.consensus.timing import find_margin_s
from muster.agent.rendezvous.leader.connections import (
    IndexClaim,
    LeaderOptions,
    MemberConnection,
    MemberConnections,
    name_newcomer,
)
from muster.agent.rendezvous.leader.outgoing import OutgoingMessages
from muster.agent.rendezvous.protocol.fields import MalformedMessageError
from muster.agent.rendezvous.protocol.framing import Message
from muster.agent.rendezvous.protocol.job_rules import describe_difference
from muster.agent.rendezvous.protocol.leader_messages import (
    HeartbeatReply,
    build_goodbye,
    build_heartbeat_reply,
    build_redirect,
    build_rejection,
    build_welcome,
)
from muster.agent.rendezvous.protocol.member_messages import (
    EndAcknowledged,
    Heartbeat,
    Join,
    MemberMessage,
    Started,
    read_member_message,
)
from muster.agent.rendezvous.transport.links import Closing, Link, LocalLink, Network
from muster.agent.runtime.loop import Loop, Timer
from muster.agent.runtime.records import replace

MOST_ROUNDS = 1 << 40
"""No job has so many. Numbers only go up, so that one which is far too high could never be taken back."""
PAUSE_S = 1.0
"""Nothing done for this long: this process may have been stopped."""
RETRY_S = 0.05
"""How soon a round is tried again that the promises did not carry: not with each of thousands of heartbeats."""
DUPLICATE_S = 1.5
"""How long after a second node with the same index came the first must be heard again to be taken for alive."""


class Leader:
    """Leads until closed. Links are handed to it with their first letter (`admit`); it owns them from then on."""

    def __init__(self, loop: Loop, network: Network | None, options: LeaderOptions) -> None:
        self._loop = loop
        self._clock = loop.clock
        self._network = network
        self._options = options
        self._contacts = MemberConnections()
        self._dispatch = OutgoingMessages(loop, self._contacts, options)
        self._contenders: dict[str, IndexClaim] = {}
        """By the id of the member whose index they claim."""
        self._probes: set[Closing] = set()
        self._timer: Timer | None = None
        self._sweep: Timer | None = None
        self._retry: Timer | None = None
        self._closed = False
        self._awake_s = loop.clock.boottime_s()
        self.state: JobState = build_initial_state(options.rules, loop.clock.now_s(), takeover=options.takeover)
        self._set_timer()

    # -- links in ---------------------------------------------------------------------------------------------------

    def attach_local(self) -> LocalLink:
        """A link for the member of the leader's own node."""
        mine, theirs = LocalLink.pair(self._loop)
        mine.owner = self
        return theirs

    def admit(self, link: Link, join: Join) -> None:
        """Take a link whose first letter was `join`."""
        link.owner = self
        run_id = self._options.rules.run_id
        if join.run_id != run_id:
            link.send(build_rejection(f"this is run {run_id!r}, not {join.run_id[:80]!r}"))
            link.close()
            return
        if join.carry.round > MOST_ROUNDS and not isinstance(link, LocalLink):
            self._refuse(link, f"it speaks of round {join.carry.round}")
            return
        difference = describe_difference(join.rules, self._options.job_rules)
        if difference is not None:
            self._options.tell(f"refused {name_newcomer(join)}: it was started with {difference}")
            link.send(build_rejection(f"this agent was started with {difference}", usage=True))
            link.close()
            return
        rival = None if join.index is None else self._contacts.find_index(join.index)
        if rival is None or rival.id == join.id:
            self._enrol(link, join)
        else:
            self._contend(rival, link, join)

    def _contend(self, rival: MemberConnection, link: Link, join: Join) -> None:
        """Two nodes with one index: either the first is gone and we do not know it yet, or it is a mistake."""
        self._contenders[rival.id] = IndexClaim(link=link, join=join, since_s=self._clock.boottime_s())
        self._probe(rival, lambda: self._lose(rival, "its process has ended"))

    def _enrol(self, link: Link, join: Join) -> None:
        old = self._contacts.find(join.id)
        if old is not None:
            self._lose(old, "it came back on another connection")
        contact = MemberConnection(join, link, self._clock.boottime_s())
        self._contacts.add(contact)
        link.send(build_welcome(self._options.own_id, self._options.listen_port))
        peer = MemberRecord(
            id=join.id,
            index=join.index,
            nproc=join.nproc,
            role=join.role,
            host=join.host,
            port=join.port,
            is_leader=contact.is_local,
            carry=join.carry,
            is_prepared=join.is_prepared,
        )
        self._dispatch.send_late_roster(contact, self.state)
        self._feed(Joined(peer=peer))
        if not contact.is_local:
            self._arm_sweep()

    # -- links: what they say ---------------------------------------------------------------------------------------

    def on_message(self, link: Link, message: Message) -> None:
        """See `LinkOwner`. Whoever sends nonsense is dropped; what our own node sends is a bug of ours."""
        contact = self._contacts.find_link(link)
        try:
            word = read_member_message("" if contact is None else contact.id, message)
        except MalformedMessageError as error:
            if isinstance(link, LocalLink):
                raise
            self._refuse(link, str(error))
            return
        if contact is not None:
            self._take(contact, word)
        elif isinstance(word, Join):
            self.admit(link, word)

    def _refuse(self, link: Link, why: str) -> None:
        self._options.tell(f"dropped {link.peer_host}: a message made no sense ({why})")
        self._drop(link, "it sent a message that makes no sense")

    def _take(self, contact: MemberConnection, word: MemberMessage | None) -> None:
        self._notice_pause()
        if self._contacts.find_link(contact.link) is not contact:
            return  # silent for too long while this process was stopped: given up, whatever it had sent
        contact.heard_s = self._clock.boottime_s()
        if self._contenders:
            self._settle_contest(contact)
        if isinstance(word, Heartbeat):
            self._answer_beat(contact, word)
        elif isinstance(word, EndAcknowledged):
            self._dispatch.acknowledge(contact.id)
        elif isinstance(word, Started):
            self._dispatch.open_round(word.round, contact.id, self.state)
        elif isinstance(word, Failed) and not self.state.failures:
            self._feed(replace(word, excuse_s=self._find_excuse_s()))
        elif word is not None and not isinstance(word, Join):
            self._feed(word)

    def _find_excuse_s(self) -> float:
        """How long until those are given up who may have been fenced by now, and whose peers fail because of it.

        A lease can end an interval and a margin before the silence limit; who was heard lately still holds his.
        """
        now_s, silence_s = self._clock.boottime_s(), self._options.silence_s
        limit_s = (silence_s - find_margin_s(silence_s)) / 2
        remote = self._contacts.list_remote()
        heard_s = [contact.heard_s for contact in remote if contact.id in self.state.seats]
        return max((at_s + silence_s - now_s for at_s in heard_s if now_s - at_s >= limit_s), default=0.0)

    def _answer_beat(self, contact: MemberConnection, beat: Heartbeat) -> None:
        now_s = self._clock.boottime_s()
        if beat.echo_s is not None:
            # Never later than now: nobody can have had a time stamp that was not sent yet.
            contact.promise_s = max(contact.promise_s, min(beat.echo_s, now_s))
            if self.state.doubtful and self._retry is None and not self._closed:
                self._retry = self._loop.call_later(RETRY_S, self._try_again)
        last = self.state.bases[-1] if self.state.bases else None
        ended = (last.number, last.ended) if last is not None and last.ended else None
        contact.link.send(build_heartbeat_reply(HeartbeatReply(number=beat.number, at_s=now_s, ended=ended)))

    def _try_again(self) -> None:
        self._retry = None
        self._feed(Tick())

    def _settle_contest(self, contact: MemberConnection) -> None:
        contender = self._contenders.get(contact.id)
        if contender is None or self._clock.boottime_s() < contender.since_s + DUPLICATE_S:
            return
        del self._contenders[contact.id]
        reason = f"node rank {contact.index} is already taken by {contact.host}: every node needs its own --node-rank"
        contender.link.send(build_rejection(reason, usage=True))
        contender.link.close()

    def on_closed(self, link: Link, reason: str) -> None:
        """See `LinkOwner`."""
        self._forget_contender(link)
        contact = self._contacts.find_link(link)
        if contact is not None:
            self._probe(contact, lambda: self._note_end(contact.id))
            self._lose(contact, reason)

    def _forget_contender(self, link: Link) -> None:
        for rival_id, contender in list(self._contenders.items()):
            if contender.link is link:
                del self._contenders[rival_id]

    def _note_end(self, member_id: str) -> None:
        self._feed(ProcessEnded(id=member_id))
        self._dispatch.acknowledge(member_id)

    def _probe(self, contact: MemberConnection, on_ended: Callable[[], None]) -> None:
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
        contact = self._contacts.find_link(link)
        link.send(build_goodbye(reason))
        link.close()
        self._forget_contender(link)
        if contact is not None:
            self._lose(contact, reason)

    def _lose(self, contact: MemberConnection, reason: str) -> None:
        if not self._contacts.remove(contact):
            return
        contact.link.close()
        self._feed(MemberLost(id=contact.id, reason=reason))
        contender = self._contenders.pop(contact.id, None)
        if contender is not None and not self._closed:
            self.admit(contender.link, contender.join)

    # -- time -------------------------------------------------------------------------------------------------------

    def _arm_sweep(self) -> None:
        if self._sweep is None or self._sweep.cancelled:
            self._sweep = self._loop.call_later(self._options.silence_s, self._sweep_silent)

    def _sweep_silent(self) -> None:
        """Drop who was silent for too long; come again when the next one could be."""
        now_s = self._clock.boottime_s()
        limit_s = self._options.silence_s
        for contact in [c for c in self._contacts.list_remote() if now_s - c.heard_s >= limit_s]:
            self._drop(contact.link, f"silent for {limit_s:g} s")
        oldest_s = min((contact.heard_s for contact in self._contacts.list_remote()), default=None)
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

    def lease_until_s(self) -> float:
        """Until when nobody can have taken over: what the leader's own workers may live until. CLOCK_BOOTTIME.

        Others can take over without having seen this process end only with more than half of the round, and only when
        fewer than `min` are left. As long as enough members have promised to stay, that cannot be.
        """
        lease_s = self._options.silence_s - find_margin_s(self._options.silence_s)
        # Until a round is settled those who never heard of it act on the ones before, our own too.
        last = self.state.bases[-1:]
        bases = [*(base for base in self.state.bases[:-1] if base.is_missing_some()), *last]
        return min((self._promised_until_s(base) for base in bases), default=self._clock.boottime_s()) + lease_s

    def _promised_until_s(self, base: QuorumBase) -> float:
        """When the last of the promises was given that keep the others of a round from going on without us."""
        needed = count_votes(base, self.state.rules.min_nodes) - (self._options.own_id in base.held)
        if needed <= 0:
            return self._clock.boottime_s()
        promises = sorted((r.promise_s for r in self._contacts.list_remote() if r.id in base.held), reverse=True)
        return promises[needed - 1] if len(promises) >= needed else -FOREVER

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
        state, now_s = replace(self.state, doubtful=False) if self.state.doubtful else self.state, self._clock.now_s()
        self.state, outputs = decide(state, event, now_s)
        if (
            any(isinstance(output, FormRound) for output in outputs)
            and self.lease_until_s() <= self._clock.boottime_s()
        ):
            # Some who are counted on may be free to go elsewhere by now: nobody could hold this round.
            self.state, outputs = decide(replace(state, doubtful=True), event, now_s)
        self._set_timer()
        for output in outputs:
            self._dispatch.carry_out(output, self.state)

    def redirect(self, host: str, port: int) -> None:
        """Send every member to another leader, which knows a later round."""
        for contact in self._contacts.list_remote():
            contact.link.send(build_redirect(host, port))
        self.close()

    def close(self) -> None:
        """Release every link. Idempotent. To the members it looks as if this process ended, unless told before."""
        if self._closed:
            return
        self._closed = True
        for timer in (self._timer, self._sweep, self._retry):
            if timer is not None:
                timer.cancel()
        self._dispatch.close()
        for closing in (*self._probes, *(c.link for c in self._contenders.values())):
            closing.close()
        self._contacts.hang_up()
