"""Faults of a node, or of all of them."""

import signal

from muster.cli.rehearse.faults.fault import Course, Fault, Moment, Scene
from muster.cli.rehearse.faults.signals import find_guard, kill_node, send


def _preempt(scene: Scene) -> Course:
    """Send what a scheduler sends to a node that it wants back."""
    send(find_guard(scene.find_agent(scene.node)), signal.SIGTERM)
    yield from ()


PREEMPTED = Fault(
    name="preempted",
    title="a node is preempted (SIGTERM)",
    holds="All ranks save at one step and stop there; the next run continues with the step after it.",
    cause=_preempt,
)


def _lose_first(scene: Scene) -> Course:
    """Kill all processes of node 0 at once."""
    kill_node(scene.find_agent(0))
    yield from ()


FIRST_LOST = Fault(
    name="node0-lost",
    title="node 0 is lost",
    holds="Another node leads, the scheduler replaces node 0, and all ranks start again.",
    cause=_lose_first,
    moments=(Moment.BETWEEN, Moment.END),
)


def _lose(scene: Scene) -> Course:
    """Kill all processes of the node at once."""
    kill_node(scene.find_agent(scene.node))
    yield from ()


LOST = Fault(
    name="node-lost",
    title="another node is lost, and comes back",
    holds="The scheduler replaces the node. An elastic job goes on until then; any other job starts all ranks again.",
    cause=_lose,
    least_nodes=2,
)


def _kill_agent(scene: Scene) -> Course:
    """Kill the agent alone."""
    send(scene.find_agent(scene.node), signal.SIGKILL)
    yield from ()


AGENT_KILLED = Fault(
    name="agent-killed",
    title="an agent is killed (SIGKILL)",
    holds="Nothing of the node is left, the scheduler replaces it, and all ranks start again.",
    cause=_kill_agent,
    moments=(Moment.BETWEEN, Moment.CHECKPOINT),
)


def _lose_all(scene: Scene) -> Course:
    """Kill all processes of all nodes."""
    agents = [scene.find_agent(node) for node in range(scene.nodes)]
    for agent in agents:
        kill_node(agent)
    yield from ()


APP_RESTARTED = Fault(
    name="app-restarted",
    title="all nodes are lost at once",
    holds="The job continues from the last checkpoint that all ranks had saved.",
    cause=_lose_all,
)
