"""One node's part in the job: its rounds and the job's end, reported to the supervisor.

`session` reaches the leader, and handles its loss. Over 400 lines: one class does all that `rendezvous.interface` asks.
"""

import os
from collections.abc import Callable

from muster import __version__
from muster._shared.codec import clean_name
from muster._shared.contract import AskOutcome
from muster._shared.processes import read_peak_bytes
from muster._shared.records import replace
from muster._shared.reports import Answer
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.consensus.actions import JobEnd, RoundBreak, RoundCommitted
from muster.agent.rendezvous.consensus.events import RoundAcknowledged
from muster.agent.rendezvous.interface import (
    AllStarted,
    Asked,
    BreakKind,
    CheckpointCompleted,
    JobEnded,
    Lease,
    Leaving,
    NodeMessage,
    Notice,
    NoticeKind,
    PostEvent,
    Prepared,
    RendezvousFailed,
    RequestAnswered,
    RoundBroken,
    RoundFormed,
)
from muster.agent.rendezvous.member.master_ports import MasterPorts
from muster.agent.rendezvous.member.recovery import RecoveryTracker
from muster.agent.rendezvous.member.session import Session
from muster.agent.rendezvous.protocol import leader_messages as down
from muster.agent.rendezvous.protocol import member_messages as up
from muster.agent.rendezvous.protocol.job_rules import build_job_rules
from muster.agent.rendezvous.report_messages import Failed, Stopped
from muster.agent.rendezvous.transport.links import Network, Reservation
from muster.agent.round import Checkpoint, Round
from muster.agent.runtime.loop import Loop, Timer

FIRST_WAIT_LINE_S = 3.0
"""After this long, a node that waits for a round says why; then after each `NEXT_WAIT_LINE_S`."""
NEXT_WAIT_LINE_S = 60.0


