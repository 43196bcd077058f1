"""One node's part in the job: its rounds, as the supervisor hears of them, and its end.

How the leader is reached, and what happens when it cannot be, is the `session`'s.
"""

import os
from collections.abc import Callable
from typing import Any

from muster.agent.config import RendezvousConfig
from muster.agent.diagnosis.report import Failure, Stack
from muster.agent.rendezvous.interface import (
    BreakKind,
    GlobalRank0Started,
    JobEnded,
    Lease,
    Notice,
    RendezvousFailed,
    RoundBroken,
    RoundFormed,
)
from muster.agent.rendezvous.member.master_ports import MasterPorts
from muster.agent.rendezvous.member.recovery import RecoveryTracker
from muster.agent.rendezvous.member.session import Session
from muster.agent.rendezvous.protocol import leader_messages as down
from muster.agent.rendezvous.protocol import member_messages as up
from muster.agent.rendezvous.protocol.job_rules import build_job_rules
from muster.agent.rendezvous.transport.links import Network, Reservation
from muster.agent.round import Round
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.records import replace


class Member:
    """Implements `Rendezvous` and `Part`; every method is called on the loop's thread."""

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
        self._id = member_id or os.urandom(8).hex()
        self._memory = RecoveryTracker()
        self._ports = MasterPorts(reserve)
        self._session = Session(config, self._id, self._memory, self, loop=loop, network=network, lease=lease)
        self._round: Round | None = None
        self._is_running = False
        """Workers of the round may be alive here: from RoundFormed to `stopped`."""
        self._kinds_posted: set[BreakKind] = set()
        self._verdict: down.JobEnd | None = None
        self._over = False
        self._closed = False
        self._spare_told = False
        self._is_prepared = True
        self._has_told_prepared = True
        """The leader knows, or will with the next join."""

    # -- what the supervisor says -----------------------------------------------------------------------------------

    def join(self, *, is_prepared: bool = True) -> None:
        """See `Rendezvous`."""
        self._is_prepared = is_prepared
        self._ports.offer()
        self._session.begin()

    def prepared(self) -> None:
        """See `Rendezvous`."""
        self._is_prepared = True
        self.greet()

    def started(self, round_number: int) -> None:
        """See `Rendezvous`. The leader need not know who else has: a round was confirmed when it was received."""
        if self._is_current(round_number) and self._round is not None and self._hosts_rank_0(self._round):
            self._session.send(up.build_started(round_number))

    def failed(self, round_number: int, failures: tuple[Failure, ...]) -> None:
        """See `Rendezvous`."""
        if self._session.notice_expiry():
            return  # the guard killed these workers: no fault of theirs
        if self._is_current(round_number):
            self._session.send(up.build_failed(round_number, failures))

    def idle(self, round_number: int, failures: tuple[Failure, ...]) -> None:
        """See `Rendezvous`."""
        if self._is_current(round_number):
            self._session.send(up.build_idle(round_number, failures))

    def succeeded(self, round_number: int) -> None:
        """See `Rendezvous`."""
        if self._is_current(round_number):
            self._session.send(up.build_succeeded(round_number))

    def stopped(self, round_number: int, failures: tuple[Failure, ...] = (), stacks: tuple[Stack, ...] = ()) -> None:
        """See `Rendezvous`."""
        if not self._is_current(round_number) or self._closed or self._over:
            return
        self._is_running = False
        self._session.end_round()
        self._ports.offer()
        self._session.resume(up.build_stopped(round_number, self._ports.offered, failures, stacks))

    def leave(self, reason: str) -> None:
        """See `Rendezvous`."""
        self._session.send(up.build_leaving(reason))

    def close(self) -> None:
        """See `Rendezvous`."""
        if self._closed:
            return
        self._closed = self._over = True
        self._session.close()
        self._ports.close()

    def _is_current(self, round_number: int) -> bool:
        return self._round is not None and self._round.number == round_number and self._is_running

    def tell(self, text: str) -> None:
        """See `Part`."""
        self._loop.post(Notice(text=text))

    # -- what the session asks --------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """See `Part`."""
        return self._is_running

    @property
    def is_over(self) -> bool:
        """See `Part`."""
        return self._over

    @property
    def knows_end(self) -> bool:
        """See `Part`."""
        return self._verdict is not None

    def describe_join(self, listen_port: int) -> up.Join:
        """See `Part`."""
        self._has_told_prepared = self._is_prepared
        return up.Join(
            run_id=self._config.run_id,
            id=self._id,
            index=self._config.node_index,
            nproc=self._nproc,
            role=self._role,
            host=self._node_name,
            port=self._ports.offered,
            listen_port=listen_port,
            local_addr=self._config.local_addr or None,
            rules=build_job_rules(self._config),
            is_prepared=self._is_prepared,
            recovery_state=replace(self._memory.carry, leader_id=self._memory.leader_id),
        )

    def greet(self) -> None:
        """See `Part`."""
        if self._is_prepared and not self._has_told_prepared and self._session.is_welcome:
            self._has_told_prepared = True
            self._session.send(up.build_prepared())

    def take(self, order: down.LeaderMessage) -> None:
        """See `Part`."""
        taker: Callable[[Any], None] = getattr(self, _TAKERS[type(order)])
        taker(order)

    def fence(self, reason: str) -> None:
        """See `Part`."""
        self._post_break(BreakKind.FENCED, reason)

    # -- rounds -----------------------------------------------------------------------------------------------------

    def _on_seated(self, seated: down.RoundStart) -> None:
        self._round = self._localize(seated.round)
        self._memory.take_roster(seated.summary, self._round.group_rank)
        self._is_running = True
        self._spare_told = False
        self._kinds_posted = set()
        self._ports.begin_round(hosts_rank_0=self._hosts_rank_0(self._round))
        self._session.begin_round(
            alone=self._round.group_world_size == 1, confirmation=up.build_round_acknowledgement(self._round.number)
        )
        self._loop.post(RoundFormed(round=self._round, is_held=not self._hosts_rank_0(self._round)))

    def _localize(self, round_: Round) -> Round:
        """With what the leader cannot know: this node's number, and the address that `static` was given here."""
        index, config = self._config.node_index or 0, self._config
        if config.lends_endpoint:
            round_ = replace(round_, master_addr=config.master_addr, master_port=config.master_port)
        return replace(round_, node_index=index)

    @staticmethod
    def _hosts_rank_0(round_: Round) -> bool:
        return round_.group_rank == 0

    def _on_opened(self, opened: down.Rank0Started) -> None:
        if self._is_current(opened.round):
            self._loop.post(GlobalRank0Started(number=opened.round))

    def _on_roster(self, roster: down.RoundSummary) -> None:
        """A round without this node. Said once, not again with every round that others form meanwhile."""
        self._memory.take_roster(roster, None)
        if roster.is_spare and not self._spare_told:
            self._spare_told = True
            self.tell(f"all {self._config.max_nodes} nodes that --nnodes allows are there: waiting as a spare")

    def _on_settled(self, settled: down.RoundCommitted) -> None:
        self._memory.settle(settled.round)

    def _on_broken(self, broken: down.RoundBreak) -> None:
        if broken.round != self._memory.round:
            return
        self._memory.take_break(broken)
        if self._is_running:
            self._post_break(broken.kind, broken.reason, want_stacks=broken.want_stacks)
        else:
            self._session.send(up.build_stopped(broken.round, self._ports.offered))

    def _post_break(self, kind: BreakKind, reason: str, *, want_stacks: bool = False) -> None:
        if self._round is None or not self._is_running or kind in self._kinds_posted:
            return
        self._kinds_posted.add(kind)
        self._loop.post(RoundBroken(number=self._round.number, kind=kind, reason=reason, want_stacks=want_stacks))

    # -- the end ----------------------------------------------------------------------------------------------------

    def _on_verdict(self, verdict: down.JobEnd) -> None:
        self._verdict = self._session.office.verdict = verdict
        self._session.send(up.build_end_acknowledgement())

    def _on_exit(self, _exit: down.Exit) -> None:
        self.finish()

    def _on_hopeless(self, hopeless: down.RendezvousFailure) -> None:
        self.lose_all(hopeless.reason)

    def _on_rejected(self, rejected: down.Rejected) -> None:
        self.lose_all(rejected.reason, usage=rejected.usage)

    def finish(self) -> None:
        """See `Part`."""
        verdict = self._verdict
        if self._over or verdict is None:
            return
        self._over = True
        self._session.be_still()
        self._loop.post(
            JobEnded(succeeded=verdict.succeeded, report=verdict.report, prints_report=verdict.prints_report)
        )

    def lose_all(self, reason: str, *, usage: bool = False) -> None:
        """See `Part`."""
        if self._over:
            return
        self._over = True
        self._session.be_still()
        self._loop.post(RendezvousFailed(reason=reason, usage=usage))


_TAKERS: dict[type, str] = {
    down.RoundStart: "_on_seated",
    down.RoundSummary: "_on_roster",
    down.Rank0Started: "_on_opened",
    down.RoundCommitted: "_on_settled",
    down.RoundBreak: "_on_broken",
    down.JobEnd: "_on_verdict",
    down.Exit: "_on_exit",
    down.RendezvousFailure: "_on_hopeless",
    down.Rejected: "_on_rejected",
}
