"""A node other than node 0 is lost, and comes back: the scheduler starts it again."""

from muster.cli.rehearse.faults.fault import Course, Fault, Scene
from muster.cli.rehearse.faults.signals import kill_node


def cause(scene: Scene) -> Course:
    """Kill all processes of the node at once."""
    kill_node(scene.find_agent(scene.node))
    yield from ()


FAULT = Fault(
    name="node-lost",
    title="another node is lost, and comes back",
    holds="The scheduler replaces the node. An elastic job goes on until then; any other job starts all ranks again.",
    cause=cause,
    least_nodes=2,
)
