"""Faults of a node, or of all of them."""

import signal

from muster._shared import processes
from muster.cli.rehearse.faults.fault import Fault, Moment, NotPossibleError, at_once, send


def find_guard(agent_pid: int) -> int:
    """Return the process that a scheduler has started for a node: the parent of its agent.

    Raises:
        NotPossibleError: the agent has ended.
    """
    stat = processes.read_stat(agent_pid)
    if stat is None:
        raise NotPossibleError(f"agent {agent_pid} had ended before")
    return int(stat[1])


def kill_nodes(*agent_pids: int) -> None:
    """Kill the guard of each agent first, so that nothing tidies up, then all that is below it.

    Raises:
        NotPossibleError: an agent has ended.
    """
    for guard in map(find_guard, agent_pids):
        processes.send_signal([guard, *processes.list_descendants(guard)], signal.SIGKILL)


PREEMPTED = Fault(
    name="preempted",
    title="a node is preempted (SIGTERM)",
    holds="All ranks save at one step and stop there; the next run continues with the step after it.",
    cause=at_once(lambda scene: send(find_guard(scene.find_agent(scene.node)), signal.SIGTERM)),
)
"""The guard gets what a scheduler sends to a node that it wants back."""

FIRST_LOST = Fault(
    name="node0-lost",
    title="node 0 is lost",
    holds="Another node leads, the scheduler replaces node 0, and all ranks start again.",
    cause=at_once(lambda scene: kill_nodes(scene.find_agent(0))),
    moments=(Moment.BETWEEN, Moment.END),
)

LOST = Fault(
    name="node-lost",
    title="another node is lost, and comes back",
    holds="The scheduler replaces the node. An elastic job goes on until then; any other job starts all ranks again.",
    cause=at_once(lambda scene: kill_nodes(scene.find_agent(scene.node))),
    least_nodes=2,
)

AGENT_KILLED = Fault(
    name="agent-killed",
    title="an agent is killed (SIGKILL)",
    holds="Nothing of the node is left, the scheduler replaces it, and all ranks start again.",
    cause=at_once(lambda scene: send(scene.find_agent(scene.node), signal.SIGKILL)),
    moments=(Moment.BETWEEN, Moment.CHECKPOINT),
)

APP_RESTARTED = Fault(
    name="app-restarted",
    title="all nodes are lost at once",
    holds="The job continues from the last checkpoint that all ranks had saved.",
    cause=at_once(lambda scene: kill_nodes(*map(scene.find_agent, range(scene.nodes)))),
)
