"""Seeded histories of many rounds: ranks fail, nodes are lost or leave and come back, what was saved is damaged.

The rules are the real ones: of the slots, of a node's look, of the leader, of what the next round continues. Time, the
network and the copying are replaced. Ranks save at their own pace, nodes look, messages are late. What a round leaves
is what the next one begins with: which generations stay, which one all continue, and where a new node gets its part.
"""

import os
import random
from collections import deque
from contextlib import closing

import pytest

from muster._shared.layouts import SnapshotHeader as Header
from muster._shared.records import replace
from muster._shared.snapshot_file import COMPLETE, Slot
from muster.agent.features.snapshots.keeping import is_kept
from muster.agent.features.snapshots.leader import RoundSnapshots, decide, find_snapshot
from muster.agent.features.snapshots.memory import SnapshotFiles, SnapshotMemory, SnapshotRound
from muster.agent.features.snapshots.messages import (
    ORDERS,
    CopySnapshot,
    Generation,
    KeepSnapshot,
    SnapshotCopied,
    SnapshotKept,
    pack,
    unpack,
)
from muster.agent.rendezvous.consensus.halves import PartJob
from muster.agent.rendezvous.consensus.members import MemberRecord, RankAssignment
from muster.agent.round import find_lineage

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory files, which only Linux has")
NODES, RANKS = 3, 2
SEEDS = int(os.environ.get("MUSTER_SIM_SEEDS", "32"))


class Node:
    """What one agent has: its memory, and the copies of the node before it."""

    def __init__(self, index):
        self.index = self.group_rank = index
        self.files = SnapshotFiles(nproc=RANKS, share=0, limit_bytes=0, copies=1)
        self.memory = SnapshotMemory(self.files)
        self.content = {}
        """By rank and slot: the generation whose bytes are there; None: parts of two."""
        self.copies = []
        """Holdings of other nodes, whole."""

    def begin_round(self, formed):
        self.memory.begin_round(formed)
        self.memory.control.words[Header.USED] = 1
        base = None if formed.snapshot is None else formed.snapshot.key
        self.copies = [each for each in self.copies if is_kept(each.generation.key, base, self.memory.lineages)]
        self.steps = [0 if base is None else base[1]] * RANKS
        self.writing = [None] * RANKS
        self.inbox, self.outbox = deque(), deque()
        self.copying = None if base is None else (base, False)
        self.memory.is_copying = base is not None

    def list_holdings(self):
        own = self.memory.list_holdings()
        for holding in (each for each in own if not each.is_copy):
            part = self.memory.find_part(holding.generation.key)
            for rank, extent in enumerate(part.extents):
                assert self.content[rank, extent.offset >> 40] == part.key, "a slot has other bytes than it says"
        return (*own, *(replace(each, is_copy=True) for each in self.copies))

    def adopt(self, holding):
        self.memory.make_room(holding.generation.key)
        self.memory.adopt(replace(holding, is_copy=False), holding.generation.size * RANKS, [8] * RANKS)
        for rank, slot in enumerate(self.memory.targets):
            self.content[rank, slot] = holding.generation.key

    def receive(self, holding):
        own = [each for each in self.copies if each.group_rank == holding.group_rank]
        key = holding.generation.key
        if any(each.generation.key == key for each in own):
            return
        others = [each for each in self.copies if each.group_rank != holding.group_rank and each.generation.key == key]
        self.copies = [*others, *own[-1:], holding]


