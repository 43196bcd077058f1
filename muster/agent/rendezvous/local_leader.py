"""The leader of one node alone: runs the consensus with that node as the only member, without a link.

`one_node` loads it when there is something to decide. A handler of torch's forms the rounds of its nodes itself, but
each of them decides alone what follows from its failures: `torch_handlers.rendezvous`.
"""

from collections import deque

from muster._shared.records import assert_never, replace
from muster._shared.reports import Failure, FinalFailure
from muster.agent.config import RendezvousConfig
from muster.agent.diagnosis.root_cause import DatedFailure, choose_root
from muster.agent.rendezvous.consensus.actions import (
    Action,
    CheckLease,
    DropMembers,
    JobEnd,
    Notify,
    RecoveryChanged,
    RoundBreak,
    RoundStart,
    RoundSummary,
    Send,
    SentMessage,
    SetTimer,
)
from muster.agent.rendezvous.consensus.decisions import decide
from muster.agent.rendezvous.consensus.events import (
    Event,
    Joined,
    LeaseChecked,
    MemberReport,
    Reported,
    RoundAcknowledged,
    TimerFired,
)
from muster.agent.rendezvous.consensus.failures import break_round
from muster.agent.rendezvous.consensus.members import MemberRecord, build_rules
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord, list_news
from muster.agent.rendezvous.consensus.state import FOREVER, Decision, Ending, Forming, Storm, build_initial_state
from muster.agent.rendezvous.interface import BreakKind, JobEnded, Notice, PostEvent, RoundFormed
from muster.agent.rendezvous.round_messages import build_round
from muster.agent.round import PartOffer
from muster.agent.runtime.loop import Loop, Timer
from muster.agent.runtime.persistent import PersistentMap


class LocalLeader:
    """Leads the only member. Close it."""

    def __init__(self, config: RendezvousConfig, loop: Loop, post: PostEvent) -> None:
        """Begin before the first round, which is formed once the member joins.

        Args:
            config: the job's.
            loop: the agent's.
            post: gets the rendezvous events.
        """
        self._config = config
        self._loop = loop
        self._post = post
        state = build_initial_state(build_rules(config), loop.clock.now_s(), takeover=False)
        self._state = replace(state, checkpoint=config.checkpoint)
        self._known = RecoveryRecord()
        """What the node knows of the job."""
        self._events: deque[Event] = deque()
        """Events to be decided; the first one is being decided."""
        self._timer: Timer | None = None

    def join(
        self,
        *,
        nproc: int,
        host: str,
        master: tuple[str, int] = ("", 0),
        can_host_store: bool = False,
        offers: tuple[PartOffer, ...] = (),
    ) -> None:
        """Let the node take part, which forms the first round.

        Args:
            nproc: the number of its workers.
            host: its name in reports.
            master: MASTER_ADDR and MASTER_PORT of the round.
            can_host_store: whether its agent would host the store.
            offers: what it has for features.
        """
        member = MemberRecord(
            id=self._config.run_id,
            index=self._config.node_index,
            nproc=nproc,
            role="",
            host=host,
            address=master[0],
            port=master[1],
            can_host_store=can_host_store,
            is_leader=True,
            offers=offers,
        )
        self._feed(Joined(member=member))

    def receive(self, message: MemberReport) -> None:
        """Decide what follows from a message of the node."""
        self._feed(Reported(id=self._config.run_id, message=message))

    # -- torch's handlers ---------------------------------------------------------------------------------------------

    def take_place(self, group_rank: int) -> None:
        """Begin a round of several nodes, in which the only member has this group rank. Handlers have no storms."""
        assignments = {each.id: replace(each, group_rank=group_rank) for each in self._state.assignments.values()}
        self._state = replace(self._state, assignments=PersistentMap(assignments), storm=Storm())

    def break_round(self, reason: str) -> None:
        """Break the round, because the nodes of the next one are others."""
        self._carry_out(break_round(self._state, BreakKind.MEMBERSHIP, reason, self._loop.clock.now_s()))

    @property
    def has_failed(self) -> bool:
        """Whether the job has failed for good."""
        phase = self._state.phase
        return isinstance(phase, Ending) or (isinstance(phase, Forming) and phase.final is not None)

    def end_job(self, reason: str, root: Failure | None) -> None:
        """End the job, because it has failed for good on another node.

        Args:
            reason: why, in one line.
            root: the root cause.
        """
        state, now_s, final = self._state, self._loop.clock.now_s(), FinalFailure(cause=reason)
        seen = () if root is None else (DatedFailure(when_s=now_s - root.age_s, failure=root),)
        state = replace(state, failures=replace(state.failures, seen=(*state.failures.seen, *seen)))
        if isinstance(state.phase, Forming):
            self._state = replace(state, phase=replace(state.phase, final=final))
        else:
            self._carry_out(break_round(state, BreakKind.FINAL, reason, now_s, final))

    def find_root(self) -> Failure | None:
        """Return the root cause of the round's failures."""
        return choose_root(self._state.failures.seen)

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) > 1:
            return  # from an action: finish the event before first
        while self._events:
            self._carry_out(decide(self._state, self._events[0], self._loop.clock.now_s()))
            self._events.popleft()

    def _carry_out(self, decision: Decision) -> None:
        self._state, actions = decision
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Send() if self._config.run_id not in action.ids:
                pass
            case Send():
                self._pass_on(action.message)
            case Notify():
                self._post(Notice(text=action.text, kind=action.kind, ranks=action.ranks, feature=action.feature))
            case CheckLease():
                self._feed(LeaseChecked(is_held=True))  # no other node can lead
            case SetTimer():
                self._set_timer(action)
            case DropMembers():
                pass  # never the leader's own node
            case _:
                assert_never(action)

    def _pass_on(self, message: SentMessage) -> None:
        """Post what a message to the node means for it."""
        match message:
            case RoundStart():
                formed, self._known = build_round(message, self._config), message.facts.value.recovery
                self.receive(RoundAcknowledged(round_number=formed.number))
                self._post(RoundFormed(round=formed))
            case RoundBreak():
                self._post(message.broken)
            case RecoveryChanged():
                known, self._known = self._known, message.recovery.value
                for event in list_news(known, self._known):
                    self._post(event)
            case JobEnd():
                report = None if message.report is None else message.report.value
                self._post(
                    JobEnded(
                        succeeded=message.succeeded,
                        report=report,
                        prints_report=report is not None,
                        is_drained=message.is_drained,
                    )
                )
            case RoundSummary():
                pass  # the node takes part in all rounds
            case _:
                self._post(message)

    def _set_timer(self, timer: SetTimer) -> None:
        self.close()
        if timer.due_s < FOREVER:
            fired = TimerFired(round_number=timer.round_number)
            self._timer = self._loop.call_at(timer.due_s, lambda: self._feed(fired))

    def close(self) -> None:
        """Stop the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
