"""Puts a rendezvous of torch's registry behind our protocol: `c10d-torch`, `etcd`, `etcd-v2`, third-party ones.

torch's handlers block. So one thread owns the handler, carries out the loop's commands and posts what it finds on the
loop. What the handler cannot do is not imitated: every agent has its own restart budget and reports its own failures,
and its own `LocalLeader` decides what follows from them. Through the round's store (`watch`) the agents agree on the
end of the job and on lost nodes. torch's agent instead waits for 300 s and counts that as success.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from muster._shared.contract import AskOutcome
from muster._shared.records import assert_never, replace
from muster._shared.reports import Answer
from muster.agent.config import RendezvousConfig
from muster.agent.errors import UsageError
from muster.agent.rendezvous.interface import (
    AllStarted,
    AllSucceeded,
    Asked,
    BreakKind,
    DrainAsked,
    DrainDone,
    DrainReported,
    DrainWithdrawn,
    JobEnded,
    Leaving,
    NodeMessage,
    Notice,
    NoticeKind,
    PartReport,
    PostEvent,
    Prepared,
    Rendezvous,
    RendezvousEvent,
    RendezvousFailed,
    RequestAnswered,
    RoundBroken,
    RoundFormed,
    Saved,
    StacksWanted,
    StoodStill,
)
from muster.agent.rendezvous.local_leader import LocalLeader
from muster.agent.rendezvous.report_messages import Failed, Idle, StacksTaken, Stopped
from muster.agent.rendezvous.torch_handlers.messages import (
    AllStandStill,
    Command,
    EndKnown,
    HandlerFormedRound,
    NodesWaiting,
    Order,
    ThreadFinding,
)
from muster.agent.rendezvous.torch_handlers.thread import HandlerThread
from muster.agent.rendezvous.torch_handlers.watch import FailedElsewhere, NodeLost
from muster.agent.round import PartOffer, Round
from muster.agent.runtime.loop import Loop, Timer

if TYPE_CHECKING:
    from muster.agent.rendezvous.interface import Stream

STANDSTILL = 0
"""The number of stacks that are wanted because the job stands still. Those of a hang have others."""

FIRST_WAIT_LINE_S = 10.0
"""After this time without a round a line says so, and again after each `NEXT_WAIT_LINE_S`. torch's import counts."""
NEXT_WAIT_LINE_S = 60.0

CALLERS_NAME = "caller"
"""The handler is an object of the program that drives this agent, see `caller`."""


class CommandThread(Protocol):
    """`thread.HandlerThread`, or `caller.CallerThread`, which passes all calls on to one."""

    def start(self) -> None:
        """Begin."""
        ...

    def send_command(self, command: Command) -> None:
        """See `HandlerThread`."""
        ...

    def stop(self) -> None:
        """End."""
        ...


