"""Simulated histories of one member's decisions: its world answers as it likes, and what it is told to do must fit.

The world of a seed is a network, a leader, workers and a clock without any of the real code. Every action is checked
against it. MUSTER_SIM_SEEDS sets the number of seeds.
"""

import os
import random
from collections.abc import Callable
from typing import Any, get_args

import pytest
from doubles.rendezvous_links import make_config
from doubles.samples import make_failure

from muster._shared.contract import AskKind
from muster._shared.fields import Shared
from muster._shared.records import replace
from muster.agent.rendezvous import interface as rdzv
from muster.agent.rendezvous.consensus import actions as leader_actions
from muster.agent.rendezvous.consensus.quorum import RecoveredRound
from muster.agent.rendezvous.consensus.recovery import RecoveryRecord
from muster.agent.rendezvous.member import events as do
from muster.agent.rendezvous.member.decisions import TABLE, decide_member
from muster.agent.rendezvous.member.state import Connection, MemberState, Phase, build_initial_state
from muster.agent.rendezvous.protocol import messages
from muster.agent.rendezvous.protocol.messages import DiscoveryRole, QueryReply
from muster.agent.rendezvous.report_messages import Failed, Stopped
from muster.agent.rendezvous.transport.links import Cause, LinkEnd
from muster.agent.round import Checkpoint

SEEDS = int(os.environ.get("MUSTER_SIM_SEEDS", "250"))
BATCHES = 10
STEPS = 120
SILENCE_S = 5.0
SIZE = 3


