"""One node's part in the job: passes on what the supervisor says, posts what the leader says.

The leader of this node, when there is one, is reached through a link like any other; what differs is only the lease.
A member whose connection is lost stops its workers at once (FENCED) and looks for a leader (`lookout`).
"""

import os
from collections.abc import Callable
from typing import Any

from muster.agent.config import RendezvousConfig
from muster.agent.loop import Loop, Timer
from muster.agent.rendezvous import (
    BreakKind,
    JobEnded,
    Lease,
    Notice,
    RendezvousLost,
    Round,
    RoundBroken,
    RoundFormed,
)
from muster.agent.rendezvous import letters_down as down
from muster.agent.rendezvous import letters_up as up
from muster.agent.rendezvous.addresses import is_loopback
from muster.agent.rendezvous.fields import NonsenseError, host, text
from muster.agent.rendezvous.keepalive import find_margin_s
from muster.agent.rendezvous.links import Closing, Link, LocalLink, Network, Reservation
from muster.agent.rendezvous.lookout import NEVER, Lookout, LookoutOptions
from muster.agent.rendezvous.master_ports import MasterPorts
from muster.agent.rendezvous.memory import Memory
from muster.agent.rendezvous.office import Office, OfficeOptions
from muster.agent.rendezvous.pulse import Pulse
from muster.agent.rendezvous.search import Target
from muster.agent.rendezvous.terms import FENCE_S, Rules
from muster.agent.rendezvous.wire import Message
from muster.agent.report import Failure, Stack

WELCOME_LIMIT_S = 5.0
"""How long a leader that accepted the connection may take to answer `join`."""
LINGER_S = 1.0
"""How long a member that has the job's end stays for those whose leader ended before telling them."""
NONSENSE_PAUSE_S = 1.0
"""A leader that wrote nonsense will most likely do it again: not sooner than that."""


def find_silence_s(config: RendezvousConfig) -> float:
    """How long a node may be silent before it is given up."""
    return config.keep_alive_interval_s * config.keep_alive_max_attempt


def build_rules(config: RendezvousConfig) -> Rules:
    """The job's rules from one node's configuration."""
    silence_s = find_silence_s(config)
    return Rules(
        run_id=text(config.run_id),
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        max_restarts=config.max_restarts,
        join_timeout_s=config.join_timeout_s,
        last_call_s=config.last_call_timeout_s,
        gather_s=silence_s - find_margin_s(silence_s) + FENCE_S,
    )


def _build_office_options(config: RendezvousConfig, own_id: str) -> OfficeOptions:
    return OfficeOptions(
        own_id=own_id,
        own_index=config.node_index,
        rules=build_rules(config),
        silence_s=find_silence_s(config),
        local_addr=config.local_addr,
        endpoint=_find_endpoint(config),
    )


def _find_endpoint(config: RendezvousConfig) -> tuple[str, int]:
    return config.host or "localhost", config.port


