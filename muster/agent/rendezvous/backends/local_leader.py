"""What the leader decides in a running round (drains, and what people ask for), for a job of one node.

The decisions are those of `consensus.drain`, about a job with one member. Imported when a drain begins or a person
asks: most jobs of one node end without.
"""

from muster._shared.records import assert_never, replace
from muster.agent.rendezvous.consensus import drain, events
from muster.agent.rendezvous.consensus.actions import (
    Action,
    AnswerRequest,
    BeginDrain,
    CommitDrain,
    CompleteCheckpoint,
    Notify,
    WantStacks,
    WithdrawDrain,
)
from muster.agent.rendezvous.consensus.members import ConsensusRules, MemberRecord, RankAssignment
from muster.agent.rendezvous.consensus.state import Decision, JobState, RoundRunning
from muster.agent.rendezvous.interface import (
    CheckpointCompleted,
    DrainBegun,
    DrainCommitted,
    DrainWithdrawn,
    Notice,
    PostEvent,
    RequestAnswered,
    StacksWanted,
)
from muster.agent.round import Checkpoint
from muster.agent.runtime.clock import Clock
from muster.agent.runtime.persistent import PersistentMap

MEMBER_ID = "this"

LocalEvent = (
    events.DrainAsked
    | events.DrainReported
    | events.DrainFollowed
    | events.Asked
    | events.StacksTaken
    | events.StoodStill
    | events.Saved
    | events.Succeeded
)
"""Those of a running round whose members do not change."""


class LocalLeader:
    """Of one round. The events that it is fed are this node's."""

    def __init__(
        self, clock: Clock, post: PostEvent, *, round_number: int, nproc: int, host: str, checkpoint: Checkpoint | None
    ) -> None:
        """Lead a round that runs.

        Args:
            clock: the agent's.
            post: gets the rendezvous events.
            round_number: of the round.
            nproc: number of its ranks.
            host: name of this machine.
            checkpoint: the last complete one.
        """
        self._clock = clock
        self._post = post
        member = MemberRecord(id=MEMBER_ID, index=0, nproc=nproc, role="", host=host, port=0, is_leader=True)
        assignment = RankAssignment(
            id=MEMBER_ID, index=0, group_rank=0, rank_offset=0, role_rank_offset=0, role_world_size=nproc
        )
        rules = ConsensusRules(
            run_id="", min_nodes=1, max_nodes=1, max_restarts=0, join_timeout_s=0.0, last_call_s=0.0, rejoin_wait_s=0.0
        )
        self._state = JobState(
            rules=rules,
            phase=RoundRunning(),
            members=PersistentMap({MEMBER_ID: member}),
            assignments=PersistentMap({MEMBER_ID: assignment}),
            round_number=round_number,
            checkpoint=checkpoint,
        )

    def feed(self, event: LocalEvent) -> None:
        """Decide what follows from an event of the round, and post it."""
        self._state, actions = _decide(self._state, event, self._clock.now_s())
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        number = self._state.round_number
        match action:
            case BeginDrain():
                begun = DrainBegun(
                    round_number=number,
                    drain=action.drain,
                    limit_s=action.limit_s,
                    kind=action.kind,
                    is_asked=action.is_asked,
                )
                self._post(begun)
            case CommitDrain():
                self._post(DrainCommitted(round_number=number, drain=action.drain, step=action.step))
            case WithdrawDrain():
                self._post(DrainWithdrawn(round_number=number, drain=action.drain, reason=action.reason))
            case WantStacks():
                self._post(StacksWanted(round_number=number, number=action.number))
            case AnswerRequest():
                self._post(RequestAnswered(request=action.request, answer=action.answer))
            case CompleteCheckpoint():
                self._post(CheckpointCompleted(checkpoint=action.checkpoint))
            case Notify():
                self._post(Notice(text=action.text, kind=action.kind))
            case _:
                raise AssertionError(f"a job of one node has no {action!r}")


def _decide(state: JobState, event: LocalEvent, now_s: float) -> Decision:
    match event:
        case events.DrainAsked():
            return drain.on_drain_asked(state, event, now_s)
        case events.DrainReported():
            return drain.on_drain_reported(state, event, now_s)
        case events.DrainFollowed():
            return drain.on_followed(state, event, now_s)
        case events.Asked():
            return drain.on_asked(state, event, now_s)
        case events.StacksTaken():
            return drain.on_stacks_taken(state, event, now_s)
        case events.StoodStill():
            return drain.on_stood_still(state, event, now_s)
        case events.Saved():
            return drain.on_saved(state, event, now_s)
        case events.Succeeded():
            if not isinstance(state.phase, RoundRunning):
                return state, ()
            phase = replace(state.phase, succeeded=state.phase.succeeded.with_item(MEMBER_ID))
            return drain.on_workers_ended(state, phase, event, now_s)
        case _:
            assert_never(event)
