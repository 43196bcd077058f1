"""Decides what a leader decides in a running round (drains and requests of people), for a job of one node.

The decisions are those of `consensus.drain`, for a job with one member. It is imported when a drain begins or a person
asks, because most jobs of one node end without either.
"""

from muster._shared.records import replace
from muster.agent.rendezvous.consensus.actions import (
    Action,
    JobEnd,
    Notify,
    RecoveryChanged,
    RoundBreak,
    RoundStart,
    RoundSummary,
    Send,
)
from muster.agent.rendezvous.consensus.drain import CommonStepMessage, decide_common_step, on_workers_ended
from muster.agent.rendezvous.consensus.members import ConsensusRules, MemberRecord, RankAssignment
from muster.agent.rendezvous.consensus.state import JobState, RoundRunning
from muster.agent.rendezvous.interface import (
    AllSucceeded,
    CheckpointCompleted,
    Notice,
    PostEvent,
)
from muster.agent.round import Checkpoint
from muster.agent.runtime.loop import Clock
from muster.agent.runtime.persistent import PersistentMap

MEMBER_ID = "this"


class LocalLeader:
    """The leader of one round. The events that it gets are this node's."""

    def __init__(
        self, clock: Clock, post: PostEvent, *, round_number: int, nproc: int, host: str, checkpoint: Checkpoint | None
    ) -> None:
        """Lead a running round.

        Args:
            clock: the agent's.
            post: gets the rendezvous events.
            round_number: the round's.
            nproc: the number of its ranks.
            host: this machine's name.
            checkpoint: the last complete checkpoint.
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

    def feed(self, message: CommonStepMessage | AllSucceeded) -> None:
        """Decide what follows from a message of the round, and post it."""
        now_s = self._clock.now_s()
        if isinstance(message, AllSucceeded):
            phase = self._state.running
            phase = replace(phase, succeeded=phase.succeeded.with_item(MEMBER_ID))
            self._state, actions = on_workers_ended(self._state, phase, message.drained_rank, now_s)
        else:
            self._state, actions = decide_common_step(self._state, MEMBER_ID, message, now_s)
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        if isinstance(action, Notify):
            self._post(Notice(text=action.text, kind=action.kind, ranks=action.ranks))
            return
        if not isinstance(action, Send) or isinstance(action.message, RoundBreak | JobEnd | RoundStart | RoundSummary):
            raise TypeError(f"a job of one node has no {action!r}")
        if not isinstance(action.message, RecoveryChanged):
            self._post(action.message)
        elif (checkpoint := action.message.recovery.value.checkpoint) is not None:
            self._post(CheckpointCompleted(checkpoint=checkpoint))
