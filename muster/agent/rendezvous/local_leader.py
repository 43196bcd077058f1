"""The leader of a job of one node: runs the consensus with that node as the only member, without a link.

`one_node` loads it when there is something to decide.
"""

from collections import deque

from muster._shared.records import assert_never, replace
from muster.agent.config import RendezvousConfig
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
from muster.agent.rendezvous.consensus.members import MemberRecord, build_rules
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord, list_news
from muster.agent.rendezvous.consensus.state import FOREVER, build_initial_state
from muster.agent.rendezvous.interface import JobEnded, Notice, PostEvent, RoundFormed
from muster.agent.rendezvous.round_messages import build_round
from muster.agent.runtime.loop import Loop, Timer


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
        self._id = ""
        state = build_initial_state(build_rules(config), loop.clock.now_s(), takeover=False)
        self._state = replace(state, checkpoint=config.checkpoint)
        self._known = RecoveryRecord()
        """What the node knows of the job."""
        self._events: deque[Event] = deque()
        """Events to be decided; the first one is being decided."""
        self._timer: Timer | None = None

    def join(self, member: MemberRecord) -> None:
        """Let the node take part."""
        self._id = member.id
        self._feed(Joined(member=member))

    def receive(self, message: MemberReport) -> None:
        """Decide what follows from a message of the node."""
        self._feed(Reported(id=self._id, message=message))

    def _feed(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) > 1:
            return  # from an action: finish the event before first
        while self._events:
            self._state, actions = decide(self._state, self._events[0], self._loop.clock.now_s())
            for action in actions:
                self._act(action)
            self._events.popleft()

    def _act(self, action: Action) -> None:
        match action:
            case Send() if self._id not in action.ids:
                pass
            case Send():
                self._pass_on(action.message)
            case Notify():
                self._post(Notice(text=action.text, kind=action.kind, ranks=action.ranks))
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
