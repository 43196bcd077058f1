"""What a node does with its snapshots when the leader says something, and when a part does not come."""

import os
from types import SimpleNamespace

import pytest

from muster._shared.layouts import SnapshotHeader as Header
from muster._shared.snapshot_file import COMPLETE, Slot
from muster.agent.features.snapshots import ranges
from muster.agent.features.snapshots.memory import LOOK_S, SnapshotFiles, SnapshotRound
from muster.agent.features.snapshots.messages import CopiesEnded, CopySnapshot, Generation, SnapshotKept, Source
from muster.agent.features.snapshots.node_snapshots import NodeSnapshots
from muster.agent.round import find_lineage

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memory files, which only Linux has")
LINEAGE = find_lineage(1, "leader")
OTHER = Source(host="10.0.0.2", port=1, group_rank=1)


class Loop:
    """Time passes when the test says so."""

    def __init__(self):
        self.now_s = 100.0
        self.clock = SimpleNamespace(now_s=lambda: self.now_s, wall_s=lambda: self.now_s)
        self.timers = []

    def call_later(self, delay_s, callback):
        timer = SimpleNamespace(due_s=self.now_s + delay_s, callback=callback)
        timer.cancel = lambda: timer in self.timers and self.timers.remove(timer)
        self.timers.append(timer)
        return timer

    def let_pass(self, seconds):
        end_s = self.now_s + seconds
        while due := sorted((each for each in self.timers if each.due_s <= end_s), key=lambda each: each.due_s):
            self.now_s = due[0].due_s
            self.timers.remove(due[0])
            due[0].callback()
        self.now_s = end_s


class Exchange:
    """Ends transfers when the test says so."""

    def __init__(self):
        self.sent, self.fetched, self.cancelled, self.fetching = [], [], [], None

    def begin_round(self, formed):
        pass

    def send(self, key, _neighbour, on_end):
        self.sent.append((key[1], on_end))

    def fetch(self, _generation, _source, on_end, _print_line):
        self.fetching = SimpleNamespace(cancel=self.cancelled.append)
        self.fetched.append(on_end)

    def end_fetch(self, problem, does_not_fit=False):
        self.fetching = None
        self.fetched.pop()(problem, does_not_fit)


@pytest.fixture
def node():
    files = SnapshotFiles(nproc=1, share=0, limit_bytes=0, copies=1)
    made = SimpleNamespace(loop=Loop(), posted=[], lines=[], exchange=Exchange(), calls=[])
    made.snapshots = NodeSnapshots(made.loop, files, None, lambda _, sent: made.posted.append(sent), made.lines.append)
    made.snapshots._exchange = made.exchange
    made.snapshots._ranges = SimpleNamespace(close=lambda: None)
    made.memory = made.snapshots.memory
    yield made
    files.close()


def begin(node, number=1, **more):
    formed = SnapshotRound(
        number=number,
        lineage=find_lineage(number, "leader"),
        group_rank=0,
        group_world_size=2,
        sends_copies=True,
        **more,
    )
    node.snapshots.begin_round(
        formed, lambda: node.calls.append(f"ready {number}"), lambda why: node.calls.append(f"missing {number}: {why}")
    )
    node.memory.control.words[Header.USED] = 1


def save(node, step):
    slot = node.memory.control.begin_save(0)
    if slot is not None:
        node.memory.control.end_save(0, slot, Slot(COMPLETE, node.memory.control.lineage, step, 8, 0, 2, False))
    return slot


def list_kept(node):
    return [each.step for each in node.posted if isinstance(each, SnapshotKept)]


def confirm(node, step):
    generation = Generation(lineage=LINEAGE, step=step, size=2)
    node.snapshots.confirm(1, generation)
    node.snapshots.obey(1, CopySnapshot(lineage=LINEAGE, step=step, neighbour=OTHER))


def test_while_a_copy_is_sent_saves_go_on_and_right_after_it_the_newest_is_kept(node):
    begin(node, neighbour=OTHER)
    for step in (1, 2):
        save(node, step)
    node.loop.let_pass(LOOK_S)
    assert list_kept(node) == [2]
    confirm(node, 2)
    for step in range(3, 60):  # 28 s
        node.loop.let_pass(0.5)
        assert save(node, step) is not None, "a save is left out only where no slot is free"
    assert list_kept(node) == [2], "what the neighbours have, all nodes must have"
    assert node.memory.control.find_slot(0, (LINEAGE, 2)) is not None
    node.snapshots.obey(1, CopiesEnded())
    node.loop.let_pass(0.001)
    assert list_kept(node) == [2, 59]


def test_after_a_quick_copy_the_next_one_is_kept_a_second_after_the_last(node):
    """At most once a second, however quick the copies are."""
    begin(node, neighbour=OTHER)
    save(node, 1)
    node.loop.let_pass(LOOK_S)
    confirm(node, 1)
    save(node, 2)
    node.snapshots.obey(1, CopiesEnded())
    node.loop.let_pass(0.9 * LOOK_S)
    assert list_kept(node) == [1]
    node.loop.let_pass(0.2 * LOOK_S)
    assert list_kept(node) == [1, 2]


BASE = Generation(lineage=LINEAGE, step=7, size=2)


def test_workers_begin_when_their_part_is_there(node):
    begin(node, number=2, snapshot=BASE, source=OTHER, neighbour=OTHER)
    assert node.calls == []
    node.exchange.end_fetch(None)
    assert node.calls == ["ready 2"]
    assert [step for step, _ in node.exchange.sent] == [7], "and the neighbour gets it"


def test_a_part_that_does_not_come_ends_the_round(node):
    begin(node, number=2, snapshot=BASE, source=OTHER)
    node.exchange.end_fetch("it took longer than 600 s")
    assert ["of step 7 from 10.0.0.2: " in each for each in node.calls] == [True]


def test_where_a_part_does_not_fit_the_job_goes_on(node):
    begin(node, number=2, snapshot=BASE, source=OTHER, neighbour=OTHER)
    node.exchange.end_fetch("a state of 9 bytes is more than the 8 that --snapshot-memory allows", does_not_fit=True)
    assert node.calls == ["ready 2"]
    assert node.exchange.sent == [], "there is nothing to copy"
    assert ("9 bytes" in node.lines[-1], " the 8 " in node.lines[-1]) == (True, True)


def test_the_next_round_begins_when_the_fetch_of_the_last_one_has_ended(node):
    begin(node, number=2, snapshot=BASE, source=OTHER)
    begin(node, number=3)
    assert ["round is over" in each for each in node.exchange.cancelled] == [True]
    assert node.calls == []
    node.exchange.end_fetch("its round is over")
    assert node.calls == ["ready 3"]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), OSError("no descriptors")])
def test_a_round_begins_also_where_workers_cannot_read_other_ranks(node, monkeypatch, error):
    def fail(*_):
        raise error

    node.snapshots._ranges = node.exchange.read_range = None
    monkeypatch.setattr(ranges, "RangeServer", fail)
    begin(node, number=2, snapshot=BASE)
    assert node.calls == ["ready 2"]
    assert [f"ranks' snapshots: {error}" in each for each in node.lines] == [True]
