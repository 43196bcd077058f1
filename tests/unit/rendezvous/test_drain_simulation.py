"""Seeded histories of a drain: all ranks that ask stop at one step, or none does; no rank waits for ever.

The decisions of leader and nodes are the real ones; see `doubles.drain_world`. MUSTER_DRAIN_SEEDS sets the number of
seeds.
"""

import os
import random

import pytest
from doubles.drain_world import DrainWorld, Plan

SEEDS = int(os.environ.get("MUSTER_DRAIN_SEEDS", "250"))
BATCHES = 20
TROUBLES = ("loss", "leader", "fails", "second", "stale")


class Story:
    """One seed: a job, the preemption of a node, and what else happens."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = self.random = random.Random(seed * 6151 + 5)
        self.is_coupled = rng.random() < 0.6
        self.never_asks = rng.random() < 0.1
        self.falls = rng.random() < 0.08
        self.trouble = rng.choice(TROUBLES) if rng.random() < 0.35 else ""
        self.stride = rng.choice((1, 1, 1, 4, 10))
        step_s = rng.choice((0.0003, 0.003, 0.03, 0.1))
        nodes = rng.choice((1, 1, 2, 3, 3, 5))
        self.is_mixed = not self.is_coupled and rng.random() < 0.5
        """Ranks ask about different steps: agreed on only once all have asked."""
        plans = [[self.build_plan(step_s) for _ in range(rng.choice((1, 2, 4)))] for _ in range(nodes)]
        odd = rng.choice(rng.choice(plans))
        odd.asks = not self.never_asks
        odd.falls_at = rng.randrange(30) * odd.stride if self.falls else None
        self.preempted_s = rng.uniform(0.0, 60 * step_s)
        if self.trouble == "fails":
            rng.choice(rng.choice(plans)).fails_at = rng.randrange(90)
        self.world = DrainWorld(seed, plans, is_coupled=self.is_coupled)
        self.world.leader_lines.append(f"trouble {self.trouble}, coupled {self.is_coupled}")

    def build_plan(self, step_s: float) -> Plan:
        rng = self.random
        plan = Plan(total=rng.choice((60, 10000)), stride=self.stride, step_s=step_s * rng.uniform(0.3, 3.0))
        if self.is_mixed and rng.random() < 0.4:
            plan.stride = rng.choice((2, 3, 5, 6))
        if self.is_coupled:
            plan.total = 10000
        if rng.random() < 0.15:
            plan.evaluates_at, plan.evaluates_s = rng.randrange(1, 60), rng.choice((0.5, 3.0, 20.0))
        if not self.is_mixed and rng.random() < 0.1:
            plan.starts_s = rng.uniform(0.0, 60 * step_s)
        return plan

    def play(self) -> None:
        world, rng = self.world, self.random
        preempted = rng.choice(world.nodes)
        if rng.random() < 0.4:  # a question is on its way when the node learns that it is preempted
            world.at(self.preempted_s, lambda: setattr(world, "on_next_ask", lambda: self.preempt(preempted)))
        else:
            world.at(self.preempted_s, lambda: self.preempt(preempted))
        for node in world.nodes:
            if rng.random() < 0.3:
                for_s = rng.choice((0.005, 0.05, 1.0))
                when_s = self.preempted_s + rng.uniform(-0.01, 0.02)
                world.at(when_s, lambda node=node, for_s=for_s: world.stall(node, for_s))
        soon_s = self.preempted_s + rng.expovariate(1.0) * 5 * world.delay_s
        other = rng.choice(world.nodes)
        if self.trouble == "loss":
            world.at(soon_s, lambda: world.lose(other))
        elif self.trouble == "leader":
            world.at(soon_s, world.lose_leader)
        elif self.trouble == "second":
            world.at(rng.choice((soon_s, self.preempted_s + 1.5)), lambda: self.preempt(other))
        elif self.trouble == "stale":
            self.deliver_stale(soon_s)
        world.run()

    def preempt(self, node) -> None:
        world = self.world
        waits = (rank.plan.asks and rank.own_asked is None and rank.outcome == "runs" for rank in world.ranks)
        if self.is_mixed and any(waits):
            world.at(world.now_s + 0.01, lambda: self.preempt(node))
            return
        world.preempt(node)

    def deliver_stale(self, when_s: float) -> None:
        """A decision of another round, and one of another drain, reach a node."""
        from muster.agent.rendezvous.interface import DrainCommitted, DrainWithdrawn

        world = self.world
        for number, drain in ((world.leader_round - 1, 1), (world.leader_round, 7)):
            for event in (
                DrainCommitted(round_number=number, drain=drain, step=3),
                DrainWithdrawn(round_number=number, drain=drain, reason="old"),
            ):
                node = self.random.choice(world.nodes)
                world.at(when_s, lambda node=node, event=event: world._handle(node, event))

    def describe(self) -> str:
        world = self.world
        lines = [f"seed {self.seed}", *world.leader_lines, f"commits {world.commits}"]
        for node in world.nodes:
            lines.append(f"node {node.index}: code {node.code} alive {node.is_alive} {node.lines}")
            lines += [
                f"  {rank.number}: {rank.outcome} at {rank.stopped_at} asked {rank.own_asked} {rank.plan}"
                for rank in node.ranks
            ]
        return "\n".join(lines)

    def check(self) -> str:
        """Check what must hold; returns how it ended."""
        world, told = self.world, self.describe()
        assert not any(rank.is_waiting and rank.outcome == "runs" for rank in world.ranks), told
        stopped = {rank.stopped_at for rank in world.ranks if rank.stopped_at is not None}
        assert len(stopped) <= 1, told
        assert len(world.commits) <= 1, told
        assert stopped <= set(world.commits), told
        preempted = [node for node in world.nodes if node.state.preemption is not None and node.is_alive]
        assert all(node.code in (143, 0, 1) for node in preempted), told
        is_too_long = any("time limit has passed" in line for node in world.nodes for line in node.lines)
        """Ranks that need longer than the drain and the grace period to reach the step are killed."""
        if stopped and not self.trouble:
            for node in world.nodes:
                assert node.code == 143, told
                has_given_up = "no step was agreed on in time" in node.lines  # while the commit was on its way
                for rank in node.ranks:
                    is_past = (rank.own_asked or 0) >= world.commits[0] and rank.ended_after_commit
                    ends = rank.outcome == "finished" and not is_past
                    is_over = rank.outcome == "killed" and (has_given_up or (is_too_long and not rank.is_waiting))
                    assert rank.stopped_at is not None or ends or is_over or not rank.plan.asks, told
        return "stopped" if stopped else "withdrawn"


@pytest.mark.parametrize("batch", range(BATCHES))
def test_all_ranks_stop_at_one_step_or_none_does(batch: int) -> None:
    ends = []
    for seed in range(batch, SEEDS, BATCHES):
        story = Story(seed)
        story.play()
        ends.append(story.check())
    assert ends.count("stopped") > len(ends) // 4
