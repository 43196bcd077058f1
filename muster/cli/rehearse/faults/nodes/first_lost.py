"""Node 0 is lost with the leader, the store and global rank 0."""

from muster.cli.rehearse.faults.fault import Course, Fault, Moment, Scene
from muster.cli.rehearse.faults.signals import kill_node


def cause(scene: Scene) -> Course:
    """Kill all processes of node 0 at once."""
    kill_node(scene.find_agent(0))
    yield from ()


FAULT = Fault(
    name="node0-lost",
    title="node 0 is lost",
    holds="Another node leads, the scheduler replaces node 0, and all ranks start again.",
    cause=cause,
    moments=(Moment.BETWEEN, Moment.END),
)
