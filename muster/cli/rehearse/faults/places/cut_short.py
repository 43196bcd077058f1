"""The network of a node is cut, and back before the node counts as lost."""

from muster.cli.rehearse.faults.fault import Course, Fault, Place, Scene

SECONDS = 3.0
"""Less than the 5 s of silence after which a node is lost."""


def cause(scene: Scene) -> Course:
    """Cut the node off for a while."""
    with scene.cut(scene.node):
        yield SECONDS


FAULT = Fault(
    name="network-cut",
    title="a node's network is cut for 3 s",
    holds="The job stands still for as long, and goes on without a restart.",
    cause=cause,
    least_nodes=2,
    place=Place.NAMESPACES,
)
