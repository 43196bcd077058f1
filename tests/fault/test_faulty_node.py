"""Real agents in namespaces: a node that fails on purpose leaves, and a spare node takes its place."""

import pytest
from netns_world import Node, World

pytestmark = [pytest.mark.netns, pytest.mark.timeout(240), pytest.mark.soak]

FLAGS = {"sums": "plain", "max-restarts": "2", "on": "exit 77: elsewhere", "restart-backoff": "0"}


def start(world: World, **flags: str) -> tuple[list[Node], Node]:
    """Three nodes that train, and a spare one."""
    options = {**FLAGS, **flags}
    nodes = world.start(3, "3", **options)
    spare = world.launch(3, "3", **options)
    spare.tree.wait_for_line("as a spare", stream="stderr")
    return nodes, spare


def wait_until_left(world: World, node: Node, why: str) -> None:
    """The node leaves with the exit code after which its scheduler starts another, and says why."""
    outcome = node.tree.wait()
    assert (outcome.exit_code, outcome.leftovers) == (69, ()), "\n".join(each.explain() for each in world.nodes)
    assert f"this node leaves the job: {why}" in node.tree.stderr


def test_the_leader_s_node_says_itself_that_it_is_at_fault(world: World) -> None:
    """The next leader knows of the attempt, and of the node."""
    (zero, one, two), spare = start(world)
    (world.folder / "fault-0-0").write_text("the GPU is slow")
    wait_until_left(world, zero, "rank 0 on node 0 ")
    assert "muster.worker.leave_node: the GPU is slow" in zero.tree.stderr
    world.wait_for(lambda: all("attempt 1" in each.tree.stdout for each in (one, two, spare)), "the others go on")
    world.finish(one, two, spare)


@pytest.mark.long
def test_counts_are_the_job_s_also_when_the_leader_changes_between_two_failures(world: World) -> None:
    """The rule allows one restart: the failure after the takeover is the second of its cause."""
    rules = "exit 77: restart 1"
    zero, one, two = world.start(3, "2:3", **{**FLAGS, "on": rules})
    (world.folder / "fault-2-0").touch()
    world.wait_for(lambda: all("attempt 1" in each.tree.stdout for each in (zero, one, two)), "a first restart")
    zero.kill_agent()
    world.wait_for_sizes([2], one, two)
    (world.folder / "fault-1-1").touch()
    for node in (one, two):
        outcome = node.tree.wait()
        assert outcome.exit_code == 1, "\n".join(each.explain() for each in world.nodes)
    said = one.tree.stderr + two.tree.stderr
    assert f"restarted once without progress since (--on '{rules}')" in " ".join(said.split())


@pytest.mark.long
def test_the_report_names_a_suspected_node(world: World) -> None:
    """No node can take its place, and no restart is left."""
    zero, one = world.start(2, "2", **{**FLAGS, "max-restarts": "1"})
    (world.folder / "fault-1-0").write_text("the GPU is slow")
    (world.folder / "fault-1-1").write_text("the GPU is slow")
    for node in (zero, one):
        assert node.tree.wait().exit_code == 1, "\n".join(each.explain() for each in world.nodes)
    page = " ".join(zero.tree.stderr.split())
    assert "no other node can take the place of its node; restart 1 of 1" in page
    assert "is suspected: it failed first (device or link); other nodes go before it for 10 min" in page
    assert "Suspected : node 1 (" in page
    assert "cause : device or link" in page
