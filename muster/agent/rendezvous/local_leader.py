"""Decides what a leader decides in a running round (drains, requests of people, features), for a job of one node.

The decisions are those of `consensus.drain` and `consensus.parts`, for a job with one member. It is imported when there
is something to decide, because most jobs of one node end without.
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
from muster.agent.rendezvous.consensus.halves import PartJob
from muster.agent.rendezvous.consensus.members import ConsensusRules, MemberRecord, RankAssignment
from muster.agent.rendezvous.consensus.parts import decide_part, plan_parts
from muster.agent.rendezvous.consensus.state import JobState, RoundRunning
from muster.agent.rendezvous.interface import (
    AllSucceeded,
    CheckpointCompleted,
    Notice,
    PartRemembered,
    PartReport,
    PostEvent,
)
from muster.agent.round import Checkpoint, PartMemory, PartOffer, PartShare
from muster.agent.runtime.loop import Clock
from muster.agent.runtime.persistent import PersistentMap

MEMBER_ID = "this"


class LocalLeader:
    """The leader of one round. The events that it gets are this node's."""

    def __init__(
        self,
        clock: Clock,
        post: PostEvent,
        *,
        run_id: str,
        round_number: int,
        nproc: int,
        host: str,
        checkpoint: Checkpoint | None,
    ) -> None:
        """Lead a running round.

        Args:
            clock: the agent's.
            post: gets the rendezvous events.
            run_id: the job's.
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
            run_id=run_id,
            min_nodes=1,
            max_nodes=1,
            max_restarts=0,
            join_timeout_s=0.0,
            last_call_s=0.0,
            rejoin_wait_s=0.0,
        )
        self._state = JobState(
            rules=rules,
            phase=RoundRunning(),
            members=PersistentMap({MEMBER_ID: member}),
            assignments=PersistentMap({MEMBER_ID: assignment}),
            round_number=round_number,
            checkpoint=checkpoint,
        )

    @property
    def memories(self) -> tuple[PartMemory, ...]:
        """What features remember of the job."""
        return self._state.memories

    def plan_parts(self, offers: tuple[PartOffer, ...], memories: tuple[PartMemory, ...]) -> tuple[PartShare, ...]:
        """Have features plan the round that forms, and return what their parts on this node must know of it.

        Args:
            offers: what this node has for it.
            memories: what features remember of the job until now.
        """
        state, (member,) = self._state, self._state.members.values()
        job = PartJob(
            round_number=state.round_number,
            leader_id=state.rules.run_id,
            now_s=self._clock.now_s(),
            is_running=False,
            members={MEMBER_ID: replace(member, offers=offers)},
            assignments=state.assignments,
        )
        plans, notices = plan_parts(job, {}, memories)
        self._state = replace(
            state,
            parts={name: each.state for name, each in plans.items()},
            memories=tuple(each.memory for each in plans.values() if each.memory is not None),
        )
        for notice in notices:
            self._act(notice, self._state)
        shares = ((name, each.shares.get(MEMBER_ID)) for name, each in plans.items())
        return tuple(PartShare(feature=name, content=content) for name, content in shares if content is not None)

    def feed(self, message: CommonStepMessage | PartReport | AllSucceeded) -> None:
        """Decide what follows from a message of the round, and post it."""
        now_s, known = self._clock.now_s(), self._state
        if isinstance(message, AllSucceeded):
            phase = self._state.running
            phase = replace(phase, succeeded=phase.succeeded.with_item(MEMBER_ID))
            self._state, actions = on_workers_ended(self._state, phase, message.drained_rank, now_s)
        elif isinstance(message, PartReport):
            self._state, actions = decide_part(self._state, MEMBER_ID, message, now_s)
        else:
            self._state, actions = decide_common_step(self._state, MEMBER_ID, message, now_s)
        for action in actions:
            self._act(action, known)

    def _act(self, action: Action, known: JobState) -> None:
        if isinstance(action, Notify):
            self._post(Notice(text=action.text, kind=action.kind, ranks=action.ranks))
            return
        if not isinstance(action, Send) or isinstance(action.message, RoundBreak | JobEnd | RoundStart | RoundSummary):
            raise TypeError(f"a job of one node has no {action!r}")
        if not isinstance(action.message, RecoveryChanged):
            self._post(action.message)
            return
        found = action.message.recovery.value
        if found.checkpoint is not None and found.checkpoint != known.checkpoint:
            self._post(CheckpointCompleted(checkpoint=found.checkpoint))
        for memory in found.memories:
            if memory not in known.memories:
                self._post(PartRemembered(round_number=found.round_number, memory=memory))
