"""Causes the faults of `muster rehearse` in agents that a test has started itself, each the child of its guard.

cause(AGENT_KILLED, TreeScene(tree))
"""

import contextlib
from pathlib import Path

from harness import Tree

from muster.cli.rehearse.faults import Fault, NotPossibleError
from muster.cli.rehearse.journal import Journal


class TreeScene:
    """A `Scene`: one node for each tree, whose command is the guard of an agent."""

    rank = 0
    journal: Journal
    disk: Path

    def __init__(self, *trees: Tree, node: int = 0) -> None:
        self._trees = trees
        self.node, self.nodes = node, len(trees)

    def find_agent(self, node: int) -> int:
        """The process below the guard."""
        children = self._trees[node].children()
        if not children:
            raise NotPossibleError(f"node {node} does not run")
        return children[0]

    def find_worker(self, rank: int) -> int:
        """Workers are found in other ways."""
        raise NotPossibleError(f"rank {rank} is not known here")

    def has_all_workers(self) -> bool:
        """See `find_worker`."""
        return True

    def count_steps(self, rank: int) -> int:
        """See `find_worker`."""
        del rank
        return 0

    def cut(self, node: int) -> contextlib.AbstractContextManager[None]:
        """See `netns_world`."""
        raise NotPossibleError(f"node {node} has no network of its own")


def cause(fault: Fault, scene: TreeScene) -> None:
    """Cause a fault that is over at once."""
    assert list(fault.cause(scene)) == [], f"{fault.name} takes time"
