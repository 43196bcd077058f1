"""One node's part in the job: finds the leader (or is it), passes on what the supervisor says, posts what it is told.

The leader of this node, when there is one, is reached through a link like any other; what differs is only the lease.
A member whose connection is lost stops its workers at once (FENCED) and looks for a leader: the old one, the lowest
surviving rank of the last round, or whoever is at the job's endpoint. It stands for leadership itself when no lower
rank answers; whether it may lead is `quorum`'s to say.

Longer than most: it is the one place where what a node may do next depends on everything it has promised.
"""

import os
from collections.abc import Callable
from typing import Any

from muster.agent.config import RendezvousConfig
from muster.agent.loop import Loop, Timer
from muster.agent.records import replace
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
from muster.agent.rendezvous.addresses import is_loopback
from muster.agent.rendezvous.keepalive import Keepalive, LeaderKeepalive, find_margin_s
from muster.agent.rendezvous.links import Closing, Link, LocalLink, Network, Reservation
from muster.agent.rendezvous.office import Office, OfficeOptions
from muster.agent.rendezvous.quorum import build_base
from muster.agent.rendezvous.search import Search, Target
from muster.agent.rendezvous.terms import FENCE_S, Carry, Rules
from muster.agent.rendezvous.wire import Message
from muster.agent.report import Failure, Report, Stack

WELCOME_LIMIT_S = 5.0
"""How long a leader that accepted the connection may take to answer `join`."""
LINGER_S = 1.0
"""How long a member that has the job's end stays for those whose leader ended before telling them."""
TOKEN_HINT = "MUSTER_TOKEN"  # what every refusal for the token's sake names, no secret
ENDPOINT_PATIENCE_S = 2.0
"""How long the node at the job's endpoint looks for a leader elsewhere before it leads those who come to it."""
NEVER = float("inf")


def build_rules(config: RendezvousConfig) -> Rules:
    """The job's rules from one node's configuration."""
    silence_s = config.keep_alive_interval_s * config.keep_alive_max_attempt
    return Rules(
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        max_restarts=config.max_restarts,
        join_timeout_s=config.join_timeout_s,
        last_call_s=config.last_call_timeout_s,
        gather_s=silence_s - find_margin_s(silence_s) + FENCE_S,
    )