class World:
    """What one member sees, and what it has done."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        config = make_config(
            backend=pick(("muster", "muster", "static")),
            host="n0",
            node_index=pick((None, 0, 1, 2)),
            max_restarts=3,
            join_timeout_s=60.0,
            is_host=pick((None, None, True, False)),
            incarnation=pick((0, 0, 1)),
        )
        self.state = build_initial_state(config, "me")
        self.now_s = 100.0
        self.link: str | None = None
        """"local" or "remote"."""
        self.is_accepted = self.has_asked = False
        self.answer: do.Answered | None = None
        self.is_searching = self.is_waiting = False
        self.lease: str | None = None
        self.received_s = 0.0
        self.timers: set[do.TimerKind] = set()
        self.pending: list[do.Event] = [do.Started(is_prepared=pick((True, False)))]
        """What the last actions have as their answers."""
        self.running = 0
        """The round of the workers that are alive; 0: none is."""
        self.saved: rdzv.Saved | None = None
        """What its workers have saved last."""
        self.broken: set[rdzv.BreakKind] = set()
        self.lasting_lease = False
        self.number = 0
        self.version = 0
        self.has_formed = False
        """This node's leader has formed a round."""
        self.told_end = self.told_loss = False
        self.end: Any = None
        self.checkpoints: list[int] = []
        self.log: list[Any] = []

    def play(self) -> None:
        for _ in range(STEPS):
            self.now_s += self.random.choice((0.0, 0.0, 0.1, 1.0, 6.0))
            self.feed(self.draw_event())
            while self.pending:
                self.feed(self.pending.pop(0))
            self.check_progress()

    # -- events ------------------------------------------------------------------------------------------------------

    def draw_event(self) -> do.Event:
        draws: list[Callable[[], do.Event | None]] = [self.draw_late_event, self.draw_node_message]
        if self.is_searching:
            draws += [self.draw_answer, self.draw_answer, self.draw_turn]
        if self.link is not None:
            draws += [self.draw_leader_message] * 5 + [self.draw_loss]
        if self.timers:
            draws.append(self.draw_timer)
        if self.is_waiting:
            draws.append(lambda: do.WaitDue(line=self.random.choice((None, "waiting"))))
        while (event := self.random.choice(draws)()) is None:
            pass
        return event

    def draw_timer(self) -> do.Event | None:
        kind = self.random.choice(sorted(self.timers, key=lambda each: each.value))
        if kind is do.TimerKind.DEADLINE and self.random.random() < 0.9:
            return None
        self.timers.remove(kind)
        return do.TimerFired(kind=kind)

    def draw_late_event(self) -> do.Event | None:
        """What may arrive at any time."""
        return self.random.choice(
            (
                None,
                do.LeaderEnded(led_rounds=frozenset({self.number})),
                do.OtherLeaderFound(host="n2", port=4) if self.link == "local" else None,
                do.LocalChecked(is_local=False, is_check=True, has_formed_round=self.has_formed),
            )
        )

    def draw_answer(self) -> do.Event:
        own = self.state.recovery.round_number
        reply = QueryReply(
            role=self.random.choice(list(DiscoveryRole)),
            round_number=max(0, own + self.random.choice((-1, 0, 0, 1))),
            group_rank=self.random.choice((None, 0, 1, 2)),
            id=self.random.choice(("me", "m0", "m1", "m2")),
            index=self.random.choice((None, 0, 1, 2)),
            leader=self.random.choice((None, ("n2", 7))),
            rules=Shared(replace(self.state.job_rules, max_restarts=self.random.choice((3, 3, 3, 9)))),
        )
        self.answer = do.Answered(
            reply=reply, target=do.Target(host="n1", port=5), peer_host="n1", has_formed_round=self.has_formed
        )
        return self.answer

    def draw_turn(self) -> do.Event:
        failures = (None, LinkEnd(reason="n1:5: refused"), LinkEnd(reason="n1:5: another token", cause=Cause.REFUSED))
        return do.SearchTurned(
            unanswered=self.random.choice(((), (0,), (1, 2))),
            age_s=self.random.choice((0.1, 3.0)),
            failure=self.random.choice(failures),
            has_endpoint=self.random.random() < 0.5,
        )

    def draw_loss(self) -> do.Event | None:
        promise_until_s = self.received_s + SILENCE_S if self.lease == "following" else float("-inf")
        if self.lease == "following" and self.random.random() < 0.3:
            return do.LeaderSilent(silence_s=SILENCE_S, promise_until_s=promise_until_s)
        if self.lease == "leading" and self.running and self.random.random() < 0.3:
            return do.QuorumLost()
        if self.random.random() < 0.3:
            return do.LeaderMalformed(error="'x' is missing", promise_until_s=promise_until_s)
        is_leased = self.lease == "following" and self.random.random() < 0.7
        return do.LinkClosed(reason="closed", promise_until_s=promise_until_s, is_leased_elsewhere=is_leased)

    def build_record(self) -> RecoveryRecord:
        self.version += 1
        ended = frozenset(rank for rank in range(SIZE) if self.random.random() < 0.2)
        rounds = (
            RecoveredRound(round_number=self.number, leader_id="m0", size=SIZE, leader_group_rank=0, ended=ended),
        )
        number = self.random.randint(0, 4)
        return RecoveryRecord(
            version=self.version,
            round_number=self.number,
            attempt=self.random.randint(0, 3),
            quorum_rounds=rounds if self.number else (),
            checkpoint=Checkpoint(number=number, step=number, path="/c") if number else None,
        )

    def build_facts(self) -> Shared[leader_actions.RoundFacts]:
        self.number = max(self.number, self.state.recovery.round_number) + 1
        successors = tuple(
            leader_actions.Successor(group_rank=rank, index=rank, host=f"n{rank}", port=5000 + rank)
            for rank in range(1, SIZE)
        )
        return Shared(
            leader_actions.RoundFacts(
                recovery=self.build_record(),
                successors=successors,
                group_world_size=SIZE,
                world_size=SIZE,
                master_addr="n0",
                master_port=4000,
            )
        )

    def draw_leader_message(self) -> do.Event | None:
        self.received_s = self.now_s
        if not self.is_accepted:
            if not self.has_asked:
                return None
            if self.random.random() < 0.05:
                return do.LeaderSent(message=messages.Rejected(reason="no"))
            self.is_accepted = True
            return do.LeaderSent(message=messages.Welcome(leader_id=self.random.choice(("m0", "m1")), listen_port=5000))
        if self.told_end:
            return do.LeaderSent(message=messages.Exit()) if self.random.random() < 0.4 else None
        draw = self.random.random()
        if draw < 0.35 and not self.running:
            self.has_formed = self.has_formed or self.link == "local"
            if self.random.random() < 0.2:
                return do.LeaderSent(
                    message=leader_actions.RoundSummary(facts=self.build_facts(), group_ranks=(None,), is_spare=True)
                )
            start = leader_actions.RoundStart(
                facts=self.build_facts(),
                group_ranks=(self.random.randrange(SIZE),),
                rank_offset=0,
                role_rank_offset=0,
                role_world_size=SIZE,
            )
            return do.LeaderSent(message=start, is_reachable=self.random.random() < 0.97)
        if draw < 0.55:
            number = self.random.choice((self.number, self.number, max(0, self.number - 1)))
            kind = self.random.choice((rdzv.BreakKind.FAILURE, rdzv.BreakKind.MEMBERSHIP, rdzv.BreakKind.DRAINED))
            broken = rdzv.RoundBroken(round_number=number, kind=kind, reason="why")
            return do.LeaderSent(message=leader_actions.RoundBreak(broken=broken, recovery=Shared(self.build_record())))
        if draw < 0.75:
            return do.LeaderSent(
                message=messages.HeartbeatReply(number=1, at_s=1.0, recovery=Shared(self.build_record()))
            )
        if draw < 0.9:
            return do.LeaderSent(message=leader_actions.RecoveryChanged(recovery=Shared(self.build_record())))
        if draw < 0.94:
            return do.LeaderSent(message=messages.Goodbye(reason="silent"))
        if draw < 0.97:
            return do.LeaderSent(message=messages.Redirect(host="n2", port=4))
        self.told_end = True
        return do.LeaderSent(message=leader_actions.JobEnd(succeeded=True, report=None, printer_id=None))

    def draw_node_message(self) -> do.Event | None:
        number = self.random.choice((self.running, self.running, 7777))
        if self.broken and self.random.random() < 0.6:
            number, self.running = self.running, 0
            self.broken = set()
            return do.NodeSent(message=Stopped(round_number=number))
        messages: tuple[Any, ...] = (
            rdzv.Prepared(),
            rdzv.AllStarted(round_number=number),
            rdzv.AllSucceeded(round_number=number),
            Failed(round_number=number, failures=(make_failure(node=1),)),
            rdzv.Asked(round_number=number, request=1, kind=AskKind.STOP, limit_s=5.0),
            rdzv.Leaving(reason="SIGTERM"),
            rdzv.Saved(round_number=number, step=len(self.log), path="/c"),
        )
        message = self.random.choice(messages)
        if isinstance(message, rdzv.Saved) and number == self.running != 0:
            self.saved = message
        return do.NodeSent(message=message)

    # -- actions -----------------------------------------------------------------------------------------------------

    def feed(self, event: do.Event) -> None:
        before = self.state
        after, actions = decide_member(before, event, self.now_s)
        assert (after, actions) == decide_member(before, event, self.now_s), "it is pure"
        self.log.append((event, actions))
        self.state = after
        if before.phase not in TABLE[type(event)]:
            assert (after, actions) == (before, ())
        for action in actions:
            self.act(before, event, action)
        self.answer = None
        self.check_memory(before, actions)
        lost = before.connection is not None and after.connection is None and not after.has_ended
        if lost and self.running and after.job_end is None:
            assert rdzv.BreakKind.FENCED in self.broken, "the others may go on without this node"
        assert (self.link is None) == (after.connection is None) or after.has_ended

    def act(self, before: MemberState, event: do.Event, action: do.Action) -> None:  # noqa: C901
        match action:
            case do.Post():
                self.receive(action.event)
            case do.SendUp() | do.SendStopped() | do.AcknowledgeEnd():
                assert self.link is not None
                assert self.is_accepted, "only a leader that has accepted this node is told anything"
            case do.SendJoin():
                assert self.link is not None
                assert not self.running, "it joins only while none of its workers is alive"
                assert not self.has_asked
                assert self.state.saved == self.saved, "the report may have been lost with the last link"
                self.has_asked = True
            case do.Search():
                assert not self.is_searching
                assert len({(each.host, each.port) for each in action.targets}) <= len(action.targets)
                self.is_searching = True
            case do.StopSearch():
                self.is_searching = False
            case do.TakeLink():
                self.take(before)
            case do.Lead():
                assert self.link is None
                assert not self.running
                assert not isinstance(event, do.SearchTurned) or self.now_s >= before.promise_until_s
                self.link, self.is_accepted, self.has_asked, self.has_formed = "local", False, False, False
            case do.StopLeading():
                assert not self.has_formed or not isinstance(event, do.Answered)
            case do.DropLink():
                self.link = self.lease = None
                self.is_accepted = self.has_asked = False
            case do.StopRenewal():
                self.lease = None
            case do.FollowLeader():
                assert self.link is not None
                self.lease = "leading" if self.link == "local" else "following"
            case do.BeginRound():
                assert self.lease is not None
                self.lasting_lease = True
            case do.EndRound():
                assert not self.running, "without the lease, no worker may run"
                self.lasting_lease = False
            case do.SetTimer():
                self.timers.discard(action.kind)
                if action.delay_s is not None:
                    self.timers.add(action.kind)
            case do.Wait():
                self.is_waiting = action.is_on
            case do.CheckLocal():
                local = self.random.random() < 0.5
                self.pending.append(
                    do.LocalChecked(is_local=local, is_check=action.is_check, has_formed_round=self.has_formed)
                )
            case do.OpenEndpoint():
                is_free = self.random.random() < 0.7
                self.pending.append(do.EndpointTried(error="" if is_free else "cannot listen"))
            case do.Probe():
                if self.random.random() < 0.5:
                    self.pending.append(do.LeaderEnded(led_rounds=action.led_rounds))
            case do.AskAgain() | do.AddTarget():
                pass
            case _:
                pytest.fail(f"unknown: {action}")

    def take(self, before: MemberState) -> None:
        answer = self.answer
        assert self.link is None, "one link at a time"
        assert not self.running
        assert answer.reply.id != "me"
        assert answer.reply.role in (DiscoveryRole.LEADER, DiscoveryRole.CANDIDATE)
        has_promised = self.now_s < before.promise_until_s and answer.reply.id != before.recovery.leader_id
        assert not has_promised or before.recovery.is_leaders_index(answer.reply.index)
        if answer.reply.round_number < before.recovery.round_number:
            assert answer.reply.rules.value == before.job_rules
        self.link, self.is_searching, self.is_accepted, self.has_asked = "remote", False, False, False
        self.has_formed = False

    def receive(self, event: Any) -> None:
        assert self.end is None, "nothing follows the end"
        match event:
            case rdzv.RoundFormed():
                assert not self.running
                assert self.lasting_lease, "workers start under a lease"
                assert event.round.number == self.number
                self.running, self.broken, self.told_loss = event.round.number, set(), False
            case rdzv.Notice(is_leader_lost=True):
                assert not self.told_loss, "once before the next round"
                self.told_loss = True
            case rdzv.RoundBroken():
                assert event.round_number == self.running
                assert event.kind not in self.broken
                self.broken.add(event.kind)
            case rdzv.CheckpointCompleted():
                self.checkpoints.append(event.checkpoint.number)
                assert self.checkpoints == sorted(set(self.checkpoints)), "each once, and only later ones"
            case rdzv.JobEnded() | rdzv.RendezvousFailed():
                self.end = event
            case rdzv.RequestAnswered():
                pass

    def check_memory(self, before: MemberState, actions: tuple[do.Action, ...]) -> None:
        old, new = before.recovery, self.state.recovery
        assert (new.record.checkpoint is None) <= (old.record.checkpoint is None)
        assert len(new.group_ranks) == len(new.record.quorum_rounds)
        if new.record.is_same_round(old.record):
            assert new.record.attempt >= old.record.attempt
            for mine, known in zip(new.record.quorum_rounds, old.record.quorum_rounds, strict=True):
                assert mine.ended >= known.ended
        assert new.round_number >= old.round_number
        posted = any(isinstance(each, do.Post) and isinstance(each.event, rdzv.CheckpointCompleted) for each in actions)
        assert posted == (new.record.checkpoint != old.record.checkpoint)

    def check_progress(self) -> None:
        """A member never waits for nothing."""
        state, kinds = self.state, do.TimerKind
        assert (self.end is not None) == state.has_ended
        assert bool(self.running) == state.is_running or state.has_ended
        if state.has_ended:
            assert not self.is_searching
            assert not self.is_waiting
            assert kinds.DEADLINE not in self.timers
            return
        assert self.is_searching == state.is_searching
        if state.phase is Phase.APART:
            assert self.is_searching or self.timers & {kinds.PAUSE, kinds.LINGER, kinds.ENDPOINT}
            assert kinds.DEADLINE in self.timers or kinds.LINGER in self.timers
        if state.phase is Phase.JOINING:
            assert self.has_asked
            assert not self.running
            assert self.link == "local" or kinds.JOIN in self.timers
        if state.phase is Phase.JOINED:
            assert not self.timers & {kinds.JOIN, kinds.DEADLINE}
        if not self.running and state.job_end is None and state.phase is not Phase.JOINED:
            assert self.is_waiting or state.printed, "it says why it waits"


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_history_of_a_member_fits_its_world(batch: int) -> None:
    for seed in range(batch, SEEDS, BATCHES):
        world = World(seed)
        try:
            world.play()
        except AssertionError as error:
            lines = "\n".join(f"{event}\n    -> {actions}" for event, actions in world.log[-6:])
            pytest.fail(f"seed {seed}: {error}\n{lines}", pytrace=False)


def test_an_ended_member_only_leaves() -> None:
    connection = Connection(is_local=False, is_accepted=True)
    ended = replace(build_initial_state(make_config(), "me"), has_ended=True, connection=connection)
    leaving = rdzv.Leaving(reason="SIGTERM")
    assert decide_member(ended, do.NodeSent(message=leaving), 0.0) == (ended, (do.SendUp(message=leaving),))
    assert decide_member(ended, do.NodeSent(message=rdzv.AllSucceeded(round_number=0)), 0.0) == (ended, ())


def test_histories_reach_every_event_and_every_action() -> None:
    """So that what the others check is not empty."""
    events: set[type] = set()
    actions: set[type] = set()
    for seed in range(400):
        world = World(seed)
        world.play()
        events |= {type(event) for event, _ in world.log}
        actions |= {type(action) for _, decided in world.log for action in decided}
    assert set(get_args(do.Event)) - events == {do.Excluded}
    assert set(get_args(do.Action)) - actions == set()
