"""The agent of a node is killed. Its guard ends what the agent has started."""

import signal

from muster.cli.rehearse.faults.fault import Course, Fault, Moment, Scene
from muster.cli.rehearse.faults.signals import send


def cause(scene: Scene) -> Course:
    """Kill the agent alone."""
    send(scene.find_agent(scene.node), signal.SIGKILL)
    yield from ()


FAULT = Fault(
    name="agent-killed",
    title="an agent is killed (SIGKILL)",
    holds="Nothing of the node is left, the scheduler replaces it, and all ranks start again.",
    cause=cause,
    moments=(Moment.BETWEEN, Moment.CHECKPOINT),
)
