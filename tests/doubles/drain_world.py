"""A job in memory whose ranks ask `should_stop`: real decisions of leader and nodes, simulated ranks, time and links.

Ranks follow the rules of `muster.worker` op by op: publish the step, read the command, wait. A published step becomes
visible to the agent a moment later; messages take random times, in order on each link; agents stall.
"""

import heapq
import itertools
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from doubles.drain_commands import get_drain
from doubles.leader_history import member, rules
from doubles.samples import make_round

from muster._shared.layouts import StatusPageLayout as Layout
from muster._shared.records import replace
from muster.agent.node import actions as node_actions
from muster.agent.node import events as node_events
from muster.agent.node.decisions import decide as decide_node
from muster.agent.node.state import NodeRules, NodeState, Running
from muster.agent.rendezvous import interface
from muster.agent.rendezvous.consensus import actions as leader_actions
from muster.agent.rendezvous.consensus import events as leader_events
from muster.agent.rendezvous.consensus.decisions import decide as decide_leader
from muster.agent.rendezvous.consensus.events import RoundAcknowledged
from muster.agent.rendezvous.consensus.state import build_initial_state
from muster.agent.rendezvous.drain_ceiling import LOOK_S, RankSlot
from muster.agent.rendezvous.report_messages import Failed

FOREVER = float("inf")


@dataclass(kw_only=True)
class Plan:
    """How one rank behaves."""

    total: int
    stride: int = 1
    """It asks about every such step."""
    step_s: float = 0.01
    starts_s: float = 0.0
    asks: bool = True
    falls_at: int | None = None
    """It asks about an old step again, after this one."""
    evaluates_at: int | None = None
    evaluates_s: float = 0.0
    fails_at: int | None = None


@dataclass(kw_only=True)
class Rank:
    """One simulated rank, and its slot."""

    number: int
    plan: Plan
    step: int | None = None
    asked: int | None = None
    """As the agent sees it, a moment after the rank has published it."""
    own_asked: int | None = None
    own_stride: int = 0
    stride: int = 0
    is_asking: bool = True
    done: int = -1
    """Steps whose work is done."""
    outcome: str = "runs"
    """Then "stopped", "finished", "failed" or "killed"."""
    stopped_at: int | None = None
    is_waiting: bool = False
    ended_after_commit: bool = False


@dataclass(kw_only=True)
class Node:
    """One node: the agent's state, its page and its ranks."""

    index: int
    ranks: list[Rank]
    state: NodeState
    command: int = 0
    is_alive: bool = True
    code: int | None = None
    stalled_until_s: float = 0.0
    inbox_s: float = 0.0
    outbox_s: float = 0.0
    lines: list[str] = field(default_factory=list)


