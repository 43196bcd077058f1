"""Seeded histories of a round: ranks save at their own pace, nodes look, messages are late, and then everything ends.

The rules are the real ones: of the slots, of a node's look, of the leader, of what the next round continues. Time, the
network and the copying are replaced. Any moment may be the last: what must hold then is asked at each.
"""

import itertools
import os
import random
from collections import deque

import pytest
from doubles.two_members import TwoMembers

from muster._shared.records import replace
from muster._shared.snapshot_file import COMPLETE, Header, Slot
from muster.agent.rendezvous.consensus.actions import RecoveryChanged, Send
from muster.agent.rendezvous.consensus.state import RoundRunning
from muster.agent.rendezvous.interface import CopySnapshot, KeepSnapshot, SnapshotCopied, SnapshotKept
from muster.agent.rendezvous.snapshots import decide_snapshots
from muster.agent.round import Generation, Holding, Round, Source, choose_base, find_lineage
from muster.agent.runtime.persistent import PersistentMap
from muster.agent.snapshots.memory import SnapshotMemory
from muster.agent.workers.status_page import SnapshotFiles

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory files, which only Linux has")
NODES, RANKS = 3, 2


class Node:
    def __init__(self, index, lineage):
        self.index = index
        self.files = SnapshotFiles(nproc=RANKS, share=0, limit_bytes=0, copies=1)
        self.memory = SnapshotMemory(self.files)
        formed = Round(
            number=1, attempt=0, restarts_left=0, group_rank=index, group_world_size=NODES, rank_offset=index * RANKS,
            world_size=NODES * RANKS, role_rank_offset=0, role_world_size=0, master_addr="", master_port=1,
            lineage=lineage, neighbour=Source(host="n", port=1, group_rank=(index + 1) % NODES),
        )  # fmt: skip
        self.memory.begin_round(formed)
        self.memory.control.words[Header.USED] = 1
        self.steps = [0] * RANKS
        self.writing = [None] * RANKS
        self.inbox, self.outbox = deque(), deque()
        self.kept_for_neighbour = []
        """What this node has of the one before it: the last whole copy, and the one that came after it."""
        self.copying = None


class World:
    """One round of three nodes with two ranks each."""

    def __init__(self, seed, skew):
        self.draw = random.Random(seed)
        self.skew = skew
        job = TwoMembers(hang_action="report")
        rank = job.state.assignments["0"]
        assignments = PersistentMap({str(index): replace(rank, id=str(index)) for index in range(NODES)})
        self.state = replace(job.state, phase=RoundRunning(), assignments=assignments)
        self.lineage = find_lineage(self.state.round_number, self.state.quorum_rounds[-1].leader_id)
        self.nodes = [Node(index, self.lineage) for index in range(NODES)]
        self.number = self.state.round_number
        self.confirmed = self.copied = -1
        self.last_copy = None
        self.skipped = 0

    def turn(self):
        node = self.draw.choice(self.nodes)
        act = self.draw.choices([self.save, self.look, self.deliver, self.copy], [10, 1, 3, 1])[0]
        act(node)

    def save(self, node):
        rank = self.draw.randrange(RANKS)
        if node.writing[rank] is not None:
            slot = Slot(COMPLETE, self.lineage, node.steps[rank], 8, node.index * RANKS + rank, NODES * RANKS, False)
            node.memory.control.end_save(rank, node.writing[rank], slot)
            node.writing[rank] = None
        elif node.steps[rank] < min(itertools.chain(*(each.steps for each in self.nodes))) + self.skew:
            node.steps[rank] += 1
            node.writing[rank] = node.memory.control.begin_save(rank)
            self.skipped += node.writing[rank] is None

    def look(self, node):
        found = node.memory.look()
        if found is not None:
            step, advance, _, is_split = found
            kept = SnapshotKept(round_number=self.number, step=step, advance=advance, is_split=is_split)
            node.outbox.append(kept)

    def deliver(self, node):
        if node.outbox and self.draw.random() < 0.5:
            self.state, actions = decide_snapshots(self.state, str(node.index), node.outbox.popleft())
            for action in actions:
                assert isinstance(action, Send)
                for each in action.ids:
                    self.nodes[int(each)].inbox.append(action.message)
                if isinstance(action.message, RecoveryChanged):
                    self.confirmed = action.message.recovery.value.snapshot.step
                elif isinstance(action.message, CopySnapshot) and action.message.is_done:
                    self.copied = action.message.step
        elif node.inbox:
            message = node.inbox.popleft()
            if isinstance(message, RecoveryChanged):
                node.memory.confirm(message.recovery.value.snapshot)
            elif isinstance(message, KeepSnapshot):
                node.memory.hold(message.step)
            elif message.is_done:
                node.memory.end_copy(is_over=message.is_over)
            else:
                node.memory.is_copying, node.copying = True, message.step

    def copy(self, node):
        """The neighbour has got it whole. Before, it has kept the one before it alone."""
        if node.copying is not None:
            assert node.memory.find_part((self.lineage, node.copying)) is not None, "a slot that is sent was given up"
            neighbour = self.nodes[(node.index + 1) % NODES]
            neighbour.kept_for_neighbour = [*neighbour.kept_for_neighbour[-1:], node.copying]
            node.outbox.append(SnapshotCopied(round_number=self.number, lineage=self.lineage, step=node.copying))
            node.copying = None

    def choose_base(self, lost=()):
        holdings = []
        for node in self.nodes:
            if node.index in lost:
                continue
            holdings += node.memory.list_holdings()
            for step in node.kept_for_neighbour:
                generation = Generation(lineage=self.lineage, step=step, size=NODES)
                before = (node.index - 1) % NODES
                holdings.append(
                    Holding(generation=generation, group_rank=before, first_rank=0, nproc=RANKS, is_copy=True)
                )
        base = choose_base(holdings, NODES)
        return -1 if base is None else base.step

    def check(self):
        assert self.choose_base() >= self.confirmed, "what all ranks are known to have is lost"
        for lost in range(NODES):
            assert self.choose_base((lost,)) >= self.copied, f"without node {lost} the copies are of no use"

    def close(self):
        for node in self.nodes:
            node.files.close()


@pytest.mark.parametrize("skew", [1, 2, 8])
@pytest.mark.parametrize("seed", range(8))
def test_what_is_confirmed_outlives_all_workers_and_what_is_copied_any_node(seed, skew):
    world = World(seed, skew)
    try:
        for turn in range(1200):
            world.turn()
            if turn % 4 == 0:
                world.check()
        assert world.confirmed > 0 or skew > 2, "nothing was ever confirmed"
        assert world.skipped == 0
    finally:
        world.close()


def test_with_ranks_in_step_at_most_the_save_that_was_cut_off_is_lost():
    """Where no rank is further than one save, all have the one before."""
    for seed in range(4):
        world = World(seed, 1)
        worst = 0
        for _ in range(1000):
            world.turn()
            least = min(itertools.chain(*(each.steps for each in world.nodes)))
            if not any(each.memory.is_copying for each in world.nodes) and not any(
                each.memory.control.words[Header.HOLD] for each in world.nodes
            ):
                worst = max(worst, least - 1 - world.choose_base())
        world.close()
        assert worst <= 1


def test_copies_go_on_for_ever():
    world = World(7, 2)
    for _ in range(3000):
        world.turn()
    copied = world.copied
    for _ in range(3000):
        world.turn()
    assert world.copied > copied > 0
    world.close()
