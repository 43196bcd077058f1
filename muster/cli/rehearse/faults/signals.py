"""Sends signals to processes of a job."""

import os
import signal

from muster._shared import processes
from muster.cli.rehearse.faults.fault import NotPossibleError


def send(pid: int, signum: int) -> None:
    """Send a signal.

    Raises:
        NotPossibleError: the process has ended.
    """
    try:
        os.kill(pid, signum)
    except ProcessLookupError as error:
        raise NotPossibleError(f"process {pid} had ended before") from error


def find_guard(agent_pid: int) -> int:
    """Return the process that a scheduler has started for a node: the parent of its agent.

    Raises:
        NotPossibleError: the agent has ended.
    """
    stat = processes.read_stat(agent_pid)
    if stat is None:
        raise NotPossibleError(f"agent {agent_pid} had ended before")
    return int(stat[1])


def kill_node(agent_pid: int) -> None:
    """Kill the guard of an agent first, so that nothing tidies up, then all that is below it.

    Raises:
        NotPossibleError: the agent has ended.
    """
    guard = find_guard(agent_pid)
    below = processes.list_descendants(guard)
    processes.send_signal([guard, *below], signal.SIGKILL)
