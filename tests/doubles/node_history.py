"""A history of events through the pure state machine of a node."""

from doubles.sent import unwrap

from muster.agent.node.decisions import decide
from muster.agent.node.state import NodeRules, NodeState, Running
from muster.agent.round import Round


class RunningNode:
    """A node whose two workers run."""

    def __init__(self, formed: Round, **rules) -> None:
        phase = Running(round=formed, awaited=frozenset(), alive=frozenset({0, 1}))
        self.state = NodeState(rules=NodeRules(nproc=2, **rules), phase=phase)

    def send(self, *events) -> list:
        """Feed these events; the actions of the last one."""
        actions = ()
        for event in events:
            self.state, actions = decide(self.state, event)
        return unwrap(actions)
