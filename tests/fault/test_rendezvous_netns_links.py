"""Real agents, each in a network namespace of its own: links go down or lose packets, and agents stop.

No other node can know what such a node's workers do meanwhile. Every test ends with a check of the workers' own locks
that no two groups were alive at the same time: see `programs/netns_sums.py`.
"""

import signal

import pytest
from netns_world import World

pytestmark = [pytest.mark.netns, pytest.mark.timeout(240), pytest.mark.soak]


@pytest.mark.long
@pytest.mark.torch
def test_link_down_and_up(world: World) -> None:
    """With the real limits."""
    world.env = {}
    nodes = world.start(3, "2:3")
    world.net.set_link(2, "down")
    world.wait_for_sizes([3, 2], *nodes[:2])
    world.net.set_link(2, "up")
    world.wait_for_sizes([2, 3], *nodes[:2])
    world.finish(*nodes)


@pytest.mark.long
@pytest.mark.torch
def test_a_name_whose_first_address_drops_packets_with_static_rendezvous(world: World) -> None:
    """As node 1's resolver sorts them. torch's store is at the name, too, and would wait for that address alone."""
    for _ in range(2):
        world.net.add_node()
    world.net.name_two_addresses("head", 0, "10.77.0.3")
    nodes = world.start(2, "2", **{"rdzv-backend": "static", "rdzv-endpoint": "head:29400"})
    assert "MASTER_ADDR is 10.77.0.1 on" in nodes[1].tree.stderr
    (world.folder / "stop").touch()  # not `finish`: the two nodes name their group differently
    assert [node.tree.wait().exit_code for node in nodes] == [0, 0]


@pytest.mark.parametrize(
    ("victim", "chain"),
    [
        (0, "INPUT"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((0, "OUTPUT"), (2, "INPUT"), (2, "OUTPUT"))),
    ],
)
def test_packets_dropped_one_way(world: World, victim: int, chain: str) -> None:
    """A node that only sends, and one that only receives; the leader and another."""
    nodes = world.start(3, "2:3", sums="plain")
    others = [node for node in nodes if node.index != victim]
    world.net.drop(victim, chain)
    world.wait_for_sizes([3, 2], *others)
    world.wait_for(lambda: not nodes[victim].find_workers(), "the cut-off node's worker is gone")
    world.net.stop_dropping(victim, chain)
    world.wait_for_sizes([3], *nodes)
    world.finish(*nodes)


@pytest.mark.long
@pytest.mark.torch
def test_latency_of_200_ms(world: World) -> None:
    """No answer arrives within the time of a redial: the loss of node 0 is still detected."""
    world.env = {}  # a round trip is what the real limits allow for
    for _ in range(3):
        world.net.add_node()
    world.net.delay(200)
    first, *others = world.start(3, "2:3")
    first.kill_agent()
    world.wait_for_sizes([3, 2], *others)
    first = world.launch(0, "2:3")
    world.wait_for_sizes([3], first, *others)
    world.finish(first, *others)


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_stopped_agent_whose_workers_run_on(world: World, victim: int) -> None:
    """Its guard kills them before the others go on without it; continued, it takes part again."""
    nodes = world.start(3, "2:3", sums="plain")
    others = [node for node in nodes if node.index != victim]
    agent, workers = nodes[victim].find_agent(), nodes[victim].find_workers()
    assert len(workers) == 1
    nodes[victim].tree.send(signal.SIGSTOP, agent)
    world.wait_for_sizes([3, 2], *others)
    assert not nodes[victim].find_workers()  # the agent is still stopped: the guard killed them
    nodes[victim].tree.send(signal.SIGCONT, agent)
    world.wait_for_sizes([3, 2, 3], *others)
    world.wait_for_sizes([3], nodes[victim])
    world.finish(*nodes)
    assert '"fenced"' in nodes[victim].read_events()


def test_node_0_that_was_started_again_forms_no_round_beside_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot reach the nodes that continue the job, and knows that they may exist."""
    zero, *others = world.start(3, "1:3", sums="plain")
    zero.kill_agent()
    world.wait_for_sizes([3, 2], *others)
    world.net.set_link(0, "down")
    monkeypatch.setenv("MUSTER_INCARNATION", "1")
    zero = world.launch(0, "1:3", sums="plain")
    zero.tree.wait_for_line("waiting for nodes of the last round: 1 is here", stream="stderr")
    assert zero.world_sizes() == []
    world.net.set_link(0, "up")
    world.wait_for_sizes([3], zero, *others)
    world.finish(zero, *others)
