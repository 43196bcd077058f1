"""What a fault is, and what it finds in the job that it disturbs."""

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol, TypeAlias

from muster.cli.rehearse.journal import Journal


class Moment(str, Enum):
    """When a fault happens. The step is chosen by the seed."""

    FIRST = "first"
    """In the first step: the workers run, and none has done a step."""
    BETWEEN = "between"
    """At a step in the middle, after the first checkpoint."""
    CHECKPOINT = "checkpoint"
    """While a checkpoint is written."""
    END = "end"
    """Within the last steps."""


class Place(str, Enum):
    """Where the nodes of a run are."""

    ORDINARY = "ordinary"
    """Processes of this machine, in a folder of it."""
    NAMESPACES = "namespaces"
    """Each in a network namespace of its own."""
    SMALL_DISK = "small disk"
    """The run's folder is a small file system in memory."""
    OWN_DISK = "own disk"
    """The run's folder is a file system of its own, which can be frozen."""


class NotPossibleError(Exception):
    """The fault cannot be caused in this job, or on this machine. The message says why."""


class Scene(Protocol):
    """The job, as a fault sees it."""

    rank: int
    """The global rank that the fault happens to."""
    node: int
    """The index of the node that it happens to, if that is not given: not node 0."""
    nodes: int
    journal: Journal

    def find_worker(self, rank: int) -> int:
        """Return the process of a global rank.

        Raises:
            NotPossibleError: it does not run.
        """
        ...

    def find_agent(self, node: int) -> int:
        """Return the agent's process of a node. Raises as `find_worker`."""
        ...

    @property
    def disk(self) -> Path:
        """The folder with the run's checkpoints and logs."""
        ...

    def cut(self, node: int) -> AbstractContextManager[None]:
        """Cut a node off the network of the others, for as long as the context lasts."""
        ...

    def has_all_workers(self) -> bool:
        """Return whether all ranks run that are known to."""
        ...

    def count_steps(self, rank: int) -> int:
        """Return how many steps a global rank has done."""
        ...

    @property
    def longest_step_s(self) -> float:
        """The longest time between two steps of this run so far."""
        ...


Course: TypeAlias = Generator[float, None, None]
"""The course of a fault: each item is how many seconds it leaves the job alone before it goes on.

It ends when the fault is over. If it is closed before, it undoes what it has done.
"""
FOR_EVER = float("inf")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault."""

    name: str
    title: str
    """What happens, in a few words."""
    holds: str
    """What must hold afterwards, as a sentence for the documentation."""
    cause: Callable[[Scene], Course]
    moments: tuple[Moment, ...] = (Moment.BETWEEN,)
    least_nodes: int = 1
    needs_hang_watch: bool = False
    """The job ends its attempt only if it has a hang timeout."""
    place: Place = Place.ORDINARY


def at_once(act: Callable[[Scene], None]) -> Callable[[Scene], Course]:
    """Return the course of a fault that is over when it has been caused."""

    def cause(scene: Scene) -> Course:
        act(scene)
        yield from ()

    return cause


def send(pid: int, signum: int) -> None:
    """Send a signal.

    Raises:
        NotPossibleError: the process has ended.
    """
    try:
        os.kill(pid, signum)
    except ProcessLookupError as error:
        raise NotPossibleError(f"process {pid} had ended before") from error
