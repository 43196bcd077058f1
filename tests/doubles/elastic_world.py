"""A whole job in memory whose ranks ask `should_stop` and save: `rendezvous_world` with real node decisions and ranks.

Real are the rendezvous code from `Member` down, the leader and the decisions of every node. Ranks follow the rules of
`muster.worker` op by op: publish the step, read the command, wait. They train in step with each other, save every few
steps and when they stop, and a round's ranks resume after the checkpoint that the round names.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from doubles.drain_commands import get_drain
from doubles.rendezvous_world import Instance, Process, Violation, World

from muster._shared.layouts import StatusPageLayout as Layout
from muster.agent.node import actions, events
from muster.agent.node.decisions import decide
from muster.agent.node.state import NodeRules, NodeState
from muster.agent.rendezvous.drain_ceiling import LOOK_S, RankSlot
from muster.agent.rendezvous.interface import BreakKind, RoundBroken, Saved
from muster.agent.rendezvous.report_messages import Failed, Stopped
from muster.agent.round import Checkpoint, Round


@dataclass(eq=False)
class Rank:
    """One worker of one round, and its slot. Its process lives while `is_alive`."""

    global_rank: int
    local_rank: int
    instance: Instance
    first: int
    """The step it begins with."""
    done: int
    asked: int | None = None
    stride: int = 0
    own_asked: int | None = None
    is_alive: bool = True
    stopped_at: int | None = None
    is_waiting: bool = False
    """At a ceiling."""
    waiting: int | None = None
    """The step with whose snapshot it waits for nodes that join."""


@dataclass
class Group:
    """The ranks of one round."""

    size: int
    ranks: list[Rank] = field(default_factory=list)
    saved: dict[int, set[int]] = field(default_factory=dict)
    """Which ranks have saved a step."""
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def wake(self) -> None:
        waiting, self.waiting = self.waiting, []
        for wake in waiting:
            wake()

    def may_begin(self, step: int) -> bool:
        """Training is synchronous: no rank begins a step before all others have done the one before."""
        return len(self.ranks) == self.size and all(rank.done >= step - 1 for rank in self.ranks)


class DrainingProcess(Process):
    """One node: the decisions are the node's own, this class carries them out."""

    world: "ElasticWorld"

    def begin(self, imports_s: float) -> None:
        self.code: int | None = None
        self.is_preempted = False
        self.lines: list[str] = []
        self.command = 0
        self.ranks: list[Rank] = []
        self.saved: dict[int, set[int]] = {}
        self.checkpoint: Checkpoint | None = None
        self.fencings = 0
        config = self.config
        rules = NodeRules(
            nproc=self.world.nproc,
            shutdown_timeout_s=5.0,
            drain_limit_s=self.world.drain_limit_s,
            is_elastic=config.min_nodes < config.max_nodes,
        )
        self.state = NodeState(rules=rules)
        self.prepared_s = self.world.now_s + imports_s
        self.post(events.AgentStarted(), delay_s=0.001)
        self.post(events.WorkersPrepared(), delay_s=imports_s)

    def post(self, event: object, delay_s: float = 0.0) -> None:
        self.world.schedule(delay_s, self, lambda: self.loop.post(event))

    def handle(self, event: object) -> None:
        if isinstance(event, RoundBroken):
            self.world.breaks.append((self.world.now_s, self.machine.host, event))
        self.state, decided = decide(self.state, event)
        for action in decided:
            self.act(action)

    def act(self, action: object) -> None:  # noqa: C901
        member, number = self.member, 0 if self.state.round is None else self.state.round.number
        match action:
            case actions.JoinJob():
                member.join(is_prepared=action.is_prepared)
            case actions.Send():
                member.send(action.message)
            case actions.StartWorkers():
                self.start_ranks(action.round)
            case actions.SignalWorkers():
                self.world.schedule(self.world.random.choice((0.01, 0.2)), None, partial(self.end_all, self.ranks, -15))
            case actions.KillWorkers():
                self.end_all(self.ranks, -9)
                self.post(events.WorkersGone(round_number=action.round_number), delay_s=0.002)
            case actions.StartTimer():
                timer = action.timer
                self.loop.call_later(action.delay_s, lambda: self.loop.post(events.TimerExpired(timer=timer)))
            case actions.ReadSlots():
                slots = self.read_slots(action.kind)
                self.handle(events.SlotsRead(round_number=action.round_number, drain=action.drain, slots=slots))
            case actions.WriteCommand():
                self.write_command(action)
            case actions.WithdrawCommand():
                if Layout.is_committed(self.command) and Layout.get_kind(self.command) != Layout.JOIN:
                    raise Violation(f"{self.machine.host}: a committed drain was withdrawn")
                self.command = 0
            case actions.ReportFailed():
                failure = self.build_failure()
                member.send(Failed(round_number=number, failures=() if failure is None else (failure,)))
            case actions.SettleFailure():
                failed = action.failure.local_rank
                self.post(events.FailureSettled(round_number=number, local_rank=failed))
            case actions.CollectStacks():
                self.post(events.StacksCollected(round_number=action.round_number, texts={}))
            case actions.ReportStopped():
                member.send(Stopped(round_number=action.round.number))
            case actions.KeepCheckpoint():
                self.checkpoint = action.checkpoint
            case actions.PrintLine():
                self.lines.append(f"{self.world.now_s:.3f} {action.text}")
            case actions.Finish():
                self.code = int(action.code)
                self.outcome = action.ended or action.rendezvous_failed
                self.exit()
            case _:
                pass

    def preempt(self) -> None:
        """SIGTERM at the agent."""
        self.is_preempted = True
        is_asked = any(rank.asked is not None for rank in self.ranks)
        self.post(events.SignalReceived(signum=15, is_asked=is_asked, at_s=self.world.now_s))

    # -- workers ----------------------------------------------------------------------------------------------------

    def start_ranks(self, round_: Round) -> None:
        self.command, self.saved = 0, {}
        self.start_workers(round_)
        assert self.instance is not None
        group = self.world.groups.setdefault(self.instance, Group(size=round_.world_size))
        first = 0 if round_.checkpoint is None else round_.checkpoint.step + 1
        self.world.check_resume(round_.checkpoint)
        self.ranks = [
            Rank(
                global_rank=round_.rank_offset + local,
                local_rank=local,
                instance=self.instance,
                first=first,
                done=first - 1,
            )
            for local in range(self.world.nproc)
        ]
        group.ranks += self.ranks
        for rank in self.ranks:
            self.post(events.WorkerStarted(round_number=round_.number, local_rank=rank.local_rank))
            self.world.advance(self.live(rank, group))
        group.wake()

    def live(self, rank: Rank, group: Group) -> Iterator[float | Group]:
        """What a rank does: yields how long it works, or the group whose other ranks it waits for."""
        world, rng = self.world, self.world.random
        for step in range(rank.first, world.total):
            while not group.may_begin(step):
                yield group
                if not rank.is_alive:
                    return
            yield rng.expovariate(1.0) * world.step_s
            if not rank.is_alive:
                return
            rank.done = step
            group.wake()
            yield from self.ask(rank, group, step)
            if not rank.is_alive:
                return
            if rank.stopped_at is not None or step % world.save_every == 0:
                yield rng.uniform(0.0, 0.3 if rank.stopped_at is not None else 0.02)
                if not rank.is_alive:
                    return
                self.save(rank, group, step)
            if rank.stopped_at is not None:
                break
        self.end(rank, 0)

    def ask(self, rank: Rank, group: Group, step: int) -> Iterator[float]:
        rng = self.world.random
        stride = step - rank.own_asked if rank.own_asked is not None else 0
        rank.own_asked = step

        def publish() -> None:
            if rank.asked is None or step > rank.asked:  # stores become visible in order
                rank.asked, rank.stride = step, stride

        self.world.schedule(rng.uniform(0.0, 0.9 * LOOK_S), None, publish)
        if rng.random() < 0.3:
            yield rng.choice((1e-6, 0.0001, 0.003))
        wait_s = 0.0005
        kind = self.world.asks
        while rank.is_alive and self.command and step >= Layout.get_step(self.command):
            if Layout.get_kind(self.command) != kind:
                break
            if Layout.is_committed(self.command) and rank.stopped_at is None:
                rank.stopped_at = step
                self.world.record_stop(rank)
                if kind == Layout.STOP:
                    break
                yield rng.uniform(0.0, 0.3)
                if rank.is_alive:
                    self.save(rank, group, step)
                    rank.waiting = step
            rank.is_waiting = True
            yield wait_s
            wait_s = min(2 * wait_s, 0.01)
        rank.is_waiting = False
        if kind == Layout.JOIN and rank.is_alive and rank.stopped_at is not None:  # the drain was withdrawn
            rank.stopped_at = None
            self.world.stops.pop(rank.instance, None)

    def save(self, rank: Rank, group: Group, step: int) -> None:
        """The rank has written its part: the agent hears of it once all of the node have."""
        group.saved.setdefault(step, set()).add(rank.global_rank)
        mine = self.saved.setdefault(step, set())
        mine.add(rank.local_rank)
        if len(mine) == self.world.nproc:
            saved = Saved(round_number=rank.instance[0], step=step, path=f"step-{step}")
            self.post(saved, delay_s=self.world.random.choice((0.0, 0.001)))

    def end(self, rank: Rank, code: int) -> None:
        if not rank.is_alive:
            return
        rank.is_alive = False
        exited = events.WorkerExited(
            round_number=rank.instance[0],
            local_rank=rank.local_rank,
            code=code,
            fencings=self.fencings,
            asked=rank.own_asked if self.command and self.world.asks == Layout.STOP else None,
        )
        self.post(exited, delay_s=0.001)  # what it has saved is read before
        self.world.groups[rank.instance].wake()
        if not any(each.is_alive for each in self.ranks):
            self.workers_alive = False

    def end_all(self, ranks: list[Rank], code: int) -> None:
        for rank in ranks:
            self.end(rank, code)

    def kill_workers(self) -> None:
        self.end_all(self.ranks, -9)
        self.workers_alive = False

    def report_kill(self) -> None:
        self.fencings += 1

    def finish_work(self, instance: Instance) -> None:
        """Ranks end by themselves here."""

    def read_slots(self, kind: int) -> tuple[RankSlot, ...]:
        asks = kind == self.world.asks
        return tuple(
            RankSlot(
                global_rank=rank.global_rank,
                step=rank.asked,
                asked=rank.asked if asks else None,
                stride=rank.stride if asks else 0,
                is_asking=True,
                waiting=rank.waiting,
            )
            for rank in self.ranks
        )

    def write_command(self, action: actions.WriteCommand) -> None:
        command = Layout.pack_command(
            drain=action.drain, kind=action.kind, step=action.step, is_committed=action.is_committed
        )
        before = self.command
        if before and get_drain(before) == action.drain:
            if Layout.is_committed(before):
                raise Violation(f"{self.machine.host}: a committed step was changed")
            if action.step < Layout.get_step(before):
                raise Violation(f"{self.machine.host}: a ceiling fell")
        self.command = command


