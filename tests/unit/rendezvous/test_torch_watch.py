"""How the nodes of a round agree on the job's end through torch's store: a fake store and clock."""

import json

import pytest
from doubles.samples import make_failure
from doubles.torch_store import FakeStore

from muster.agent.rendezvous.torch_handlers.watch import AllDone, FailedElsewhere, NodeLost, RoundWatch

SILENCE_S = 15.0
ROOT = make_failure(node=1, node_index=1, host="h1", global_rank=3, pid=7, time_s=1.0, exit_code=3)


class Nodes:
    """The nodes of one round. Those in `alive` send heartbeats."""

    def __init__(self, size: int, *, nonce: str = "r1", store: FakeStore | None = None) -> None:
        self.now_s = 100.0
        self.store = store or FakeStore()
        self.watches = [
            RoundWatch(self.store, nonce, rank=rank, size=size, silence_s=SILENCE_S, now_s=lambda: self.now_s)
            for rank in range(size)
        ]
        self.alive = set(range(size))
        self.found: dict[int, object] = {}
        """What each living node found first."""

    def advance(self, seconds: float) -> None:
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            for rank in sorted(self.alive):
                self.watches[rank].send_heartbeat()
                found = self.watches[rank].check()
                if found is not None:
                    self.found.setdefault(rank, found)


def test_a_node_that_is_done_waits_for_living_nodes_without_limit() -> None:
    nodes = Nodes(3)
    nodes.watches[0].post_done()
    nodes.watches[1].post_done()
    nodes.advance(2000.0)
    assert nodes.found == {}
    nodes.watches[2].post_done()
    nodes.advance(1.0)
    assert nodes.found == dict.fromkeys(range(3), AllDone())


@pytest.mark.parametrize(
    ("size", "gone", "done", "finder"),
    [
        pytest.param(2, {1}, {0}, 0, id="one of two"),
        pytest.param(4, {2}, set(), 1, id="its neighbour reports"),
        pytest.param(4, {2, 3}, {0, 1}, 1, id="two neighbours"),
        pytest.param(5, {0, 2}, {4}, 1, id="apart"),
        pytest.param(4, {1, 2}, {1}, 0, id="after one that was done and is lost"),
        pytest.param(3, {0}, {0, 1, 2}, None, id="all were done before"),
    ],
)
def test_a_lost_node_is_found_by_its_watcher(size: int, gone: set, done: set, finder: int | None) -> None:
    nodes = Nodes(size)
    for rank in done:
        nodes.watches[rank].post_done()
    nodes.alive -= gone
    nodes.advance(2 * SILENCE_S + 2.0)
    lost = {rank for rank, found in nodes.found.items() if isinstance(found, NodeLost)}
    assert (finder in lost) if finder is not None else (not lost)
    assert all(found.rank in gone - done for found in nodes.found.values() if isinstance(found, NodeLost))


def test_no_node_is_lost_before_the_silence_limit() -> None:
    nodes = Nodes(2)
    nodes.advance(5.0)
    nodes.alive -= {1}
    nodes.advance(SILENCE_S - 2.0)
    assert nodes.found == {}


def test_all_nodes_that_are_not_done_must_stand_still() -> None:
    nodes = Nodes(3)
    first, second, third = nodes.watches
    first.post_still(is_still=True)
    third.post_done()
    nodes.advance(1.0)
    assert not first.find_all_still()
    second.post_still(is_still=True)
    first.post_still(is_still=False)
    nodes.advance(1.0)
    assert not second.find_all_still()
    first.post_still(is_still=True)
    nodes.advance(1.0)
    assert [each.find_all_still() for each in nodes.watches] == [True, True, False]
    nodes.advance(1.0)
    assert not first.find_all_still(), "it is found once for each time that it is written"
    first.post_still(is_still=True)
    nodes.advance(1.0)
    assert first.find_all_still()


def test_the_store_is_asked_for_nodes_that_stand_still_once_a_second() -> None:
    nodes = Nodes(2)
    nodes.watches[0].post_still(is_still=True)
    assert not nodes.watches[0].find_all_still()
    nodes.watches[1].post_still(is_still=True)
    nodes.now_s += 0.9
    assert not nodes.watches[0].find_all_still()
    nodes.now_s += 0.1
    assert nodes.watches[0].find_all_still()


def test_the_success_of_a_lost_node_counts() -> None:
    nodes = Nodes(2)
    nodes.watches[1].post_done()
    nodes.alive -= {1}
    nodes.advance(100.0)
    assert nodes.found == {}
    nodes.watches[0].post_done()
    nodes.advance(1.0)
    assert nodes.found == {0: AllDone()}


def test_a_failure_for_good_reaches_all_with_its_root_cause() -> None:
    nodes = Nodes(3)
    nodes.watches[0].post_done()
    nodes.watches[1].post_failed("rank 3 exited with code 3", ROOT)
    nodes.advance(1.0)
    assert nodes.found[0] == nodes.found[2] == FailedElsewhere(reason="rank 3 exited with code 3", root=ROOT)


@pytest.mark.parametrize("text", ["", "[1]", "{}", json.dumps({"reason": "x", "root": {"node": "y"}}), "[" * 5000])
def test_a_malformed_failure_counts(text: str) -> None:
    nodes = Nodes(2)
    nodes.store.set("r1/failed", text)
    nodes.advance(0.5)
    assert isinstance(nodes.found[0], FailedElsewhere)


def test_keys_of_an_older_round_do_not_count() -> None:
    first = Nodes(2, nonce="r1")
    for watch in first.watches:
        watch.post_done()
        watch.post_seen()
    first.watches[0].post_failed("x", None)
    second = Nodes(2, nonce="r2", store=first.store)
    second.watches[0].post_done()
    second.advance(1.0)
    assert second.found == {}
    assert not second.watches[0].is_end_seen_by_all()


def test_the_end_is_seen_by_all_when_each_has_written_it() -> None:
    nodes = Nodes(3)
    for rank in (2, 0, 1):
        assert not nodes.watches[0].is_end_seen_by_all()
        nodes.watches[rank].post_seen()
    assert nodes.watches[0].is_end_seen_by_all()
