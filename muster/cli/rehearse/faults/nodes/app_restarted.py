"""All nodes are lost at once, and the scheduler starts the whole job again: no agent remembers anything."""

from muster.cli.rehearse.faults.fault import Course, Fault, Scene
from muster.cli.rehearse.faults.signals import kill_node


def cause(scene: Scene) -> Course:
    """Kill all processes of all nodes."""
    agents = [scene.find_agent(node) for node in range(scene.nodes)]
    for agent in agents:
        kill_node(agent)
    yield from ()


FAULT = Fault(
    name="app-restarted",
    title="all nodes are lost at once",
    holds="The job continues from the last checkpoint that all ranks had saved.",
    cause=cause,
)