class Member:
    """Implements `Rendezvous` and `SessionOwner`; every method is called on the loop's thread."""

    def __init__(
        self,
        config: RendezvousConfig,
        *,
        nproc: int,
        role: str,
        loop: Loop,
        post: PostEvent,
        lease: Lease | None,
        node_name: str,
        network: Network | None,
        reserve: Callable[[], Reservation],
        member_id: str | None = None,
    ) -> None:
        self._config = config
        self._nproc = nproc
        self._role = role
        self._post = post
        self._node_name = node_name
        self._id = member_id or os.urandom(8).hex()
        self._recovery = RecoveryTracker(config.checkpoint)
        self._ports = MasterPorts(reserve)
        self._session = Session(config, self._id, self._recovery, self, loop=loop, network=network, lease=lease)
        self._loop = loop
        self._waits_since_s = 0.0
        self._has_reported_wait = False
        """Since the last round began."""
        self._wait_timer: Timer | None = None
        self._is_running = False
        """Workers of a round may be alive here: from RoundFormed to `Stopped`. It is the last one that
        `RecoveryTracker` knows."""
        self._kinds_posted: set[BreakKind] = set()
        self._job_end: JobEnd | None = None
        self._peak_bytes = 0
        """Of the job's largest worker, as the leader has it."""
        self._has_ended = False
        self._closed = False
        self._has_reported_spare = False
        self._can_host_store: Callable[[], bool] = bool
        self._is_prepared = True
        self._has_reported_prepared = True
        """The leader knows it, or will with the next join."""

    # -- called by the supervisor -----------------------------------------------------------------------------------

    def join(self, *, is_prepared: bool = True, can_host_store: Callable[[], bool] = bool) -> None:
        """See `Rendezvous`."""
        self._is_prepared = is_prepared
        self._can_host_store = can_host_store
        self._ports.offer()
        self._begin_wait()
        self._session.start()

    def send(self, message: NodeMessage) -> None:
        """See `Rendezvous`. A message about a round that is not the current one is dropped."""
        match message:
            case Prepared():
                self._is_prepared = True
                self.send_prepared()
            case Leaving():
                self._session.send(message)
            case Failed() if self._session.check_expiry():
                pass  # the guard killed these workers: they did not fail
            case _ if not self._is_current(message.round_number):
                if isinstance(message, Asked):
                    self._refuse(message)
            case Stopped():
                self._report_stopped(message)
            case Asked() if not self._session.is_accepted:
                self._refuse(message)
            case AllStarted() if self._recovery.group_rank != 0:
                pass  # only of global rank 0's node it is awaited
            case _:
                self._session.send(message)

    def _refuse(self, asked: Asked) -> None:
        answer = Answer(outcome=AskOutcome.LOST, line="the leader was lost: ask again when the job goes on")
        self._post(RequestAnswered(request=asked.request, answer=answer))

    def _report_stopped(self, stopped: Stopped) -> None:
        if self._closed or self._has_ended:
            return
        self._is_running = False
        self._begin_wait()
        self._session.end_round()
        self._ports.offer()
        self._session.report_or_rejoin(self._complete(stopped))

    def close(self) -> None:
        """See `Rendezvous`."""
        if self._closed:
            return
        self._closed = self._has_ended = True
        self._end_wait()
        self._session.close()
        self._ports.close()

    def _is_current(self, round_number: int) -> bool:
        return self._is_running and self._recovery.round_number == round_number

    def _begin_wait(self) -> None:
        """Say why this node waits, if it does so for long. Nothing happens if it waits already."""
        if self._wait_timer is None:
            self._waits_since_s = self._loop.clock.now_s()
            self._wait_timer = self._loop.call_later(FIRST_WAIT_LINE_S, self._report_wait)

    def _report_wait(self) -> None:
        line = self._session.describe_wait(self._loop.clock.now_s() - self._waits_since_s)
        if line is not None:
            self._has_reported_wait = True
            self.post_notice(line)
        self._wait_timer = self._loop.call_later(NEXT_WAIT_LINE_S, self._report_wait)

    def _end_wait(self) -> None:
        if self._wait_timer is not None:
            self._wait_timer.cancel()
            self._wait_timer = None

    def post_notice(self, text: str, kind: NoticeKind = NoticeKind.LINE, *, is_leader_lost: bool = False) -> None:
        """See `SessionOwner`."""
        self._post(Notice(text=text, kind=kind, is_leader_lost=is_leader_lost))

    # -- called by the session --------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """See `SessionOwner`."""
        return self._is_running

    @property
    def has_ended(self) -> bool:
        """See `SessionOwner`."""
        return self._has_ended

    @property
    def has_job_end(self) -> bool:
        """See `SessionOwner`."""
        return self._job_end is not None

    def build_join(self, listen_port: int) -> up.Join:
        """See `SessionOwner`."""
        self._has_reported_prepared = self._is_prepared
        return up.Join(
            run_id=clean_name(self._config.run_id),
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
            can_host_store=self._can_host_store(),
            stop_limit_s=min(self._config.stop_limit_s, 1e7),
            release=__version__,
            recovery_state=replace(self._recovery.state, leader_id=self._recovery.leader_id),
        )

    def send_prepared(self) -> None:
        """See `SessionOwner`."""
        if self._is_prepared and not self._has_reported_prepared and self._session.is_accepted:
            self._has_reported_prepared = True
            self._session.send(Prepared())

    def handle_message(self, message: down.JobMessage) -> None:
        """See `SessionOwner`."""
        match message:
            case down.RoundStart():
                self._on_round_start(message)
            case down.RoundSummary():
                self._on_round_summary(message)
            case RoundCommitted():
                self._recovery.record_commit(message.round_number)
            case RoundBreak():
                self._on_round_break(message)
            case CheckpointCompleted():
                self._record_checkpoint(message.checkpoint)
            case JobEnd():
                self._on_job_end(message)
            case down.Exit():
                self._peak_bytes = message.peak_bytes
                self.post_job_end()
            case RendezvousFailed() | down.Rejected():
                self.fail(message.reason, usage=message.usage)
            case RequestAnswered():
                self._post(message)
            case _:
                if self._is_current(message.round_number):
                    self._post(message)

    def fence(self, reason: str) -> None:
        """See `SessionOwner`."""
        number = self._recovery.round_number
        self._post_break(RoundBroken(round_number=number, kind=BreakKind.FENCED, reason=reason))

    # -- rounds -----------------------------------------------------------------------------------------------------

    def _on_round_start(self, start: down.RoundStart) -> None:
        if not self._session.listen_as_successor(start):
            return
        formed, hosts_rank_0 = self._build_round(start), start.group_rank == 0
        self._recovery.record_round(start.facts.value, start.quorum_rounds, start.group_rank)
        self._record_checkpoint(start.facts.value.checkpoint)
        self._is_running = True
        self._end_wait()
        if self._has_reported_wait:  # else the last line would still say that it waits
            self._has_reported_wait = False
            nodes, goes_on = formed.group_world_size, "goes on" if formed.number > 1 else "starts"
            self.post_notice(f"{nodes} of {self._config.max_nodes} nodes are here: the job {goes_on}")
        self._has_reported_spare = False
        self._kinds_posted = set()
        self._ports.begin_round(hosts_rank_0=hosts_rank_0)
        self._session.begin_round(
            alone=formed.group_world_size == 1,
            acknowledgement=RoundAcknowledged(round_number=formed.number),
        )
        self._post(RoundFormed(round=formed, is_held=not hosts_rank_0))

    def _record_checkpoint(self, checkpoint: Checkpoint | None) -> None:
        if self._recovery.record_checkpoint(checkpoint) and checkpoint is not None:
            self._post(CheckpointCompleted(checkpoint=checkpoint))

    def _build_round(self, start: down.RoundStart) -> Round:
        """Add what the leader cannot know: this node's index, and the address that `static` was given here."""
        facts, config = start.facts.value, self._config
        return Round(
            number=facts.round_number,
            attempt=facts.attempt,
            restarts_left=facts.restarts_left,
            group_rank=start.group_rank,
            group_world_size=facts.group_world_size,
            rank_offset=start.rank_offset,
            world_size=facts.world_size,
            role_rank_offset=start.role_rank_offset,
            role_world_size=start.role_world_size,
            master_addr=self._session.static_master_addr if config.lends_endpoint else facts.master_addr,
            master_port=config.master_port if config.lends_endpoint else facts.master_port,
            use_agent_store=facts.use_agent_store,
            hosts_store=facts.use_agent_store and start.group_rank == 0,
            node_index=config.node_index or 0,
            checkpoint=facts.checkpoint,
        )

    def _complete(self, stopped: Stopped) -> Stopped:
        """Add what this node offers for the next round."""
        return replace(stopped, port=self._ports.offered, can_host_store=self._can_host_store())

    def _on_round_summary(self, summary: down.RoundSummary) -> None:
        """A round formed without this node. Posted once, not with every round that the others form meanwhile."""
        self._recovery.record_round(summary.facts.value, summary.quorum_rounds, None)
        if summary.is_spare and not self._has_reported_spare:
            self._has_reported_spare = True
            self._end_wait()
            self.post_notice(f"all {self._config.max_nodes} nodes that --nnodes allows have joined: waiting as a spare")

    def _on_round_break(self, message: RoundBreak) -> None:
        number = message.broken.round_number
        if number != self._recovery.round_number:
            return
        self._recovery.record_break(message)
        if self._is_running:
            self._post_break(message.broken)
        else:
            self._session.send(self._complete(Stopped(round_number=number)))

    def _post_break(self, broken: RoundBroken) -> None:
        if self._is_running and broken.kind not in self._kinds_posted:
            self._kinds_posted.add(broken.kind)
            self._post(replace(broken, is_leader=self._session.is_leading))

    # -- the end ----------------------------------------------------------------------------------------------------

    def _on_job_end(self, job_end: JobEnd) -> None:
        self._job_end = self._session.server.job_end = job_end
        self._session.send(up.EndAcknowledged(peak_bytes=read_peak_bytes()))

    def post_job_end(self) -> None:
        """See `SessionOwner`."""
        job_end = self._job_end
        if self._has_ended or job_end is None:
            return
        self._has_ended = True
        self._end_wait()
        self._session.stop()
        report = None if job_end.report is None else job_end.report.value
        ended = JobEnded(
            succeeded=job_end.succeeded,
            report=report,
            prints_report=job_end.printer_id == self._id,
            is_drained=job_end.is_drained,
            peak_bytes=self._peak_bytes,
        )
        self._post(ended)

    def fail(self, reason: str, *, usage: bool = False) -> None:
        """See `SessionOwner`."""
        if self._has_ended:
            return
        self._has_ended = True
        self._end_wait()
        self._session.stop()
        self._post(RendezvousFailed(reason=reason, usage=usage))
