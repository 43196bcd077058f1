"""A node is preempted: SIGTERM, and time to save."""

import signal

from muster.cli.rehearse.faults.fault import Course, Fault, Scene
from muster.cli.rehearse.faults.signals import find_guard, send


def cause(scene: Scene) -> Course:
    """Send what a scheduler sends to a node that it wants back."""
    send(find_guard(scene.find_agent(scene.node)), signal.SIGTERM)
    yield from ()


FAULT = Fault(
    name="preempted",
    title="a node is preempted (SIGTERM)",
    holds="All ranks save at one step and stop there; the next run continues with the step after it.",
    cause=cause,
)
