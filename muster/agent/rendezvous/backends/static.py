"""Rendezvous of one node with itself: `static` with a MASTER_PORT that was named, and `--standalone`.

Neither needs torch, a connection, or the import of leader and member, which costs more than all the rest here. With
more than one node `member` implements `static`: no node can know alone whether the job has succeeded.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from muster._shared.contract import AskKind
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.backends.restart_policy import LocalRestartPolicy, Next
from muster.agent.rendezvous.interface import (
    CheckpointCompleted,
    DrainReport,
    LateRank,
    PostEvent,
    RoundFormed,
)
from muster.agent.round import Checkpoint, Round
from muster.agent.runtime.loop import Loop
from muster.agent.runtime.ports import PortReservation

if TYPE_CHECKING:  # only a failure loads the report
    from muster._shared.reports import Failure, Stack
    from muster.agent.rendezvous.backends.local_leader import LocalEvent, LocalLeader


_ID = "this"
"""`local_leader.MEMBER_ID`."""


class StaticRendezvous:
    """Implements `Rendezvous` for a job of one node, at an address that never changes."""

    def __init__(
        self, config: RendezvousConfig, *, nproc: int, loop: Loop, post: PostEvent, node_name: str = "localhost"
    ) -> None:
        self._config = config
        self._nproc = nproc
        self._post = post
        self._clock = loop.clock
        self._node_name = node_name
        self._leader: LocalLeader | None = None
        """Of the current round, once something was asked for."""
        self._can_host_store: Callable[[], bool] = bool
        self._checkpoint = config.checkpoint
        self._policy = LocalRestartPolicy(loop.clock, post, config)

    def join(self, *, is_prepared: bool = True, can_host_store: Callable[[], bool] = bool) -> None:  # noqa: ARG002
        """See `Rendezvous`."""
        self._can_host_store = can_host_store
        self._form()

    def report_prepared(self) -> None:
        """See `Rendezvous`. There is no other node."""

    def _find_master(self) -> tuple[str, int]:
        return self._config.master_addr, self._config.master_port

    def _form(self) -> None:
        self._policy.begin_round()
        self._leader = None
        master_addr, master_port = self._find_master()
        hosts_store = self._nproc > 1 and self._can_host_store()
        self._post(
            RoundFormed(
                round=Round(
                    number=self._policy.number,
                    attempt=self._policy.attempt,
                    restarts_left=self._policy.restarts_left,
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
                )
            )
        )

    def report_started(self, round_number: int) -> None:
        """See `Rendezvous`. There is no other node."""

    def report_failures(self, round_number: int, failures: "tuple[Failure, ...]") -> None:
        """See `Rendezvous`."""
        self._policy.record_failures(round_number, failures)

    def report_idle(self, round_number: int, failures: "tuple[Failure, ...]", *, is_urgent: bool = False) -> None:  # noqa: ARG002
        """See `Rendezvous`. There is no other node: if this one is idle, the job hangs."""
        if self._config.hang_action == "report":
            self._policy.record_idle(round_number, failures)
        elif failures:
            self.report_failures(round_number, failures)

    def report_still(self, round_number: int, for_s: float) -> None:
        """See `Rendezvous`. There is no other node."""
        from muster.agent.rendezvous.consensus.events import StoodStill

        self._ask(StoodStill(id=_ID, round_number=round_number, for_s=for_s))

    def report_succeeded(self, round_number: int, drained_rank: int | None = None) -> None:
        """See `Rendezvous`."""
        if not self._is_running(round_number):
            return
        if self._leader is not None:
            from muster.agent.rendezvous.consensus.events import Succeeded

            self._leader.feed(Succeeded(id=_ID, round_number=round_number, drained_rank=drained_rank))
        self._policy.end_job(succeeded=True, is_drained=drained_rank is not None)

    def ask_drain(self, round_number: int, reason: str, limit_s: float) -> None:
        """See `Rendezvous`. This node alone decides."""
        from muster.agent.rendezvous.consensus.events import DrainAsked

        self._ask(DrainAsked(id=_ID, round_number=round_number, reason=reason, limit_s=limit_s))

    def report_drain(self, round_number: int, drain: int, report: DrainReport) -> None:
        """See `Rendezvous`."""
        from muster.agent.rendezvous.consensus.events import DrainReported

        self._tell(DrainReported(id=_ID, round_number=round_number, drain=drain, report=report))

    def report_followed(self, round_number: int, drain: int, late: tuple[LateRank, ...]) -> None:
        """See `Rendezvous`."""
        from muster.agent.rendezvous.consensus.events import DrainFollowed

        self._tell(DrainFollowed(id=_ID, round_number=round_number, drain=drain, late=late))

    def ask(self, round_number: int, request: int, kind: AskKind, limit_s: float) -> None:
        """See `Rendezvous`. This node alone answers."""
        from muster.agent.rendezvous.consensus.events import Asked

        self._ask(Asked(id=_ID, round_number=round_number, request=request, kind=kind, limit_s=limit_s))

    def report_stacks(self, round_number: int, number: int, stacks: "tuple[Stack, ...]", missing: int) -> None:
        """See `Rendezvous`. Number 0 is that of a hang."""
        if number == 0:
            if round_number == self._policy.number:
                self._policy.print_hang(stacks, missing)
            return
        from muster.agent.rendezvous.consensus.events import StacksTaken

        self._tell(StacksTaken(id=_ID, round_number=round_number, number=number, stacks=stacks, missing=missing))

    def report_saved(self, round_number: int, step: int, path: str) -> None:
        """See `Rendezvous`. There is no other node."""
        if path and round_number == self._policy.number:
            number = 1 if self._checkpoint is None else self._checkpoint.number + 1
            self._checkpoint = Checkpoint(number=number, step=step, path=path)
        if self._leader is None:
            if path and self._checkpoint is not None and round_number == self._policy.number:
                self._post(CheckpointCompleted(checkpoint=self._checkpoint))
            return
        from muster.agent.rendezvous.consensus.events import Saved

        self._tell(Saved(id=_ID, round_number=round_number, step=step, path=path))

    def _is_running(self, round_number: int) -> bool:
        return round_number == self._policy.number and self._policy.broken is None

    def _ask(self, event: "LocalEvent") -> None:
        """Feed an event that may be the round's first."""
        if self._leader is None and self._is_running(event.round_number):
            from muster.agent.rendezvous.backends.local_leader import LocalLeader

            self._leader = LocalLeader(
                self._clock,
                self._post,
                round_number=event.round_number,
                nproc=self._nproc,
                host=self._node_name,
                checkpoint=self._checkpoint,
            )
        self._tell(event)

    def _tell(self, event: "LocalEvent") -> None:
        if self._leader is not None and event.round_number == self._policy.number:
            self._leader.feed(event)

    def report_stopped(
        self, round_number: int, failures: "tuple[Failure, ...]" = (), stacks: "tuple[Stack, ...]" = ()
    ) -> None:
        """See `Rendezvous`."""
        following = self._policy.record_stopped(round_number, failures, stacks)
        if following is Next.ROUND:
            self._form()
        elif following is Next.END:
            self._policy.end_job(succeeded=False)

    def report_leaving(self, reason: str, *, ends_job: bool = False, is_interrupt: bool = False) -> None:
        """See `Rendezvous`. There is no other node."""

    def close(self) -> None:
        """See `Rendezvous`."""
        self._policy.has_ended = True


class StandaloneRendezvous(StaticRendezvous):
    """A fresh MASTER_PORT for every round, held while the round lasts."""

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
