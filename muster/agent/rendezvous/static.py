"""Rendezvous of one node with itself: `static` with a MASTER_PORT that was named, and `--standalone`.

Neither needs torch, a connection, or the import of leader and member, which costs more than all the rest here. With
more than one node `member` implements `static`: no node can know alone whether the job has succeeded.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from muster._shared.records import assert_never
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.interface import (
    AllStarted,
    AllSucceeded,
    Asked,
    CheckpointCompleted,
    DrainAsked,
    DrainFollowed,
    DrainReported,
    Leaving,
    PartReport,
    PostEvent,
    Prepared,
    RoundFormed,
    Saved,
    StoodStill,
)
from muster.agent.rendezvous.restart_policy import Leaderless, LocalRestartPolicy, Next
from muster.agent.round import Checkpoint, PartOffer, Round, find_lineage
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.ports import PortReservation

if TYPE_CHECKING:
    from muster.agent.rendezvous.consensus.drain import CommonStepMessage
    from muster.agent.rendezvous.interface import NodeMessage, Stream
    from muster.agent.rendezvous.local_leader import LocalLeader
    from muster.agent.rendezvous.report_messages import Failed, Idle, StacksTaken, Stopped
    from muster.agent.round import PartMemory, PartShare


class StaticRendezvous(Leaderless):
    """Implements `Rendezvous` for a job of one node at an address that never changes."""

    def __init__(
        self, config: RendezvousConfig, *, nproc: int, loop: Loop, post: PostEvent, node_name: str = "localhost"
    ) -> None:
        self._config = config
        self._nproc = nproc
        self._post = post
        self._clock = loop.clock
        self._node_name = node_name
        self._leader: LocalLeader | None = None
        """The leader of the current round, once something was asked for."""
        self._can_host_store: Callable[[], bool] = bool
        self._list_offers: Callable[[], tuple[PartOffer, ...]] = tuple
        self._checkpoint = config.checkpoint
        self._policy = LocalRestartPolicy(loop.clock, post, config, is_alone=True)

    def join(
        self,
        *,
        is_prepared: bool = True,  # noqa: ARG002  # there is nothing to join
        can_host_store: Callable[[], bool] = bool,
        list_offers: Callable[[], tuple[PartOffer, ...]] = tuple,
        on_stream: "Callable[[str, Stream], None] | None" = None,  # noqa: ARG002  # no node connects
    ) -> None:
        """See `Rendezvous`."""
        self._can_host_store, self._list_offers = can_host_store, list_offers
        self._form()

    def _find_master(self) -> tuple[str, int]:
        return self._config.master_addr, self._config.master_port

    def _form(self) -> None:
        self._policy.begin_round()
        memories, shares = self._plan_parts()
        master_addr, master_port = self._find_master()
        hosts_store = self._nproc > 1 and self._can_host_store()
        self._post(
            RoundFormed(
                round=Round(
                    number=self._policy.number,
                    attempt=self._policy.attempt,
                    restarts_left=self._policy.restarts_left,
                    repeats=self._policy.repeats,
                    group_rank=0,
                    group_world_size=1,
                    rank_offset=0,
                    world_size=self._nproc,
                    role_rank_offset=0,
                    role_world_size=self._nproc,
                    master_addr=master_addr,
                    master_port=master_port,
                    use_agent_store=hosts_store,
                    hosts_store=hosts_store,
                    checkpoint=self._checkpoint,
                    lineage=find_lineage(self._policy.number, self._config.run_id),
                    memories=memories,
                    shares=shares,
                )
            )
        )

    def _plan_parts(self) -> "tuple[tuple[PartMemory, ...], tuple[PartShare, ...]]":
        """Have features plan the next round: what they remember, and what their parts here must know."""
        memories = () if self._leader is None else self._leader.memories
        self._leader, offers = None, self._list_offers()
        if not offers and not memories:
            return (), ()
        self._leader = self._create_leader()
        shares = self._leader.plan_parts(offers, memories)
        return self._leader.memories, shares

    def _create_leader(self) -> "LocalLeader":
        from muster.agent.rendezvous.local_leader import LocalLeader

        return LocalLeader(
            self._clock,
            self._post,
            run_id=self._config.run_id,
            round_number=self._policy.number,
            nproc=self._nproc,
            host=self._node_name,
            checkpoint=self._checkpoint,
        )

    def send(self, message: "NodeMessage") -> None:
        """See `Rendezvous`. There is no other node."""
        match message:
            case Prepared() | AllStarted() | Leaving():
                pass
            case AllSucceeded():
                self._end_with_success(message)
            case DrainAsked() | Asked() | StoodStill():
                self._ask(message)
            case DrainReported() | DrainFollowed():
                self._tell(message)
            case Saved():
                self._record_saved(message)
            case PartReport():
                self._ask(message)
            case _:
                self._record(message)

    def _record(self, message: "Failed | Idle | StacksTaken | Stopped") -> None:
        """Record what only a failure, a hang or a person causes. If this node is idle, the job hangs."""
        from muster.agent.rendezvous.report_messages import Failed, Idle, StacksTaken, Stopped

        number = message.round_number
        match message:
            case Failed():
                self._policy.record_failures(number, message.failures, has_stepped=message.has_stepped)
            case Idle():
                if self._config.hang_action == "report":
                    self._policy.record_idle(number, message.failures)
                elif message.failures:
                    self._policy.record_failures(number, message.failures)
            case StacksTaken(number=0):  # of a hang
                if number == self._policy.number:
                    self._policy.print_hang(message.stacks, message.missing)
            case StacksTaken():
                self._tell(message)
            case Stopped():
                following = self._policy.record_stopped(
                    number, message.failures, message.stacks, has_stepped=message.has_stepped
                )
                if following is Next.ROUND:
                    self._form()
                elif following is Next.END:
                    self._policy.end_job(succeeded=False)
            case _:
                assert_never(message)

    def _end_with_success(self, message: AllSucceeded) -> None:
        if not self._is_running(message.round_number):
            return
        if self._leader is not None:
            self._leader.feed(message)
        self._policy.end_job(succeeded=True, is_drained=message.drained_rank is not None)

    def _record_saved(self, message: Saved) -> None:
        is_named = bool(message.path) and message.round_number == self._policy.number
        if is_named:
            number = 1 if self._checkpoint is None else self._checkpoint.number + 1
            self._checkpoint = Checkpoint(number=number, step=message.step, path=message.path)
        if self._leader is not None:
            self._tell(message)
        elif is_named and self._checkpoint is not None:
            self._post(CheckpointCompleted(checkpoint=self._checkpoint))

    def _is_running(self, round_number: int) -> bool:
        return round_number == self._policy.number and self._policy.broken is None

    def _ask(self, message: "CommonStepMessage | PartReport") -> None:
        """Decide on a message that may be the round's first."""
        if self._leader is None and self._is_running(message.round_number):
            self._leader = self._create_leader()
        self._tell(message)

    def _tell(self, message: "CommonStepMessage | PartReport") -> None:
        if self._leader is not None and message.round_number == self._policy.number:
            self._leader.feed(message)

    def close(self) -> None:
        """See `Rendezvous`."""
        self._policy.has_ended = True


class StandaloneRendezvous(StaticRendezvous):
    """A fresh MASTER_PORT for every round, reserved while the round lasts."""

    def __init__(
        self, config: RendezvousConfig, *, nproc: int, loop: Loop, post: PostEvent, node_name: str = "localhost"
    ) -> None:
        super().__init__(config, nproc=nproc, loop=loop, post=post, node_name=node_name)
        self._port: PortReservation | None = None

    def _find_master(self) -> tuple[str, int]:
        old, self._port = self._port, PortReservation()
        if old is not None:
            old.close()
        return self._config.local_addr or "127.0.0.1", self._port.port

    def close(self) -> None:
        """See `Rendezvous`."""
        super().close()
        if self._port is not None:
            self._port.close()