class Member:
    """Implements `Rendezvous` and `Seeker`; every method is called on the loop's thread."""

    def __init__(
        self,
        config: RendezvousConfig,
        *,
        nproc: int,
        role: str,
        loop: Loop,
        lease: Lease | None,
        node_name: str,
        network: Network | None,
        reserve: Callable[[], Reservation],
        member_id: str | None = None,
    ) -> None:
        self._config = config
        self._nproc = nproc
        self._role = role
        self._loop = loop
        self._node_name = node_name
        self._network = network
        self._id = member_id or os.urandom(8).hex()
        self._memory = Memory()
        self._ports = MasterPorts(reserve)
        self._office = Office(
            loop, network, _build_office_options(config, self._id), self._memory, self.tell, self._follow
        )
        options = LookoutOptions(
            run_id=text(config.run_id),
            own_id=self._id,
            endpoint=_find_endpoint(config),
            join_timeout_s=config.join_timeout_s,
        )
        self._lookout = Lookout(loop, network, options, self._memory, self)
        self._pulse = Pulse(
            loop,
            lease,
            interval_s=config.keep_alive_interval_s,
            silence_s=find_silence_s(config),
            on_silent=self._on_silent,
            on_outvoted=self._on_outvoted,
        )
        self._round: Round | None = None
        self._is_running = False
        """Workers of the round may be alive here: from RoundFormed to `stopped`."""
        self._kinds_posted: set[BreakKind] = set()
        self._link: Link | None = None
        self._is_welcome = False
        self._asked_s = 0.0
        self._probe: Closing | None = None
        self._welcome_timer: Timer | None = None
        self._verdict: down.Verdict | None = None
        self._over = False
        self._closed = False
        self._spare_told = False

    # -- beginning --------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """See `Rendezvous`."""
        if self._config.local_addr:
            try:
                host(self._config.local_addr)
            except NonsenseError as error:
                self.lose_all(f"--local-addr {self._config.local_addr!r}: {error}", usage=True)
                return
        self._ports.offer()
        if self._network is None:
            self.stand(takeover=False)
            return
        self._lookout.set_deadline()
        if self._config.max_nodes > 1:
            try:
                self._office.open(self._listen_host())
            except OSError as error:
                self.lose_all(f"no socket to listen on: {error}")
                return
        if self._config.is_host is not None:
            self._on_locality(self._config.is_host)  # --rdzv-conf is_host: the caller knows better than names do
        elif self._config.node_index is None:
            self._network.check_local(_find_endpoint(self._config)[0], self._on_locality)
        else:
            self._on_locality(self._config.node_index == 0 or self._config.listen_fd is not None)

    def _listen_host(self) -> str | None:
        """Loopback for jobs of one machine without a token, so that nobody else can talk to them."""
        loopback = is_loopback(_find_endpoint(self._config)[0])
        return "localhost" if loopback and not self._config.token else None

    def _on_locality(self, local: bool) -> None:
        """This node leads when the endpoint is its own, and still free."""
        if self._closed or self._over:
            return
        if not local:
            self._lookout.start()
            return
        place = "{}:{}".format(*_find_endpoint(self._config))
        try:
            self._office.open_endpoint(self._listen_host(), self._config.port, self._config.listen_fd)
        except OSError as error:
            if self._config.node_index is not None:
                self.tell(f"cannot listen at {place} ({error.strerror or error}): joining whoever leads there")
            self._lookout.start()
            return
        if self._listen_host() is None and not self._config.token:
            self.tell(
                f"rendezvous at {place} is open to the network and there is no MUSTER_TOKEN: anybody can join this job"
            )
        self.stand(takeover=False)

    # -- what the supervisor says -----------------------------------------------------------------------------------

    def started(self, round_number: int) -> None:
        """See `Rendezvous`. Nobody waits for it: a round was confirmed when it was received."""

    def failed(self, round_number: int, failures: tuple[Failure, ...]) -> None:
        """See `Rendezvous`."""
        if self._pulse.notice_expiry():
            return  # the guard killed these workers: no fault of theirs
        if self._is_current(round_number):
            self._send(up.build_failed(round_number, failures))

    def idle(self, round_number: int, failures: tuple[Failure, ...]) -> None:
        """See `Rendezvous`."""
        if self._is_current(round_number):
            self._send(up.build_idle(round_number, failures))

    def succeeded(self, round_number: int) -> None:
        """See `Rendezvous`."""
        if self._is_current(round_number):
            self._send(up.build_success(round_number))

    def stopped(self, round_number: int, failures: tuple[Failure, ...] = (), stacks: tuple[Stack, ...] = ()) -> None:
        """See `Rendezvous`."""
        if not self._is_current(round_number) or self._closed or self._over:
            return
        self._is_running = False
        self._pulse.drop_lease()
        self._ports.offer()
        if self._is_welcome:
            self._send(up.build_stopped(round_number, self._ports.offered, failures, stacks))
        elif self._link is not None:
            self._send_join()
        else:
            self._lookout.hurry()

    def leave(self, reason: str) -> None:
        """See `Rendezvous`."""
        self._send(up.build_leave(reason))

    def close(self) -> None:
        """See `Rendezvous`."""
        if self._closed:
            return
        self._closed = self._over = True
        self._be_still()
        self._office.close()
        if self._link is not None:
            self._link.close()
            self._link = None
        self._ports.close()
        if self._probe is not None:
            self._probe.close()
        if self._network is not None:
            self._network.close()

    def _is_current(self, round_number: int) -> bool:
        return self._round is not None and self._round.number == round_number and self._is_running

    def _send(self, message: Message) -> None:
        if self._link is not None and self._is_welcome:
            self._link.send(message)

    def tell(self, text: str) -> None:
        """See `Seeker`."""
        self._loop.post(Notice(text=text))

    # -- a link to the leader ---------------------------------------------------------------------------------------

    @property
    def has_endpoint(self) -> bool:
        """See `Seeker`."""
        return self._office.has_endpoint

    def can_join(self) -> bool:
        """See `Seeker`."""
        return not self._over and not self._is_running and (self._link is None or self._office.is_candidate)

    def can_stand(self) -> bool:
        """See `Seeker`."""
        return not self._over and not self._is_running and self._link is None

    def stand(self, *, takeover: bool) -> None:
        """See `Seeker`. The named leader stands at once."""
        self._attach(self._office.lead(takeover=takeover))

    def join_at(self, link: Link, target: Target) -> None:
        """See `Seeker`."""
        if self._office.is_candidate:
            if self._link is not None:
                self._link.close()
            self._office.resign(target.host, target.port)
        self._pulse.stop()
        self._attach(link)

    def _attach(self, link: Link) -> None:
        self._link = link
        self._is_welcome = False
        link.owner = self
        if not self._is_running:
            self._send_join()

    def _send_join(self) -> None:
        """Ask to take part. Only ever sent while no worker of ours is alive."""
        if self._link is None:
            return
        self._asked_s = self._loop.clock.boottime_s()
        join = up.Join(
            run_id=self._config.run_id,
            id=self._id,
            index=self._config.node_index,
            nproc=self._nproc,
            role=self._role,
            host=self._node_name,
            port=self._ports.offered,
            listen=self._office.port,
            local_addr=self._config.local_addr or None,
            carry=self._memory.carry,
        )
        self._link.send(up.build_join(join))
        if not isinstance(self._link, LocalLink):
            self._welcome_timer = self._loop.call_later(WELCOME_LIMIT_S, self._on_no_welcome)

    def _on_no_welcome(self) -> None:
        if self._link is not None and not self._is_welcome:
            self._lose_link("it does not answer", free_s=-NEVER)

    def on_message(self, link: Link, message: Message) -> None:
        """See `LinkOwner`. A leader that writes nonsense is left; what our own leader writes is a bug of ours."""
        if link is not self._link or self._over or not self._pulse.note_heard():
            return
        try:
            order = down.read_order(message)
        except NonsenseError as error:
            if isinstance(link, LocalLink):
                raise
            self.tell(f"the leader sent a message that makes no sense ({error})")
            why = "it sent a message that makes no sense"
            self._lose_link(why, free_s=self._pulse.promise_s, pause_s=NONSENSE_PAUSE_S)
            return
        if order is not None:
            taker: Callable[[Any], None] = getattr(self, _TAKERS[type(order)])
            taker(order)

    def _on_welcome(self, welcome: down.Welcome) -> None:
        self._is_welcome = True
        self._memory.meet_leader(welcome.leader_id)
        self._cancel_timers()
        if self._link is None:
            return
        if not isinstance(self._link, LocalLink):
            place = self._memory.leader_place = (self._link.peer_host, welcome.listen)
            self._office.following = place if place[1] else None
            self._pulse.follow(self._link, since_s=self._asked_s)
        elif self._office.leader is not None:
            self._pulse.lead(self._office.leader.lease_until_s)

    def _on_answer(self, answer: down.Answer) -> None:
        self._pulse.take_answer(answer)
        if answer.ended is not None:
            self._memory.note_ended(*answer.ended)

    # -- rounds -----------------------------------------------------------------------------------------------------

    def _on_seated(self, seated: down.Seated) -> None:
        carry = seated.roster.carry
        self._memory.take_roster(seated.roster, seated.group_rank)
        self._round = Round(
            number=carry.round,
            attempt=carry.attempt,
            restarts_left=seated.restarts_left,
            group_rank=seated.group_rank,
            group_world_size=seated.group_world_size,
            rank_offset=seated.rank_offset,
            world_size=seated.world_size,
            role_rank_offset=seated.role_rank_offset,
            role_world_size=seated.role_world_size,
            master_addr=seated.master_addr,
            master_port=seated.master_port,
            node_index=self._config.node_index or 0,
        )
        self._is_running = True
        self._spare_told = False
        self._kinds_posted = set()
        self._ports.begin_round(hosts_rank_0=seated.group_rank == 0)
        self._pulse.hold_lease(alone=seated.group_world_size == 1)
        self._send(up.build_confirmation(carry.round))
        self._lookout.stop()
        if isinstance(self._link, LocalLink) and self._network is not None:
            self._office.take_endpoint(self._listen_host())
        self._loop.post(RoundFormed(round=self._round))

    def _on_roster(self, roster: down.Roster) -> None:
        """A round without this node. Said once, not again with every round that others form meanwhile."""
        self._memory.take_roster(roster, None)
        if roster.is_spare and not self._spare_told:
            self._spare_told = True
            self.tell(f"all {self._config.max_nodes} nodes that --nnodes allows are there: waiting as a spare")

    def _on_settled(self, settled: down.Settled) -> None:
        self._memory.settle(settled.round)

    def _on_broken(self, broken: down.Broken) -> None:
        if broken.round != self._memory.round:
            return
        self._memory.take_break(broken)
        if self._is_running:
            self._post_break(broken.kind, broken.reason, want_stacks=broken.want_stacks)
        else:
            self._send(up.build_stopped(broken.round, self._ports.offered))

    def _post_break(self, kind: BreakKind, reason: str, *, want_stacks: bool = False) -> None:
        if self._round is None or not self._is_running or kind in self._kinds_posted:
            return
        self._kinds_posted.add(kind)
        self._loop.post(RoundBroken(number=self._round.number, kind=kind, reason=reason, want_stacks=want_stacks))

    # -- the end ----------------------------------------------------------------------------------------------------

    def _on_verdict(self, verdict: down.Verdict) -> None:
        self._verdict = self._office.verdict = verdict
        self._send(up.build_end_heard())

    def _on_exit(self, _exit: down.Exit) -> None:
        self._finish()

    def _on_hopeless(self, hopeless: down.Hopeless) -> None:
        self.lose_all(hopeless.reason)

    def _on_rejected(self, rejected: down.Rejected) -> None:
        self.lose_all(rejected.reason, usage=rejected.usage)

    def _finish(self) -> None:
        verdict = self._verdict
        if self._over or verdict is None:
            return
        self._over = True
        self._be_still()
        self._loop.post(JobEnded(succeeded=verdict.succeeded, report=verdict.report, prints_report=verdict.prints))

    def lose_all(self, reason: str, *, usage: bool = False) -> None:
        """See `Seeker`."""
        if self._over:
            return
        self._over = True
        self._be_still()
        self._loop.post(RendezvousLost(reason=reason, usage=usage))

    def _be_still(self) -> None:
        self._lookout.stop()
        self._pulse.stop()
        self._cancel_timers()

    def _cancel_timers(self) -> None:
        self._lookout.cancel_deadline()
        if self._welcome_timer is not None:
            self._welcome_timer.cancel()
            self._welcome_timer = None

    # -- the leader is lost -----------------------------------------------------------------------------------------

    def on_closed(self, link: Link, reason: str) -> None:
        """See `LinkOwner`. Closed without a word: either the leader's process has ended, or the connection broke."""
        if link is not self._link or self._over:
            return
        promise_s, rounds, place = self._pulse.promise_s, self._memory.session_rounds, self._memory.leader_place
        may_have_ended = self._pulse.is_alive_elsewhere
        self._lose_link(reason, free_s=promise_s if may_have_ended or self._is_welcome else -NEVER)
        if may_have_ended and self._network is not None and place is not None and place[1]:
            self._probe = self._network.probe(*place, lambda refused: self._on_probe(refused, rounds))

    def _on_probe(self, refused: bool, rounds: set[int]) -> None:
        """An immediate redial of the same address was refused: nobody else can have been the leader and still be."""
        self._probe = None
        if not refused or self._over:
            return
        self._lookout.free_s = -NEVER
        self._memory.note_leader_ended(rounds)
        self._lookout.hurry()

    def _on_bye(self, bye: down.Bye) -> None:
        self._lose_link(bye.reason, free_s=-NEVER)

    def _on_redirect(self, redirect: down.Redirect) -> None:
        self._follow(redirect.host, redirect.port)

    def _on_silent(self) -> None:
        self._lose_link(f"nothing heard of it for {find_silence_s(self._config):g} s", free_s=self._pulse.promise_s)

    def _on_outvoted(self) -> None:
        self._post_break(BreakKind.FENCED, "most nodes of the round cannot be heard and may go on without this one")

    def _lose_link(self, reason: str, *, free_s: float, pause_s: float = 0.0) -> None:
        """The link is gone or given up: kill, and look for a leader."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
        was_welcome, self._is_welcome = self._is_welcome, False
        self._office.following = None
        self._lookout.free_s = free_s
        self._pulse.stop()
        self._cancel_timers()
        if self._verdict is not None:
            self._loop.call_later(LINGER_S, self._finish)
            return
        self._post_break(BreakKind.FENCED, f"the leader was lost: {reason}")
        if was_welcome:
            self.tell(f"lost the leader ({reason}): looking for it or its successor")
        self._lookout.set_deadline()
        if pause_s:
            self._loop.call_later(pause_s, self._look_around)
        else:
            self._look_around()

    def _look_around(self) -> None:
        if not self._over and self._link is None:
            self._lookout.start()

    def _follow(self, host: str, port: int) -> None:
        """Another leader knows a later round: go there, and take along who is here."""
        self._office.resign(host, port)
        self._lookout.hint = Target(host=host, port=port)
        self._lookout.stop()
        self._lose_link("it gave way to another leader", free_s=-NEVER)


_TAKERS: dict[type, str] = {
    down.Welcome: "_on_welcome",
    down.Answer: "_on_answer",
    down.Seated: "_on_seated",
    down.Roster: "_on_roster",
    down.Settled: "_on_settled",
    down.Broken: "_on_broken",
    down.Verdict: "_on_verdict",
    down.Exit: "_on_exit",
    down.Hopeless: "_on_hopeless",
    down.Rejected: "_on_rejected",
    down.Redirect: "_on_redirect",
    down.Bye: "_on_bye",
}