class ElasticWorld(World):
    """All nodes of such a job."""

    process_class = DrainingProcess

    def __init__(self, seed: int, *, nodes: int, min_nodes: int, max_nodes: int, nproc: int, total: int) -> None:
        super().__init__(seed, nodes=nodes, min_nodes=min_nodes, max_restarts=1)
        self.max_nodes = max_nodes
        self.nproc, self.total = nproc, total
        self.step_s = self.random.choice((0.03, 0.1))
        self.save_every = self.random.choice((5, 40))
        self.drain_limit_s = 8.0
        self.asks = Layout.STOP
        """JOIN: the ranks keep snapshots and never ask `should_stop`."""
        self.groups: dict[Instance, Group] = {}
        self.stops: dict[Instance, set[int]] = {}
        self.breaks: list[tuple[float, str, RoundBroken]] = []

    def advance(self, life: Iterator[float | Group]) -> None:
        """Run a rank until it waits: also while its agent is stopped."""
        wait = next(life, None)
        if isinstance(wait, Group):
            wait.waiting.append(lambda: self.schedule(0.0, None, lambda: self.advance(life)))
        elif wait is not None:
            self.schedule(wait, None, lambda: self.advance(life))

    def record_stop(self, rank: Rank) -> None:
        assert rank.stopped_at is not None
        steps = self.stops.setdefault(rank.instance, set())
        steps.add(rank.stopped_at)
        if len(steps) > 1:
            raise Violation(f"{self.now_s:.3f}: ranks of {rank.instance} stop at {steps}")

    def check_resume(self, checkpoint: Checkpoint | None) -> None:
        """A round resumes only from what all ranks of one round have saved, and after a drain without a lost step."""
        if checkpoint is not None and not any(
            len(group.saved.get(checkpoint.step, ())) == group.size for group in self.groups.values()
        ):
            raise Violation(f"{self.now_s:.3f}: {checkpoint} was not saved by all ranks of a round")

    def was_stopped(self, number: int) -> bool:
        """Whether a round ended after all its ranks had saved one step."""
        found = [broken for _, _, broken in self.breaks if broken.round_number == number]
        return any(each.kind is BreakKind.DRAINED or (each.is_join and " after step " in each.reason) for each in found)