class TorchRendezvous(Rendezvous):
    """Implements `Rendezvous` with a handler of torch's."""

    def __init__(
        self,
        config: RendezvousConfig,
        *,
        loop: Loop,
        post: PostEvent,
        make_thread: "Callable[[TorchRendezvous], CommandThread]",
        node_name: str = "localhost",
    ) -> None:
        """Keep `make_thread`, which makes the owner of the handler: a thread of this agent, or of its program."""
        self._config = config
        self._loop = loop
        self._post = post
        self._node_name = node_name
        alone = replace(config, min_nodes=1, max_nodes=1, checkpoint=None)
        self._leader = LocalLeader(alone, loop, self._post_decided)
        self._number = 0
        """The round of the workers; 0 before the first."""
        self._next: Round | None = None
        """What the leader knows of the next round, while no worker is left and the handler forms it."""
        self._is_broken = False
        """Whether the workers' round is broken."""
        self._is_own = True
        """Whether the job has not failed for good on another node."""
        self._end: JobEnded | None = None
        """How the job has failed, until the other nodes know it."""
        self._has_ended = False
        """Whether the end was posted, or is not wanted any more."""
        self._still_since_s: float | None = None
        """When the workers of this node began to stand still, in this round."""
        self._has_told_still = False
        self._wait_timer: Timer | None = None
        """Runs until a round is formed."""
        self._thread = make_thread(self)

    # -- what the thread finds --------------------------------------------------------------------------------------

    def post_finding(self, finding: ThreadFinding) -> None:
        """Have the loop handle a finding of the thread. If the handler blocks past `close`, the finding is ignored."""
        self._loop.call_from_thread(lambda: self._handle(finding))

    def _handle(self, finding: ThreadFinding) -> None:
        if self._has_ended:
            return
        match finding:
            case HandlerFormedRound():
                self._begin_round(finding)
            case NodesWaiting():
                self._break_round(f"{finding.count} node{'s' if finding.count > 1 else ''} waiting to join")
            case NodeLost():
                self._break_round(f"node {finding.rank} was lost: no heartbeat for {finding.silence_s:g} s")
            case FailedElsewhere():
                self._handle_failed_elsewhere(finding)
            case EndKnown():
                self._end_job(JobEnded(succeeded=True) if finding.succeeded else self._end)
            case RendezvousFailed():
                self._end_job(finding)
            case AllStandStill():
                if self._is_still():
                    self._post(StacksWanted(round_number=self._number, number=STANDSTILL))
            case Notice():
                self._post(finding)
            case _:
                assert_never(finding)

    def _begin_round(self, formed: HandlerFormedRound) -> None:
        self._stop_wait_timer()
        if self._next is None:
            return
        index = formed.group_rank if self._config.node_index is None else self._config.node_index
        new = replace(self._next, **vars(formed), node_index=index, lineage=0)
        self._number, self._next = new.number, None
        self._is_broken = self._has_told_still = False
        self._still_since_s = None
        self._leader.take_place(new.group_rank)
        self._post(RoundFormed(round=new))

    def _break_round(self, reason: str) -> None:
        """Break the round, so that all agents go to the next one."""
        if not self._is_broken:
            self._leader.break_round(reason)

    def _handle_failed_elsewhere(self, found: FailedElsewhere) -> None:
        if self._leader.has_failed:
            return
        self._is_own = False
        self._leader.end_job(found.reason, found.root)
        if self._next is not None:
            self._leader.receive(Stopped(round_number=self._next.number))

    # -- what the leader decides ------------------------------------------------------------------------------------

    def _post_decided(self, event: RendezvousEvent) -> None:
        match event:
            case RoundFormed():
                self._next = event.round
                self._seek_round()
            case RoundBroken() if self._next is None:
                self._is_broken = True
                self._tell_break(event)
                self._post(event)
            case RoundBroken():
                pass  # no worker runs
            case JobEnded() if self._next is None:
                self._end = replace(event, prints_report=self._is_own)
                self._thread.send_command(Command(order=Order.AWAIT_END))
            case JobEnded():
                self._end_job(replace(event, prints_report=self._is_own))
            case _:
                self._post(event)

    def _tell_break(self, broken: RoundBroken) -> None:
        """Tell the thread, which knows it if the job has failed on another node."""
        if broken.kind is not BreakKind.FINAL:
            if not broken.explains:
                self._thread.send_command(Command(order=Order.PAUSE))
        elif self._is_own:
            root = self._leader.find_root()
            self._thread.send_command(Command(order=Order.FAIL, reason=broken.reason, root=root))

    def _end_job(self, end: JobEnded | RendezvousFailed | None) -> None:
        if not self._has_ended and end is not None:
            self._has_ended = True
            self._stop_wait_timer()
            self._post(end)

    # -- called by the supervisor -----------------------------------------------------------------------------------

    def join(
        self,
        *,
        is_prepared: bool = True,  # noqa: ARG002
        can_host_store: Callable[[], bool] = bool,  # noqa: ARG002
        list_offers: Callable[[], tuple[PartOffer, ...]] = tuple,  # noqa: ARG002
        on_stream: "Callable[[str, Stream], None] | None" = None,  # noqa: ARG002
    ) -> None:
        """See `Rendezvous`. torch's handlers decide about the store.

        The nodes agree on nothing for features.
        """
        self._thread.start()
        self._leader.join(nproc=1, host=self._node_name)

    def _seek_round(self) -> None:
        self._thread.send_command(Command(order=Order.NEXT))
        self._wait_timer = self._loop.call_later(FIRST_WAIT_LINE_S, self._tell_wait)

    def _tell_wait(self) -> None:
        config = self._config
        size = (
            str(config.max_nodes) if config.min_nodes == config.max_nodes else f"{config.min_nodes}:{config.max_nodes}"
        )
        place = f" at {config.endpoint}" if config.endpoint else ""
        check = "check that all nodes run, the address and the firewall"
        self._post(Notice(text=f"no round yet: {config.backend}{place}, --nnodes {size}; still trying; {check}"))
        self._wait_timer = self._loop.call_later(NEXT_WAIT_LINE_S, self._tell_wait)

    def _stop_wait_timer(self) -> None:
        if self._wait_timer is not None:
            self._wait_timer.cancel()
            self._wait_timer = None

    def send(self, message: NodeMessage) -> None:
        """See `Rendezvous`. The other nodes do not learn what the handlers cannot pass on."""
        if isinstance(message, Prepared | Leaving) or message.round_number != self._number or self._has_ended:
            return
        number, backend = message.round_number, self._config.backend
        match message:
            case StoodStill():
                self._record_still(message)
            case AllStarted() | Saved() | PartReport() | DrainReported() | DrainDone():
                pass  # the joined nodes form a round; the others miss heartbeats
            case StacksTaken() if message.number == STANDSTILL:
                self._tell_standstill(message)
            case Failed() | Idle() | StacksTaken() | Stopped():  # others cannot report progress: idle means failed
                self._leader.receive(message)
            case AllSucceeded():
                if not self._is_broken:
                    self._thread.send_command(Command(order=Order.DONE))
            case DrainAsked():
                why = f"--rdzv-backend {backend} cannot agree on a step"
                self._post(DrainWithdrawn(round_number=number, drain=0, reason=why))
            case Asked():
                line = f"--rdzv-backend {backend} cannot pass it on to the other nodes"
                answer = Answer(outcome=AskOutcome.REFUSED, line=line)
                self._post(RequestAnswered(request=message.request, answer=answer))
            case _:
                assert_never(message)

    def _is_still(self) -> bool:
        return self._still_since_s is not None and not self._is_broken

    def _record_still(self, message: StoodStill) -> None:
        """Let the other nodes know that the workers of this one stand still, or continue."""
        is_still = message.for_s > 0.0
        self._still_since_s = self._loop.clock.now_s() - message.for_s if is_still else None
        self._thread.send_command(Command(order=Order.STAND_STILL if is_still else Order.MOVE))
        if self._has_told_still and not is_still:
            from muster.agent.rendezvous.consensus.drain import MOVES

            self._has_told_still = False
            self._post(Notice(text=MOVES.text, kind=MOVES.kind))

    def _tell_standstill(self, message: StacksTaken) -> None:
        """Print what the ranks of this node wait for, because each node judges alone."""
        if not self._is_still() or self._still_since_s is None:
            return
        from muster.agent.diagnosis.hangs import load_judge

        text = load_judge().describe_standstill(message.stacks, self._loop.clock.now_s() - self._still_since_s)
        if text is not None:
            self._has_told_still = True
            self._post(Notice(text=text, kind=NoticeKind.STILL))

    def close(self) -> None:
        """See `Rendezvous`."""
        self._has_ended = True
        self._leader.close()
        self._stop_wait_timer()
        self._thread.stop()


def create_torch_rendezvous(
    config: RendezvousConfig, nproc: int, role: str, loop: Loop, post: PostEvent, node_name: str
) -> TorchRendezvous:
    """Return the handler that `config` names, in a thread of this agent or of the program that drives it.

    Args:
        config: where and how the nodes find each other.
        nproc: workers on this node.
        role: the role whose role ranks are counted together.
        loop: the agent's.
        post: gets the events, on the loop.
        node_name: this machine's name in reports.

    Raises:
        UsageError: no program has started this agent that could have its own handler.
    """
    control_fd = config.control_fd

    def make_thread(owner: TorchRendezvous) -> CommandThread:
        if control_fd is None:
            return HandlerThread(config, nproc, role, owner)
        from muster.agent.rendezvous.torch_handlers.caller import CallerThread

        return CallerThread(control_fd, loop, owner)

    if config.backend == CALLERS_NAME and control_fd is None:
        raise UsageError("--rdzv-backend caller: only a program that starts the agent can have a handler of its own")
    return TorchRendezvous(config, loop=loop, post=post, make_thread=make_thread, node_name=node_name)
