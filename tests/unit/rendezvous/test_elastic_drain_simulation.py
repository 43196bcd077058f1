"""Seeded histories of nodes that are preempted in turn: the others go on at the next step, or all exit 143.

Leader, members and the decisions of the nodes are the real ones; see `doubles.elastic_world`. Every seed is checked:
all ranks of a round that stop do so at one step; after it, also if it was for nodes that join, the next round
continues at the step after it, and no attempt is used; a round resumes only from what all ranks of a round have saved;
a preempted node exits; and as long as `min` others are there, the job ends with success. MUSTER_ELASTIC_DRAIN_SEEDS
sets the number of seeds.

Left out of the last rule are nodes that end while no round runs: with the leader gone, the others cannot tell this from
a partition, and wait (see `consensus.quorum`). So may half of the nodes or fewer when one of the others crashes during
a drain, or leaves without one because its workers had just been started: these exit 69 at the join timeout. And
spares are not replaced: nodes that are all new, as many as may take part, form a round of their own.
"""

import os
import random

import pytest
from doubles.elastic_world import DrainingProcess, ElasticWorld
from doubles.rendezvous_world import Violation

from muster._shared.layouts import StatusPageLayout as Layout
from muster.agent.node.state import Running, Succeeded
from muster.agent.rendezvous.interface import JobEnded, RendezvousFailed

SEEDS = int(os.environ.get("MUSTER_ELASTIC_DRAIN_SEEDS", "100"))
BATCHES = 10
PATIENCE_S = 400.0