class Member:
    """Implements `Rendezvous`; every method is called on the loop's thread."""

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
        self._clock = loop.clock
        self._lease = lease
        self._node_name = node_name
        self._network = network
        self._reserve = reserve
        self._id = member_id or os.urandom(8).hex()
        self._silence_s = config.keep_alive_interval_s * config.keep_alive_max_attempt
        options = OfficeOptions(
            run_id=config.run_id,
            own_id=self._id,
            own_index=config.node_index,
            rules=build_rules(config),
            silence_s=self._silence_s,
            local_addr=config.local_addr,
            endpoint_host=config.host,
            endpoint_port=config.port,
        )
        self._office = Office(loop, network, options, self._tell, self._follow)

        self._carry = Carry()
        self._successors: list[Any] = []
        self._round: Round | None = None
        self._is_running = False
        """Workers of the round may be alive here: from RoundFormed to `stopped`."""
        self._kinds_posted: set[BreakKind] = set()
        self._offer: Reservation | None = None
        self._held: Reservation | None = None

        self._link: Link | None = None
        self._is_welcome = False
        self._asked_s = 0.0
        self._keepalive: Keepalive | None = None
        self._own_lease: LeaderKeepalive | None = None
        self._leader_id: str | None = None
        self._leader_place: tuple[str, int] | None = None
        self._session_rounds: set[int] = set()
        """Rounds that the last leader formed while it was ours: its end counts for these."""
        self._free_s = -NEVER
        """When this member's promise to its last leader ends, CLOCK_BOOTTIME."""

        self._search: Search | None = None
        self._hint: Target | None = None
        self._probe: Closing | None = None
        self._deadline: Timer | None = None
        self._welcome_timer: Timer | None = None
        self._verdict: Message | None = None
        self._over = False
        self._closed = False
        self._token_told = False
        self._spare_told = False

    # -- what the supervisor says -----------------------------------------------------------------------------------

    def join(self) -> None:
        """See `Rendezvous`."""
        self._offer = self._reserve()
        if self._network is None:
            self._attach_local(takeover=False)
            return
        self._set_deadline()
        if self._config.max_nodes > 1:
            try:
                self._office.open(self._listen_host())
            except OSError as error:
                self._lose_all(f"no socket to listen on: {error}")
                return
        if self._config.is_host is not None:
            self._on_locality(self._config.is_host)  # --rdzv-conf is_host: the caller knows better than names do
        elif self._config.node_index is None:
            self._network.check_local(self._config.host or "localhost", self._on_locality)
        else:
            self._on_locality(self._config.node_index == 0 or self._config.listen_fd is not None)

    def _listen_host(self) -> str | None:
        """Loopback for jobs of one machine without a token, so that nobody else can talk to them."""
        loopback = is_loopback(self._config.host or "localhost")
        return "localhost" if loopback and not self._config.token else None

    def _on_locality(self, local: bool) -> None:
        """This node leads when the endpoint is its own, and still free."""
        if self._closed or self._over:
            return
        if not local:
            self._look_around()
            return
        place = f"{self._config.host or 'localhost'}:{self._config.port}"
        try:
            self._office.open_endpoint(self._listen_host(), self._config.port, self._config.listen_fd)
        except OSError as error:
            if self._config.node_index is not None:
                self._tell(f"cannot listen at {place} ({error.strerror or error}): joining whoever leads there")
            self._look_around()
            return
        if self._listen_host() is None and not self._config.token:
            self._tell(
                f"rendezvous at {place} is open to the network and there is no MUSTER_TOKEN: anybody can join this job"
            )
        self._attach_local(takeover=False)

    def started(self, round_number: int) -> None:
        """See `Rendezvous`. Nobody waits for it: a round was confirmed when it was received."""

    def failed(self, round_number: int, failures: tuple[Failure, ...]) -> None:
        """See `Rendezvous`."""
        if self._notice_expiry():
            return  # the guard killed these workers: no fault of theirs
        if self._is_current(round_number):
            self._send({"t": "failed", "round": round_number, "failures": [f.to_json() for f in failures]})

    def idle(self, round_number: int, failures: tuple[Failure, ...]) -> None:
        """See `Rendezvous`."""
        if self._is_current(round_number):
            self._send({"t": "idle", "round": round_number, "failures": [f.to_json() for f in failures]})

    def _notice_expiry(self) -> bool:
        """True when the lease ran out while this process was stopped; the supervisor is told before anything else."""
        if self._own_lease is not None and self._own_lease.is_expired:
            self._own_lease.expire()
            return True
        if self._keepalive is not None and self._keepalive.is_expired:
            self._on_silent()
            return True
        return False

    def succeeded(self, round_number: int) -> None:
        """See `Rendezvous`."""
        if self._is_current(round_number):
            self._send({"t": "done", "round": round_number})

    def stopped(self, round_number: int, failures: tuple[Failure, ...] = (), stacks: tuple[Stack, ...] = ()) -> None:
        """See `Rendezvous`."""
        if not self._is_current(round_number) or self._closed or self._over:
            return
        self._is_running = False
        self._drop_lease()
        if self._offer is None:
            self._offer = self._reserve()
        if self._is_welcome:
            self._send_stopped(round_number, failures, stacks)
        elif self._link is not None:
            self._send_join()
        elif self._search is not None:
            self._search.hurry()

    def leave(self, reason: str) -> None:
        """See `Rendezvous`."""
        self._send({"t": "leave", "reason": reason})

    def close(self) -> None:
        """See `Rendezvous`."""
        if self._closed:
            return
        self._closed = self._over = True
        self._stop_looking()
        self._cancel_timers()
        self._office.close()
        if self._link is not None:
            self._link.close()
            self._link = None
        self._stop_keepalive()
        for closing in (self._offer, self._held, self._probe):
            if closing is not None:
                closing.close()
        if self._network is not None:
            self._network.close()

    def _is_current(self, round_number: int) -> bool:
        return self._round is not None and self._round.number == round_number and self._is_running

    def _send(self, message: Message) -> None:
        if self._link is not None and self._is_welcome:
            self._link.send(message)

    def _send_stopped(self, number: int, failures: tuple[Failure, ...] = (), stacks: tuple[Stack, ...] = ()) -> None:
        self._send(
            {
                "t": "stopped",
                "round": number,
                "port": self._offer.port if self._offer is not None else 0,
                "failures": [failure.to_json() for failure in failures],
                "stacks": [
                    {"global_rank": s.global_rank, "node": s.node, "local_rank": s.local_rank, "text": s.text}
                    for s in stacks
                ],
            }
        )

    # -- a link to the leader ---------------------------------------------------------------------------------------

    def _attach_local(self, *, takeover: bool) -> None:
        self._attach(self._office.lead(takeover=takeover))

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
        self._asked_s = self._clock.boottime_s()
        self._link.send(
            {
                "t": "join",
                "run_id": self._config.run_id,
                "id": self._id,
                "index": self._config.node_index,
                "nproc": self._nproc,
                "role": self._role,
                "host": self._node_name,
                "port": self._offer.port if self._offer is not None else 0,
                "listen": self._office.port,
                "local_addr": self._config.local_addr,
                "carry": self._carry.to_json(),
            }
        )
        if not isinstance(self._link, LocalLink):
            self._welcome_timer = self._loop.call_later(WELCOME_LIMIT_S, self._on_no_welcome)

    def _on_no_welcome(self) -> None:
        if self._link is not None and not self._is_welcome:
            self._lose_link("it does not answer", free_s=-NEVER)

    def on_message(self, link: Link, message: Message) -> None:
        """See `LinkOwner`."""
        if link is not self._link or self._over:
            return
        if self._keepalive is not None:
            if self._notice_expiry():
                return  # what is read now was said to a member that may have been given up since
            self._keepalive.note_heard()
        try:
            self._take(message)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._tell(f"the leader sent a message that makes no sense ({type(error).__name__}: {error})")
            self._lose_link("it sent a message that makes no sense", free_s=self._promise_s())

    def _take(self, message: Message) -> None:
        takers: dict[str, Callable[[Message], None]] = {
            "welcome": self._on_welcome,
            "beat": self._on_beat,
            "round": self._on_round,
            "roster": self._on_spare_roster,
            "settled": self._on_settled,
            "break": self._on_break,
            "end": self._on_end,
            "exit": lambda _message: self._finish(),
            "give_up": lambda m: self._lose_all(str(m["reason"])),
            "reject": lambda m: self._lose_all(str(m["reason"]), usage=bool(m.get("usage"))),
            "redirect": lambda m: self._follow(str(m["host"]), int(m["port"])),
            "bye": lambda m: self._lose_link(str(m["reason"]), free_s=-NEVER),
        }
        taker = takers.get(message["t"])
        if taker is not None:
            taker(message)

    def _on_welcome(self, message: Message) -> None:
        self._is_welcome = True
        if self._leader_id != message["id"]:
            self._leader_id = str(message["id"])
            self._session_rounds = set()
        self._cancel_timers()
        if isinstance(self._link, LocalLink):
            leader = self._office.leader
            if leader is not None:
                self._own_lease = LeaderKeepalive(
                    self._loop,
                    interval_s=self._config.keep_alive_interval_s,
                    until_s=leader.lease_until_s,
                    on_expired=self._on_outvoted,
                )
            return
        if self._link is not None:
            self._leader_place = (self._link.peer_host, int(message["listen"]))
            self._office.following = self._leader_place if self._leader_place[1] else None
            self._keepalive = Keepalive(
                self._loop,
                self._link,
                interval_s=self._config.keep_alive_interval_s,
                silence_s=self._silence_s,
                since_s=self._asked_s,
                lease=None,
                on_silent=self._on_silent,
            )

    def _on_beat(self, message: Message) -> None:
        if self._keepalive is not None:
            self._keepalive.take_answer(message)
        if "ended" in message:
            number, ranks = message["ended"]
            self._note_ended(number, frozenset(int(rank) for rank in ranks))

    # -- rounds -----------------------------------------------------------------------------------------------------

    def _on_round(self, message: Message) -> None:
        self._on_roster(message)
        number = int(message["round"])
        self._round = Round(
            number=number,
            attempt=message["attempt"],
            restarts_left=message["restarts_left"],
            group_rank=message["group_rank"],
            group_world_size=message["size"],
            rank_offset=message["rank_offset"],
            world_size=message["world_size"],
            role_rank_offset=message["role_rank_offset"],
            role_world_size=message["role_world_size"],
            master_addr=message["master_addr"],
            master_port=message["master_port"],
            node_index=self._config.node_index or 0,
        )
        self._is_running = True
        self._spare_told = False
        self._kinds_posted = set()
        self._office.rank = self._round.group_rank
        self._keep_port()
        self._hold_lease()
        self._send({"t": "got", "round": number})
        if self._search is not None:
            self._stop_looking()
        if isinstance(self._link, LocalLink) and self._network is not None:
            self._office.take_endpoint(self._listen_host())
        self._loop.post(RoundFormed(round=self._round))

    def _on_spare_roster(self, message: Message) -> None:
        """A round without this node. Said once, not again with every round that others form meanwhile."""
        self._on_roster(message)
        if message.get("spare") and not self._spare_told:
            self._spare_told = True
            self._tell(f"all {self._config.max_nodes} nodes that --nnodes allows are there: waiting as a spare")

    def _on_roster(self, message: Message) -> None:
        self._carry = Carry(
            round=int(message["round"]),
            attempt=int(message["attempt"]),
            early=message["early"],
            bases=tuple(message["bases"]),
        )
        self._successors = list(message["successors"])
        self._session_rounds.add(self._carry.round)
        self._office.round = self._carry.round
        self._office.rank = None

    def _keep_port(self) -> None:
        """Rank 0's offer stays bound as long as the round; the others' are not needed."""
        if self._held is not None:
            self._held.close()
            self._held = None
        if self._round is not None and self._round.group_rank == 0:
            self._held = self._offer
        elif self._offer is not None:
            self._offer.close()
        self._offer = None

    def _hold_lease(self) -> None:
        """Fencing matters only where others could go on without this node."""
        alone = self._round is None or self._round.group_world_size == 1
        if self._own_lease is not None:
            if alone and self._lease is not None:
                self._lease.release()
            self._own_lease.hold_lease(self._lease, active=not alone)
        elif self._keepalive is not None:
            self._keepalive.hold_lease(self._lease)

    def _drop_lease(self) -> None:
        """No worker is left to fence: at its end the guard would only kill the warm template."""
        if self._own_lease is not None:
            self._own_lease.hold_lease(None, active=False)
        if self._keepalive is not None:
            self._keepalive.hold_lease(None)
        if self._lease is not None:
            self._lease.release()

    def _on_settled(self, message: Message) -> None:
        number = int(message["round"])
        if number == self._carry.round:
            bases = tuple(base for base in self._carry.bases if base["number"] >= number)
            self._carry = replace(self._carry, bases=bases)

    def _on_break(self, message: Message) -> None:
        number = int(message["round"])
        if number != self._carry.round:
            return
        self._carry = replace(self._carry, attempt=int(message["next_attempt"]), early=message["early"])
        if not self._is_running:
            self._send_stopped(number)
            return
        kind = BreakKind(message["kind"])
        self._post_break(kind, str(message["reason"]), want_stacks=bool(message["want_stacks"]))

    def _post_break(self, kind: BreakKind, reason: str, *, want_stacks: bool = False) -> None:
        if self._round is None or not self._is_running or kind in self._kinds_posted:
            return
        self._kinds_posted.add(kind)
        self._loop.post(RoundBroken(number=self._round.number, kind=kind, reason=reason, want_stacks=want_stacks))

    # -- the end ----------------------------------------------------------------------------------------------------

    def _on_end(self, message: Message) -> None:
        self._verdict = message
        self._office.verdict = message
        self._send({"t": "ended"})

    def _finish(self) -> None:
        if self._over or self._verdict is None:
            return
        self._over = True
        self._stop_looking()
        self._stop_keepalive()
        self._cancel_timers()
        report = self._verdict["report"]
        self._loop.post(
            JobEnded(
                succeeded=bool(self._verdict["succeeded"]),
                report=None if report is None else Report.from_json(report),
                prints_report=bool(self._verdict["prints"]),
            )
        )

    def _lose_all(self, reason: str, *, usage: bool = False) -> None:
        if self._over:
            return
        self._over = True
        self._stop_looking()
        self._stop_keepalive()
        self._cancel_timers()
        self._loop.post(RendezvousLost(reason=reason, usage=usage))

    # -- the leader is lost -----------------------------------------------------------------------------------------

    def on_closed(self, link: Link, reason: str) -> None:
        """See `LinkOwner`. Closed without a word: either the leader's process has ended, or the connection broke."""
        if link is not self._link or self._over:
            return
        if self._keepalive is None or self._keepalive.is_expired or self._leader_place is None:
            self._lose_link(reason, free_s=self._promise_s() if self._is_welcome else -NEVER)
            return
        promise_s, rounds = self._promise_s(), self._session_rounds
        host, port = self._leader_place
        self._lose_link(reason, free_s=promise_s)
        if self._network is not None and port:
            self._probe = self._network.probe(host, port, lambda refused: self._on_probe(refused, rounds))

    def _promise_s(self) -> float:
        return -NEVER if self._keepalive is None else self._keepalive.heard_s + self._silence_s

    def _on_probe(self, refused: bool, rounds: set[int]) -> None:
        """An immediate redial of the same address was refused: nobody else can have been the leader and still be."""
        self._probe = None
        if not refused or self._over:
            return
        self._free_s = -NEVER
        for base in self._carry.bases:
            if base["number"] in rounds:
                self._note_ended(base["number"], frozenset({base["leader"]}))
        if self._search is not None:
            self._search.hurry()

    def _note_ended(self, number: int, ranks: frozenset[int]) -> None:
        bases = tuple(
            {**base, "ended": sorted(ranks.union(base["ended"]))} if base["number"] == number else base
            for base in self._carry.bases
        )
        self._carry = replace(self._carry, bases=bases)

    def _on_silent(self) -> None:
        self._lose_link(f"nothing heard of it for {self._silence_s:g} s", free_s=self._promise_s())

    def _on_outvoted(self) -> None:
        self._post_break(BreakKind.FENCED, "most nodes of the round cannot be heard and may go on without this one")

    def _lose_link(self, reason: str, *, free_s: float) -> None:
        """The link is gone or given up: kill, and look for a leader."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
        was_welcome, self._is_welcome = self._is_welcome, False
        self._office.following = None
        self._free_s = free_s
        self._stop_keepalive()
        self._cancel_timers()
        if self._verdict is not None:
            self._loop.call_later(LINGER_S, self._finish)
            return
        self._post_break(BreakKind.FENCED, f"the leader was lost: {reason}")
        if was_welcome:
            self._tell(f"lost the leader ({reason}): looking for it or its successor")
        self._set_deadline()
        self._look_around()

    def _follow(self, host: str, port: int) -> None:
        """Another leader knows a later round: go there, and take along who is here."""
        self._office.resign(host, port)
        self._hint = Target(host=host, port=port)
        self._stop_looking()
        self._lose_link("it gave way to another leader", free_s=-NEVER)

    # -- looking for a leader ---------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        if self._network is None or self._over or self._search is not None:
            return
        question = {"t": "ask", "run_id": self._config.run_id, "id": self._id}
        self._search = Search(
            self._loop, self._network, question, self._on_status, self._on_search_round, self._lose_all
        )
        self._search.start(self._list_targets())

    def _list_targets(self) -> list[Target]:
        targets = [self._hint] if self._hint is not None else []
        if self._leader_place is not None and self._leader_place[1]:
            targets.append(Target(host=self._leader_place[0], port=self._leader_place[1]))
        for rank, _index, host, port in self._successors:
            if rank != self._office.rank:
                targets.append(Target(host=str(host), port=int(port), rank=int(rank)))
        targets.append(Target(host=self._config.host or "localhost", port=self._config.port))
        return list(dict.fromkeys(targets))

    def _on_status(self, link: Link, message: Message, target: Target) -> bool:
        """Somebody answered: join it when it leads, or stands for leadership with a lower rank than ours."""
        if message["id"] == self._id or self._over or self._is_running:
            return False
        if self._link is not None and not self._office.is_candidate:
            return False
        if message["id"] != self._leader_id:
            self._note_replaced(message["index"])
            if self._clock.boottime_s() < self._free_s:
                return False
        if not self._is_better(message):
            self._take_hint(message)
            return False
        if self._office.is_candidate:
            if self._link is not None:
                self._link.close()
            self._office.resign(target.host, target.port)
        self._stop_keepalive()
        self._search = None
        self._hint = None
        self._attach(link)
        return True

    def _take_hint(self, message: Message) -> None:
        """A member who is not the leader knows where it is: ask there too."""
        if message["leader"] is not None and self._search is not None:
            host, port = message["leader"]
            self._search.add(Target(host=str(host), port=int(port)))

    def _note_replaced(self, index: int | None) -> None:
        """Another process has the old leader's node index: it was started because the old one had ended."""
        for carried in self._carry.bases if index is not None else ():
            base = build_base(carried, self._id)
            rank = base.find_rank(index) if index is not None else None
            if rank is not None and rank == base.leader and base.number in self._session_rounds:
                self._free_s = -NEVER

    def _is_better(self, message: Message) -> bool:
        role, number, rank = message["role"], int(message["round"]), message["rank"]
        if role == "leader":
            return True
        if role != "candidate" or number < self._carry.round:
            return False
        own_rank = self._office.rank
        return number > self._carry.round or own_rank is None or (rank is not None and rank < own_rank)

    def _on_search_round(self) -> None:
        """Stand for leadership when nobody of a lower rank answers."""
        self._warn_of_token()
        if self._link is not None or self._is_running or self._search is None or self._over:
            return
        rank = self._office.rank
        if self._clock.boottime_s() < self._free_s:
            return
        if any(int(successor[0]) == rank for successor in self._successors):
            if rank is not None and self._search.is_answered(rank):
                self._attach_local(takeover=True)
        elif self._office.has_endpoint and self._search.age_s() > ENDPOINT_PATIENCE_S:
            # Newcomers look for a leader here: gather them even without a part in the last round.
            self._attach_local(takeover=self._carry.round > 0)

    def _warn_of_token(self) -> None:
        """Said at once, not only at the join timeout: it never gets better by itself."""
        if self._search is not None and TOKEN_HINT in self._search.why and not self._token_told:
            self._token_told = True
            self._tell(f"cannot join: {self._search.why}")

    def _stop_looking(self) -> None:
        if self._search is not None:
            self._search.close()
            self._search = None

    def _set_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self._loop.call_later(self._config.join_timeout_s, self._on_deadline)

    def _on_deadline(self) -> None:
        why = f" ({self._search.why})" if self._search is not None and self._search.why else ""
        place = f"{self._config.host or 'localhost'}:{self._config.port}"
        self._lose_all(f"no leader was found at {place} within {self._config.join_timeout_s:g} s{why}")

    def _cancel_timers(self) -> None:
        for timer in (self._deadline, self._welcome_timer):
            if timer is not None:
                timer.cancel()
        self._deadline = self._welcome_timer = None

    def _stop_keepalive(self) -> None:
        if self._keepalive is not None:
            self._keepalive.stop()
            self._keepalive = None
        if self._own_lease is not None:
            self._own_lease.stop()
            self._own_lease = None

    def _tell(self, text: str) -> None:
        self._loop.post(Notice(text=text))