class World:
    """A job of three nodes with two ranks each, or, with a replicated state, of two or three."""

    def __init__(self, seed, skew=None):
        """With a skew, all ranks have a part of the state of their own."""
        self.draw = random.Random(seed)
        self.is_replicated = self.draw.random() < 0.5 and skew is None
        self.skew = skew or self.draw.choice([1, 1, 2, 8])
        self.skipped = 0
        self.nodes = [Node(index) for index in range(NODES)]
        """Those that take part."""
        self.away = []
        """The node that has left, with all that it has: it comes back when the round ends."""
        self.has_left = False
        self.number = 0
        self.chain = {}
        """By lineage: up to which step the current run continues what was done in that round."""
        self.base = None
        self.begin_round(None, {})

    def begin_round(self, base, sources):
        self.number += 1
        self.size = len(self.nodes)
        self.job = self.build_job()
        self.state, self.known = RoundSnapshots(base=base), base
        self.lineage = find_lineage(self.number, self.job.leader_id)
        by_id = {str(node.index): node for node in self.nodes}
        for group_rank, node in enumerate(self.nodes):
            node.group_rank = group_rank
            formed = SnapshotRound(
                number=self.number, lineage=self.lineage, group_rank=group_rank, group_world_size=self.size,
                sends_copies=True, snapshot=base,
            )  # fmt: skip
            node.begin_round(formed)
            if str(node.index) in sources:
                holder, group_rank = sources[str(node.index)]
                found = by_id[holder].list_holdings()
                (holding, *_) = [
                    each for each in found if (each.generation.key, each.group_rank) == (base.key, group_rank)
                ]
                node.adopt(holding)
        self.base = self.confirmed = self.copied = None if base is None else base.key
        self.base_copies = 0
        if base is not None:
            self.copied = None  # until all neighbours have it
            self.chain = {each: step for each, step in self.chain.items() if each < base.lineage}
            self.chain[base.lineage] = base.step
        else:
            self.chain = {}

    # -- what happens in a round -------------------------------------------------------------------------------------

    def turn(self):
        node = self.draw.choice(self.nodes)
        self.draw.choices([self.save, self.look, self.deliver, self.copy], [10, 1, 3, 1])[0](node)

    def save(self, node):
        rank = self.draw.randrange(RANKS)
        slot = node.writing[rank]
        if slot is not None:
            of = node.group_rank * RANKS + rank, self.size * RANKS, self.is_replicated
            saved = Slot(COMPLETE, self.lineage, node.steps[rank], 8, *of)
            node.content[rank, slot] = (self.lineage, node.steps[rank])
            node.memory.control.end_save(rank, slot, saved)
            node.writing[rank] = None
        elif node.steps[rank] < min(step for each in self.nodes for step in each.steps) + self.skew:
            node.steps[rank] += 1
            node.writing[rank] = slot = node.memory.control.begin_save(rank)
            self.skipped += slot is None
            if slot is not None:
                node.content[rank, slot] = None

    def look(self, node):
        found = node.memory.look()
        if found is not None:
            words = dict(zip(("step", "advance", "is_replicated", "is_split"), found, strict=True))
            node.outbox.append(SnapshotKept(**words))

    def deliver(self, node):
        if node.outbox and self.draw.random() < 0.5:
            decision = decide(self.job, self.state, str(node.index), pack(node.outbox.popleft()))
            self.state = decision.state
            if decision.memory is not None:
                self.known = unpack(Generation, decision.memory.content)
                self.confirmed = self.known.key
                for each in self.nodes:
                    each.inbox.append(self.known)
            for ids, content in decision.orders:
                order = ORDERS.parse(content)
                for each in ids:
                    next(one for one in self.nodes if one.index == int(each)).inbox.append(order)
                if isinstance(order, CopySnapshot):
                    self.copying = order.lineage, order.step
                elif not isinstance(order, KeepSnapshot):
                    self.copied = self.copying
        elif node.inbox:
            message = node.inbox.popleft()
            if isinstance(message, Generation):
                node.memory.confirm(message)
            elif isinstance(message, KeepSnapshot):
                node.memory.hold(message.step)
            elif isinstance(message, CopySnapshot):
                node.memory.is_copying, node.copying = True, ((message.lineage, message.step), True)
            else:
                node.memory.end_copy(is_over=message.is_over)

    def copy(self, node):
        if node.copying is None:
            return
        (key, is_told), node.copying = node.copying, None
        part = node.memory.find_part(key)
        if part is None and not is_told:  # its ranks read the base from other nodes' copies
            node.memory.is_copying = False
            return
        assert part is not None, "a slot that is sent was given up"
        for rank, extent in enumerate(part.extents):
            assert node.content[rank, extent.offset >> 40] == key, "a slot that is sent was written to"
        self.nodes[(node.group_rank + 1) % self.size].receive(part.holding)
        if is_told:
            node.outbox.append(SnapshotCopied(lineage=key[0], step=key[1]))
            return
        node.memory.is_copying = False
        self.base_copies += 1
        if self.base_copies == self.size and self.copied is None:
            self.copied = key

    # -- its end -----------------------------------------------------------------------------------------------------

    def end_round(self):
        """All workers end at this moment; then the next round begins."""
        lost = self.draw.choice([None, None, *self.nodes])
        leaves = lost is None and not self.away and self.is_replicated and self.draw.random() < 0.3
        is_damaged = self.base is not None and self.draw.random() < 0.2
        if is_damaged:
            rank, node = self.draw.randrange(RANKS), self.draw.choice(self.nodes)
            slot = node.memory.control.find_slot(rank, self.base)
            if slot is not None:
                node.memory.control.empty_slot(rank, slot)
        if lost is not None:
            lost.files.close()
            self.nodes[self.nodes.index(lost)] = Node(lost.index)
        self.has_left = self.has_left or bool(self.away)
        self.nodes, self.away = sorted([*self.nodes, *self.away], key=lambda node: node.index), []
        if leaves:
            self.away = [self.nodes.pop(self.draw.randrange(NODES))]
        base, sources = self.find_base()
        is_lost = lost is not None or (leaves and self.confirmed == self.base)  # a base may not be copied yet
        self.check(base, is_lost=is_lost, is_damaged=is_damaged)
        self.chain[self.lineage] = 1 << 60
        self.begin_round(base, sources)

    def find_base(self, lost=None):
        """What all would continue now, without what one of them has, and where each gets its part."""
        held = {str(node.index): node.list_holdings() for node in self.nodes if node is not lost}
        return find_snapshot(self.build_job(), held, self.known)

    def build_job(self):
        words = {"nproc": RANKS, "role": "r", "host": "h", "address": "h", "port": 1, "listen_port": 1}
        ranks = {"role_rank_offset": 0, "role_world_size": 0}
        ids = [str(node.index) for node in self.nodes]
        return PartJob(
            round_number=self.number,
            leader_id="leader",
            now_s=0.0,
            is_running=True,
            members={each: MemberRecord(id=each, index=int(each), **words) for each in ids},
            assignments={
                each: RankAssignment(id=each, index=int(each), group_rank=n, rank_offset=n * RANKS, **ranks)
                for n, each in enumerate(ids)
            },
        )

    def check_now(self):
        """Any moment of the first round may be its last."""
        for lost, needed in ((None, self.confirmed), *((node, self.copied) for node in self.nodes)):
            base, _ = self.find_base(lost)
            assert needed is None or (base is not None and base.key >= needed), f"{needed} is lost with {lost}"

    def check(self, base, *, is_lost, is_damaged):
        key = None if base is None else base.key
        needed = self.copied if is_lost else self.confirmed
        if is_damaged and needed == self.base:
            needed = None
        assert needed is None or (key is not None and key >= needed), f"{needed} is lost: {key} is continued"
        is_back = self.has_left and key is not None and (self.base is None or key > self.base)
        if key is not None and key[0] != self.lineage and not is_back:  # it has steps that are newer: no harm
            assert key[1] <= self.chain.get(key[0], -1), f"{key} is of a run that was given up: {self.chain}"

    def close(self):
        for node in (*self.nodes, *self.away):
            node.files.close()


