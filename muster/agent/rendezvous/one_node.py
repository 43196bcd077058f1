"""Rendezvous of a job of one node: `--standalone`, and `static` with one node.

It needs neither torch nor a connection. `local_leader` decides, by the code that decides for any other job. Its import
takes longer than all else here, so it is loaded after the workers have started, or with the first message that needs a
decision. The first round is formed without it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from muster._shared.records import replace
from muster.agent.config import RendezvousConfig
from muster.agent.rendezvous.interface import (
    AllStarted,
    AllSucceeded,
    JobEnded,
    Leaving,
    NodeMessage,
    PostEvent,
    Prepared,
    Rendezvous,
    RendezvousEvent,
    RoundFormed,
)
from muster.agent.round import PartOffer, Round, find_lineage
from muster.agent.runtime.loop import Loop, Timer
from muster.agent.runtime.ports import PortReservation

if TYPE_CHECKING:
    from muster.agent.rendezvous.interface import Stream
    from muster.agent.rendezvous.local_leader import LocalLeader

LOAD_AFTER_S = 1.0
"""How long after the start of the workers the leader is loaded, when they probably do not load their own modules any
more."""


class OneNodeRendezvous(Rendezvous):
    """Implements `Rendezvous` for a job of one node."""

    def __init__(
        self, config: RendezvousConfig, *, nproc: int, loop: Loop, post: PostEvent, node_name: str = "localhost"
    ) -> None:
        self._config = config
        self._nproc = nproc
        self._loop = loop
        self._post = post
        self._node_name = node_name
        self._can_host_store: Callable[[], bool] = bool
        self._list_offers: Callable[[], tuple[PartOffer, ...]] = tuple
        self._reservation: PortReservation | None = None
        self._number = 0
        """The current round; 0 before the first."""
        self._leader: LocalLeader | None = None
        self._timer: Timer | None = None
        self._is_over = False
        """Whether the job has ended, or nothing is wanted any more."""

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
        self._master = self._find_master()
        if offers := list_offers():
            self._load(offers)
        else:
            self._post_new(RoundFormed(round=self._form_first_round()))

    def _find_master(self) -> tuple[str, int]:
        """Return MASTER_ADDR and MASTER_PORT of the next round: a fresh port, reserved while the round lasts."""
        config = self._config
        if not config.standalone:
            return config.master_addr, config.master_port
        old, self._reservation = self._reservation, PortReservation()
        if old is not None:
            old.close()
        return config.local_addr or "127.0.0.1", self._reservation.port

    def _form_first_round(self) -> Round:
        """Form the round that the leader will form."""
        config, nproc = self._config, self._nproc
        hosts_store = nproc > 1 and self._can_host_store()
        return Round(
            number=1,
            attempt=0,
            restarts_left=config.max_restarts,
            group_rank=0,
            group_world_size=1,
            rank_offset=0,
            world_size=nproc,
            role_rank_offset=0,
            role_world_size=nproc,
            master_addr=self._master[0],
            master_port=self._master[1],
            use_agent_store=hosts_store,
            hosts_store=hosts_store,
            node_index=config.node_index or 0,
            checkpoint=config.checkpoint,
            lineage=find_lineage(1, config.run_id),
        )

    def _load_early(self) -> None:
        self._load(())

    def _load(self, offers: tuple[PartOffer, ...]) -> "LocalLeader":
        """Return the leader, which forms the first round."""
        if self._leader is None:
            from muster.agent.rendezvous.local_leader import LocalLeader

            self._leader = LocalLeader(self._config, self._loop, self._post_new)
            self._leader.join(
                nproc=self._nproc,
                host=self._node_name,
                master=self._master,
                can_host_store=self._can_host_store(),
                offers=offers,
            )
        return self._leader

    def _post_new(self, event: RendezvousEvent) -> None:
        """Post an event, unless it is the round that was formed before the leader was loaded."""
        if isinstance(event, RoundFormed):
            if event.round.number == self._number:
                return
            self._number = event.round.number
        self._is_over = self._is_over or isinstance(event, JobEnded)
        self._post(event)

    def send(self, message: NodeMessage) -> None:
        """See `Rendezvous`. There is no other node."""
        if self._is_over or isinstance(message, Prepared | Leaving) or message.round_number != self._number:
            return
        match message:
            case AllStarted():
                if self._leader is None:
                    self._timer = self._loop.call_later(LOAD_AFTER_S, self._load_early)
            case AllSucceeded() if self._leader is None:
                self._post_new(JobEnded(succeeded=True))
            case _:
                self._decide(message)

    def _decide(self, message: NodeMessage) -> None:
        from muster.agent.rendezvous.report_messages import Stopped

        leader = self._load(())
        if isinstance(message, Stopped):
            self._master = self._find_master()
            can_host_store, offers = self._can_host_store(), self._list_offers()
            message = replace(message, port=self._master[1], can_host_store=can_host_store, offers=offers)
        leader.receive(message)

    def close(self) -> None:
        """See `Rendezvous`."""
        self._is_over = True
        for closing in (self._leader, self._reservation):
            if closing is not None:
                closing.close()
        if self._timer is not None:
            self._timer.cancel()