class DrainWorld:
    """Leader, nodes and ranks of one running round. `run` plays it until nothing happens any more."""

    def __init__(self, seed: int, plans: list[list[Plan]], *, is_coupled: bool, drain_limit_s: float = 10.0) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.is_coupled = is_coupled
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.leader_lines: list[str] = []
        self.on_next_ask: Callable[[], None] | None = None
        """Called once, at the moment that a rank publishes a step."""
        self.commits: list[int] = []
        self.is_broken = False
        self.delay_s = self.random.choice((0.0002, 0.002, 0.02))
        self.visible_s = self.random.choice((0.0005, 0.9 * LOOK_S))
        """A published step is visible to the agent after at most this time."""
        numbers = itertools.count()
        world_size = sum(map(len, plans))
        self.leader = self._form_round(plans)
        number = self.leader.round_number
        self.nodes: list[Node] = []
        for index, own in enumerate(plans):
            ranks = [Rank(number=next(numbers), plan=plan) for plan in own]
            formed = make_round(
                number=number,
                group_rank=index,
                group_world_size=len(plans),
                rank_offset=ranks[0].number,
                world_size=world_size,
            )
            rules = NodeRules(nproc=len(ranks), shutdown_timeout_s=5.0, drain_limit_s=drain_limit_s)
            alive = frozenset(range(len(ranks)))
            phase = Running(round=formed, awaited=frozenset(), alive=alive)
            self.nodes.append(Node(index=index, ranks=ranks, state=NodeState(rules=rules, phase=phase)))
        self.ranks = [rank for node in self.nodes for rank in node.ranks]
        for node in self.nodes:
            for local_rank, rank in enumerate(node.ranks):
                life = self._live(node, local_rank, rank)
                self.at(rank.plan.starts_s, lambda life=life: self._advance(life))

    def _form_round(self, plans):
        nodes = len(plans)
        own = replace(rules(nodes, nodes, max_restarts=0), join_timeout_s=600.0)
        state = build_initial_state(own, 0.0, takeover=False)
        for index, ranks in enumerate(plans):
            joins = leader_events.Joined(member=replace(member(index, nproc=len(ranks)), id=str(index)))
            state, _ = decide_leader(state, joins, 0.0)
        state, _ = decide_leader(state, leader_events.LeaseChecked(is_held=True), 0.0)
        for index in range(nodes):
            event = leader_events.Reported(id=str(index), message=RoundAcknowledged(round_number=state.round_number))
            state, _ = decide_leader(state, event, 0.0)
        return state

    # -- time -------------------------------------------------------------------------------------------------------

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (max(when_s, self.now_s), next(self._count), call))

    def run(self, until_s: float = 300.0) -> None:
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, call = heapq.heappop(self._queue)
            call()

    def _advance(self, life: Iterator[float]) -> None:
        delay_s = next(life, None)
        if delay_s is not None:
            self.at(self.now_s + delay_s, lambda: self._advance(life))

    # -- ranks ------------------------------------------------------------------------------------------------------

    def _live(self, node: Node, local_rank: int, rank: Rank) -> Iterator[float]:  # noqa: C901
        plan = rank.plan
        for i in range(plan.total):
            while self._must_wait_for_peers(rank, i):
                if rank.outcome != "runs":
                    return
                yield max(0.2 * plan.step_s, 0.005)
            yield self.random.expovariate(1.0) * plan.step_s
            if i == plan.evaluates_at:
                yield plan.evaluates_s
            if rank.outcome != "runs":
                return
            rank.done = i
            if not (plan.asks and i % plan.stride == 0):
                rank.step = i  # else it becomes visible together with the question
            if i == plan.fails_at:
                self._end(node, local_rank, rank, "failed", 1)
                return
            if plan.asks and i % plan.stride == 0:
                yield from self._ask(rank, node, i)
                if rank.outcome != "runs":
                    return
                if rank.stopped_at is not None:
                    yield self.random.uniform(0.0, 0.5)  # it saves
                    if rank.outcome == "runs":
                        self._end(node, local_rank, rank, "stopped", 0)
                    return
                if i == plan.falls_at:
                    rank.asked, rank.is_asking = None, False
                    plan.asks = False
        if rank.outcome == "runs":
            self._end(node, local_rank, rank, "finished", 0)

    def _must_wait_for_peers(self, rank: Rank, i: int) -> bool:
        """Training is synchronous: nobody begins a step before all others have done the one before."""
        if not self.is_coupled:
            return False
        others = (each for each in self.ranks if each.outcome in ("runs", "killed") and each.stopped_at is None)
        return rank.outcome != "runs" or any(each.done < i - 1 for each in others)

    def _ask(self, rank: Rank, node: Node, i: int) -> Iterator[float]:
        if (on_ask := self.on_next_ask) is not None:
            self.on_next_ask = None
            self.at(self.now_s, on_ask)
        stride = i - rank.own_asked if rank.own_asked is not None else 0
        rank.own_asked, rank.own_stride = i, stride

        def publish() -> None:
            rank.step, rank.asked, rank.stride = rank.own_asked, rank.own_asked, rank.own_stride

        self.at(self.now_s + self.random.uniform(0.0, self.visible_s), publish)
        if self.random.random() < 0.3:
            yield self.random.choice((1e-6, 0.0001, 0.003))  # the kernel runs another process
        wait_s = 0.0002
        while rank.outcome == "runs":
            command = node.command
            if command == 0 or i < Layout.get_step(command):
                break
            if Layout.is_committed(command):
                rank.stopped_at = i
                break
            rank.is_waiting = True
            yield wait_s
            wait_s = min(2 * wait_s, 0.005)
        if rank.outcome != "killed":
            rank.is_waiting = False

    def _end(self, node: Node, local_rank: int, rank: Rank, outcome: str, code: int) -> None:
        rank.outcome = outcome
        rank.ended_after_commit = Layout.is_committed(node.command)
        exited = node_events.WorkerExited(
            round_number=self.leader_round,
            local_rank=local_rank,
            code=code,
            asked=rank.own_asked if node.command else None,
        )
        self._to_node(node, exited, is_local=True)

    @property
    def leader_round(self) -> int:
        return self.nodes[0].state.round.number

    # -- nodes ------------------------------------------------------------------------------------------------------

    def preempt(self, node: Node) -> None:
        is_asked = any(rank.asked is not None for rank in node.ranks)
        event = node_events.SignalReceived(signum=signal.SIGTERM, is_asked=is_asked, at_s=self.now_s)
        self._to_node(node, event, is_local=True)

    def stall(self, node: Node, for_s: float) -> None:
        node.stalled_until_s = self.now_s + for_s

    def lose(self, node: Node) -> None:
        """The node is gone, with its ranks; the leader learns of it."""
        if not node.is_alive:
            return
        node.is_alive = False
        self._kill(node)
        self.at(self.now_s + 0.01, lambda: self._lead(leader_events.MemberLost(id=str(node.index), reason="lost")))

    def lose_leader(self) -> None:
        """All nodes fence their workers, as when the leader is lost."""
        self.is_broken = True
        for node in self.nodes:
            number = node.state.round.number
            broken = interface.RoundBroken(
                round_number=number, kind=interface.BreakKind.FENCED, reason="the leader was lost"
            )
            self._to_node(node, broken, is_local=True)

    def _to_node(self, node: Node, event, *, is_local: bool = False) -> None:
        if not is_local:
            node.inbox_s = max(node.inbox_s, self.now_s + self.random.expovariate(1.0) * self.delay_s)
        self.at(self.now_s if is_local else node.inbox_s, lambda: self._handle(node, event))

    def _handle(self, node: Node, event) -> None:
        if not node.is_alive or node.code is not None:
            return
        if self.now_s < node.stalled_until_s:
            self.at(node.stalled_until_s, lambda: self._handle(node, event))
            return
        node.state, decided = decide_node(node.state, event)
        for action in decided:
            self._act(node, action)

    def _act(self, node: Node, action) -> None:  # noqa: C901
        number = node.state.round.number
        member = str(node.index)
        match action:
            case node_actions.ReadSlots():
                slots = tuple(build_slot(rank) for rank in node.ranks)
                self._handle(
                    node, node_events.SlotsRead(round_number=action.round_number, drain=action.drain, slots=slots)
                )
            case node_actions.WriteCommand():
                command = Layout.pack_command(
                    drain=action.drain, kind=Layout.STOP, step=action.step, is_committed=action.is_committed
                )
                before = node.command
                same = before and get_drain(before) == action.drain
                assert not same or not Layout.is_committed(before), "a committed step was changed"
                assert not same or action.step >= Layout.get_step(before), "a ceiling fell"
                node.command = command
            case node_actions.WithdrawCommand():
                assert not Layout.is_committed(node.command), "a committed drain was withdrawn"
                node.command = 0
            case node_actions.StartTimer():
                expired = node_events.TimerExpired(timer=action.timer)
                self.at(self.now_s + action.delay_s, lambda: self._handle(node, expired))
            case node_actions.Send():
                self._to_leader(node, leader_events.Reported(id=member, message=action.message))
            case node_actions.ReportFailed():
                self._to_leader(
                    node, leader_events.Reported(id=member, message=Failed(round_number=number, failures=()))
                )
            case node_actions.SettleFailure():
                settled = node_events.FailureSettled(round_number=number, local_rank=action.failure.local_rank)
                self.at(self.now_s, lambda: self._handle(node, settled))
            case node_actions.SignalWorkers() | node_actions.KillWorkers():
                self._kill(node)
                if isinstance(action, node_actions.KillWorkers):
                    self.at(self.now_s, lambda: self._handle(node, node_events.WorkersGone(round_number=number)))
            case node_actions.CollectStacks():
                self.at(
                    self.now_s, lambda: self._handle(node, node_events.StacksCollected(round_number=number, stacks={}))
                )
            case node_actions.PrintLine():
                node.lines.append(action.text)
            case node_actions.Finish():
                node.code = int(action.code)
                gone = leader_events.MemberLost(id=member, reason="gone")
                self.at(self.now_s + self.delay_s, lambda: self._lead(gone))
            case _:
                pass

    def _kill(self, node: Node) -> None:
        for local_rank, rank in enumerate(node.ranks):
            if rank.outcome == "runs":
                rank.outcome = "killed"
                exited = node_events.WorkerExited(
                    round_number=self.leader_round, local_rank=local_rank, code=-15, asked=rank.own_asked
                )
                if node.is_alive:
                    self.at(self.now_s, lambda event=exited: self._handle(node, event))

    # -- the leader -------------------------------------------------------------------------------------------------

    def _to_leader(self, node: Node, event) -> None:
        if self.is_broken:
            return
        node.outbox_s = max(node.outbox_s, self.now_s + self.random.expovariate(1.0) * self.delay_s)
        self.at(node.outbox_s, lambda: self._lead(event))

    def _lead(self, event) -> None:
        if self.is_broken:
            return
        self.leader, decided = decide_leader(self.leader, event, self.now_s)
        for action in decided:
            self._send(action)

    def _send(self, action) -> None:
        match action:
            case leader_actions.Send(message=message):
                if isinstance(message, interface.DrainCommitted):
                    self.commits.append(message.step)
                if isinstance(message, leader_actions.RoundBreak):
                    message = message.broken
                elif isinstance(message, leader_actions.JobEnd):
                    message = interface.JobEnded(succeeded=message.succeeded, is_drained=message.is_drained)
                for member in action.ids:
                    self._to_node(self.nodes[int(member)], message)
            case leader_actions.SetTimer():
                if action.due_s < FOREVER:
                    fired = leader_events.TimerFired(round_number=action.round_number)
                    self.at(action.due_s, lambda: self._lead(fired))
            case leader_actions.Notify():
                self.leader_lines.append(action.text)
            case _:
                pass


def build_slot(rank: Rank) -> RankSlot:
    """What the agent reads of a rank."""
    return RankSlot(
        global_rank=rank.number, step=rank.step, asked=rank.asked, stride=rank.stride, is_asking=rank.is_asking
    )