@pytest.mark.parametrize("part", range(4))
def test_over_many_rounds_nothing_that_is_confirmed_is_lost_and_nothing_given_up_comes_back(part):
    continued = 0
    for seed in range(part * SEEDS // 4, (part + 1) * SEEDS // 4):
        world = World(seed)
        try:
            for _ in range(12):
                for _ in range(world.draw.choice([0, 30, 300, 900])):
                    world.turn()
                world.end_round()
                continued += world.base is not None
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, round {world.number}: {error}") from error
        finally:
            world.close()
    assert continued > SEEDS  # of 3 x SEEDS


@pytest.mark.parametrize("skew", [1, 2, 8])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_confirmed_outlives_all_workers_and_what_is_copied_any_node(seed, skew):
    with closing(World(seed, skew)) as world:
        for turn in range(1200):
            world.turn()
            if turn % 8 == 0:
                world.check_now()
        assert world.confirmed is not None or skew > 2, "nothing was ever confirmed"
        assert world.skipped == 0


def test_with_ranks_in_step_at_most_the_save_that_was_cut_off_is_lost():
    """Where no rank is further than one save, all have the one before."""
    for seed in range(4):
        with closing(World(seed, 1)) as world:
            for _ in range(1000):
                world.turn()
                least = min(step for node in world.nodes for step in node.steps)
                memories = [node.memory for node in world.nodes]
                if not any(each.is_copying or each.control.words[Header.HOLD] for each in memories):
                    base, _ = world.find_base()
                    assert least - 1 - (-1 if base is None else base.step) <= 1


def test_copies_go_on_for_ever():
    with closing(World(7, 2)) as world:
        seen = []
        for _ in range(2):
            for _ in range(3000):
                world.turn()
            seen.append(world.copied)
        assert seen[0] < seen[1]
