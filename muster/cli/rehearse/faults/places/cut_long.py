"""The network of a node is cut for longer than the limit, and comes back."""

from muster.cli.rehearse.faults.fault import Course, Fault, Place, Scene

SECONDS = 12.0
"""More than the 5 s of silence after which a node is lost."""


def cause(scene: Scene) -> Course:
    """Cut the node off until the others have given it up."""
    with scene.cut(scene.node):
        yield SECONDS


FAULT = Fault(
    name="network-lost",
    title="a node's network is cut for 12 s",
    holds="The workers of the node are killed; the node joins again, and all ranks start again.",
    cause=cause,
    least_nodes=2,
    place=Place.NAMESPACES,
)