class Story:
    """One seed: a job, the preemptions of its nodes, and what else happens."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = self.random = random.Random(seed * 6151 + 11)
        nodes = rng.choice((2, 3, 3, 4, 5))
        spares = rng.choice((0, 0, 0, 1))
        most = nodes - spares
        least = min(rng.randint(1, most), rng.randint(1, most))
        self.world = ElasticWorld(
            seed,
            nodes=nodes,
            min_nodes=least,
            max_nodes=most,
            nproc=rng.choice((1, 1, 2)),
            total=rng.choice((100, 200)),
        )
        if seed % 4 == 1:
            self.world.imports_s = (0.3, 2.0)
        if seed // BATCHES % 5 == 3:
            self.world.asks = Layout.JOIN
        self.trouble = rng.choice(("crash", "crash", "stop", "late", "slow")) if rng.random() < 0.4 else ""
        if self.trouble == "late":
            self.world.lateness_s = 0.1
        self.ended_alone = False
        """A node ended between two rounds."""
        self.log: list[str] = []

    def record(self, text: str) -> None:
        self.log.append(f"{self.world.now_s:8.3f} {text}")

    def describe(self) -> str:
        world = self.world
        size = (
            f"{len(world.machines)} nodes, {world.min_nodes} to {world.max_nodes} take part, {world.nproc} ranks each"
        )
        lines = [f"seed {self.seed}: {size}, {world.total} steps, {self.trouble}"]
        lines += self.log
        lines += [f"trained {entry}" for entry in world.trained]
        lines += [f"{at_s:8.3f} {host}: {broken}" for at_s, host, broken in world.breaks]
        for p in world.processes:
            lines.append(f"{p.member_id} rounds {p.numbers} alive={p.is_alive} code={p.code} {p.checkpoint}")
            lines += [f"    {line}" for line in p.lines]
        return "\n".join(lines)

    # -- the history ------------------------------------------------------------------------------------------------

    def play(self) -> None:
        world, rng = self.world, self.random
        for index in range(len(world.machines)):
            world.at(rng.uniform(0.0, 0.5), lambda i=index: world.boot(i))
        for _ in range(rng.choice((1, 1, 2, 2, 3))):
            world.at(rng.uniform(3.0, 9.0), self.preempt)
        if self.trouble in ("crash", "stop"):
            world.at(rng.uniform(3.0, 9.0), self.crash if self.trouble == "crash" else self.stop)
        world.run_until(PATIENCE_S, lambda: world.now_s > 15.0 and not world.alive())

    def pick(self) -> DrainingProcess | None:
        """A node that runs and stays."""
        found = [p for p in self.world.alive() if not p.is_preempted and p.numbers]
        leaders = [p for p in found if p.member.state.is_leading]
        if not found:
            return None
        return leaders[0] if leaders and self.random.random() < 0.4 else self.random.choice(found)

    def preempt(self) -> None:
        process, rng = self.pick(), self.random
        if process is None:
            return
        self.end(process, "SIGTERM")
        if rng.random() < 0.5:
            index = self.world.machines.index(process.machine)
            self.world.at(self.world.now_s + rng.uniform(2.0, 12.0), lambda: self.replace(index))
        if rng.random() < 0.3:
            delay_s = rng.choice((0.0, 0.01, 0.1, 0.4, 1.0))
            self.world.at(self.world.now_s + delay_s, self.preempt_one_more)
        if self.trouble == "crash" and rng.random() < 0.7:
            self.world.at(self.world.now_s + rng.expovariate(3.0), self.crash)

    def preempt_one_more(self) -> None:
        process = self.pick()
        if process is not None:
            self.end(process, "SIGTERM")

    def end(self, process: DrainingProcess, how: str) -> None:
        has_done = " after its work" if isinstance(process.state.phase, Succeeded) else ""
        self.record(f"{how} {process.machine.host}{has_done}")
        if not isinstance(process.state.phase, Running | Succeeded):
            self.ended_alone = True
        (process.preempt if how == "SIGTERM" else process.crash)()

    def replace(self, index: int) -> None:
        """A scheduler starts the node again, while the job runs."""
        machine = self.world.machines[index]
        if (machine.process is not None and machine.process.is_alive) or len(
            self.world.machines
        ) > self.world.max_nodes:
            return
        if any(not p.is_preempted and p.numbers for p in self.world.alive()):
            self.record(f"boot {machine.host}")
            self.world.boot(index)

    def crash(self) -> None:
        process = self.pick()
        if process is not None:
            self.end(process, "crash")
            index = self.world.machines.index(process.machine)
            self.world.at(self.world.now_s + self.random.uniform(1.0, 6.0), lambda: self.replace(index))

    def stop(self) -> None:
        process = self.pick()
        if process is None:
            return
        for_s = self.random.choice((0.05, 0.5, 2.0))
        self.record(f"SIGSTOP {process.machine.host} for {for_s}")
        process.is_stopped = True
        self.world.at(self.world.now_s + for_s, lambda: self.carry_on(process))

    def carry_on(self, process: DrainingProcess) -> None:
        process.is_stopped = False
        process.wake()

    # -- what must hold ---------------------------------------------------------------------------------------------

    def check(self) -> str:
        world = self.world
        processes: list[DrainingProcess] = world.processes
        if left := [p.machine.host for p in world.alive()]:
            raise Violation(f"still alive at the end: {left}")
        for group in world.groups.values():
            if any(rank.is_waiting and rank.is_alive for rank in group.ranks):
                raise Violation("a rank waits for ever")
        for process in processes:
            if process.is_preempted and process.code not in (143, 0):
                raise Violation(f"{process.machine.host} was preempted and exited with {process.code}")
        if any(entry.attempt for entry in world.trained):
            raise Violation("an attempt was used")
        self.check_steps()
        for _, host, broken in world.breaks:  # a join costs no step, unless workers have just been started
            is_early = "no rank calls" in broken.reason or "has not started" in broken.reason
            has_stopped = world.was_stopped(broken.round_number)
            if broken.is_join and not has_stopped and not is_early and world.asks == Layout.STOP:
                raise Violation(f"{host}: {broken.reason}")
        return self.check_end(processes)

    def check_steps(self) -> None:
        """After a drained round nothing is done twice, and nothing is left out."""
        world = self.world
        for instance, group in world.groups.items():
            firsts = {rank.first for rank in group.ranks}
            if len(firsts) != 1:
                raise Violation(f"ranks of {instance} begin with {firsts}")
            before = [each for each in world.groups if each[0] == instance[0] - 1]
            if before and world.was_stopped(before[0][0]):
                [step] = world.stops[before[0]]
                has_finished = any(rank.stopped_at is None for rank in world.groups[before[0]].ranks)
                if not has_finished and firsts != {step + 1}:
                    raise Violation(f"{instance} begins with {firsts} after all ranks stopped at {step}")

    def check_end(self, processes: list[DrainingProcess]) -> str:
        world = self.world
        is_done = any(isinstance(p.outcome, JobEnded) and p.outcome.succeeded for p in processes)
        if is_done:
            return "drained" if any(world.was_stopped(b.round_number) for _, _, b in world.breaks) else "done"
        staying = [p for p in processes if not p.is_preempted and p.code is not None and p.numbers]
        is_minority = 2 * len(staying) <= len(world.machines)
        may_wait = is_minority and (self.trouble == "crash" or self.has_left_without_a_drain(processes))
        if len(staying) >= world.min_nodes and not self.ended_alone and not may_wait:
            codes = [(p.machine.host, p.code) for p in staying]
            raise Violation(f"{len(staying)} nodes were there to go on, and ended with {codes}")
        has_failed = any(isinstance(p.outcome, RendezvousFailed) for p in staying)
        if has_failed and not self.trouble and world.asks == Layout.STOP and self.is_at_once():
            raise Violation("a node waited for others that do not come")
        return "left"

    def has_left_without_a_drain(self, processes: list[DrainingProcess]) -> bool:
        """A node was preempted when its workers had just been started, or stopped: no drain's end says that it left."""
        drained = {host for _, host, broken in self.world.breaks if broken.leaves}
        return any(each.is_preempted and each.machine.host not in drained for each in processes)

    def is_at_once(self) -> bool:
        """Only one signal was sent, to a node of a round that was running, whose own work was not done."""
        sent = [line for line in self.log if "SIGTERM" in line]
        return len(sent) == 1 and "after its work" not in sent[0]


def play(seed: int) -> str:
    story = Story(seed)
    try:
        story.play()
        return story.check()
    except Violation as violation:
        pytest.fail(f"{violation}\n{story.describe()}", pytrace=False)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_others_go_on_without_a_lost_step(batch: int) -> None:
    ends = [play(seed) for seed in range(batch, SEEDS, BATCHES)]
    assert ends.count("drained") >= len(ends) // 5, ends
