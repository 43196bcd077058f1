"""Puts a rendezvous of torch's registry behind our protocol: `c10d-torch`, `etcd`, `etcd-v2`, third-party ones.

torch's handlers block. So one thread owns the handler, carries out the loop's commands and posts what it finds on the
loop. What the handler cannot do is not imitated: every agent has its own restart budget, and each node reports its own
failures. Through the round's store (`watch`) the agents agree on the end of the job and on lost nodes. torch's agent
instead waits for 300 s and counts that as success.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from muster._shared.contract import AskOutcome
from muster._shared.records import assert_never
from muster._shared.reports import Answer
from muster.agent.config import RendezvousConfig
from muster.agent.errors import UsageError
from muster.agent.rendezvous.interface import (
    AllStarted,
    AllSucceeded,
    Asked,
    BreakKind,
    DrainAsked,
    DrainFollowed,
    DrainReported,
    DrainWithdrawn,
    Leaving,
    NodeMessage,
    Notice,
    NoticeKind,
    PartReport,
    PostEvent,
    Prepared,
    Rendezvous,
    RendezvousFailed,
    RequestAnswered,
    RoundFormed,
    Saved,
    StacksWanted,
    StoodStill,
)
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
from muster.agent.rendezvous.torch_handlers.restart_policy import LocalRestartPolicy, Next
from muster.agent.rendezvous.torch_handlers.thread import HandlerThread
from muster.agent.rendezvous.torch_handlers.watch import FailedElsewhere, NodeLost
from muster.agent.round import PartOffer, Round
from muster.agent.runtime.loop import Loop, Timer

if TYPE_CHECKING:
    from muster.agent.rendezvous.interface import Stream

STANDSTILL = 1
"""The number of stacks that are wanted because the job stands still. Those of a hang have 0."""

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
    ) -> None:
        """Keep `make_thread`, which makes the owner of the handler: a thread of this agent, or of its program."""
        self._config = config
        self._loop = loop
        self._post = post
        self._policy = LocalRestartPolicy(loop.clock, post, config)
        self._closed = False
        self._awaits_round = False
        """Whether no worker is left and the next round has not formed."""
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
        if self._closed:
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
                self._policy.end_job(succeeded=finding.succeeded)
            case RendezvousFailed():
                if not self._policy.has_ended:
                    self._policy.has_ended = True
                    self._post(finding)
            case AllStandStill():
                if self._is_still():
                    self._post(StacksWanted(round_number=self._policy.number, number=STANDSTILL))
            case Notice():
                self._post(finding)
            case _:
                assert_never(finding)

    def _begin_round(self, formed: HandlerFormedRound) -> None:
        self._stop_wait_timer()
        if self._policy.has_ended:
            return
        self._awaits_round = self._has_told_still = False
        self._still_since_s = None
        self._policy.begin_round()
        self._post(
            RoundFormed(
                round=Round(
                    number=self._policy.number,
                    attempt=self._policy.attempt,
                    restarts_left=self._policy.restarts_left,
                    repeats=self._policy.repeats,
                    group_rank=formed.group_rank,
                    group_world_size=formed.group_world_size,
                    rank_offset=formed.rank_offset,
                    world_size=formed.world_size,
                    role_rank_offset=formed.role_rank_offset,
                    role_world_size=formed.role_world_size,
                    master_addr=formed.master_addr,
                    master_port=formed.master_port,
                    use_agent_store=formed.use_agent_store,
                    node_index=formed.group_rank if self._config.node_index is None else self._config.node_index,
                )
            )
        )

    def _break_round(self, reason: str) -> None:
        """Break the round, so that all agents go to the next one."""
        if not self._policy.has_ended and self._policy.broken is None:
            self._thread.send_command(Command(order=Order.PAUSE))
            self._policy.break_round(BreakKind.MEMBERSHIP, reason)

    def _handle_failed_elsewhere(self, found: FailedElsewhere) -> None:
        if self._policy.has_ended:
            return
        self._policy.record_failed_elsewhere(found.reason, found.root)
        if self._awaits_round:
            self._policy.end_job(succeeded=False)

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
        self._seek_round()

    def _seek_round(self) -> None:
        self._thread.send_command(Command(order=Order.NEXT))
        self._wait_timer = self._loop.call_later(FIRST_WAIT_LINE_S, self._tell_wait)

    def _tell_wait(self) -> None:
        if self._policy.has_ended:
            return
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
        number = message.round_number if not isinstance(message, Prepared | Leaving) else self._policy.number
        match message:
            case StoodStill():
                self._record_still(message)
            case Prepared() | AllStarted() | Leaving() | Saved() | PartReport():
                pass  # the joined nodes form a round; the others miss heartbeats
            case Idle() if self._config.hang_action == "report":
                self._policy.record_idle(number, message.failures)
            case Failed() | Idle():  # others cannot report progress: idle means failed
                self._record_failures(message)
            case AllSucceeded() | StacksTaken():
                self._record_end_or_stacks(message)
            case Stopped():
                self._record_stopped(message)
            case DrainAsked():
                why = f"--rdzv-backend {self._config.backend} cannot agree on a step"
                self._post(DrainWithdrawn(round_number=number, drain=0, reason=why))
            case Asked():
                line = f"--rdzv-backend {self._config.backend} cannot pass it on to the other nodes"
                answer = Answer(outcome=AskOutcome.REFUSED, line=line)
                self._post(RequestAnswered(request=message.request, answer=answer))
            case DrainReported() | DrainFollowed():
                pass
            case _:
                assert_never(message)

    def _record_end_or_stacks(self, message: AllSucceeded | StacksTaken) -> None:
        if message.round_number != self._policy.number:
            return
        if isinstance(message, StacksTaken) and message.number == STANDSTILL:
            self._tell_standstill(message)
        elif isinstance(message, StacksTaken):  # of a hang
            self._policy.print_hang(message.stacks, message.missing)
        elif self._policy.broken is None:
            self._thread.send_command(Command(order=Order.DONE))

    def _is_still(self) -> bool:
        return self._still_since_s is not None and self._policy.broken is None and not self._policy.has_ended

    def _record_still(self, message: StoodStill) -> None:
        """Let the other nodes know that the workers of this one stand still, or continue."""
        if message.round_number != self._policy.number or self._policy.has_ended:
            return
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
        from muster.agent.diagnosis.hangs.page import format_standstill

        text = format_standstill(message.stacks, self._loop.clock.now_s() - self._still_since_s)
        if text is not None:
            self._has_told_still = True
            self._post(Notice(text=text, kind=NoticeKind.STILL))

    def _record_failures(self, message: Failed | Idle) -> None:
        has_stepped = isinstance(message, Failed) and message.has_stepped
        if message.failures and self._policy.record_failures(
            message.round_number, message.failures, has_stepped=has_stepped
        ):
            final, root = self._policy.final, self._policy.get_root()
            if final is None:
                self._thread.send_command(Command(order=Order.PAUSE))
            else:
                self._thread.send_command(Command(order=Order.FAIL, reason=final.describe(), root=root))

    def _record_stopped(self, message: Stopped) -> None:
        following = self._policy.record_stopped(
            message.round_number, message.failures, message.stacks, has_stepped=message.has_stepped
        )
        if following is Next.ROUND:
            self._awaits_round = True
            self._seek_round()
        elif following is Next.END:
            self._thread.send_command(Command(order=Order.AWAIT_END))

    def close(self) -> None:
        """See `Rendezvous`."""
        if self._closed:
            return
        self._closed = self._policy.has_ended = True
        self._stop_wait_timer()
        self._thread.stop()


def create_torch_rendezvous(
    config: RendezvousConfig, nproc: int, role: str, loop: Loop, post: PostEvent
) -> TorchRendezvous:
    """Return the handler that `config` names, in a thread of this agent or of the program that drives it.

    Args:
        config: where and how the nodes find each other.
        nproc: workers on this node.
        role: the role whose role ranks are counted together.
        loop: the agent's.
        post: gets the events, on the loop.

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
    return TorchRendezvous(config, loop=loop, post=post, make_thread=make_thread)
