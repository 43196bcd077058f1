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
    node.tree.wait().check(69)
    assert f"leaves the job: {why}" in node.tree.stderr


def test_the_leader_s_node_says_itself_that_it_is_at_fault(world: World) -> None:
    """The next leader knows of the attempt, and of the node."""
    (zero, one, two), spare = start(world)
    (world.folder / "fault-0-0").write_text("the GPU is slow")
    wait_until_left(world, zero, "rank 0 on node 0 ")
    assert "muster.worker.leave_node: the GPU" in zero.tree.stderr
    world.wait_for(lambda: all("attempt 1" in each.tree.stdout for each in (one, two, spare)), "the others go on")
    world.finish(one, two, spare)
