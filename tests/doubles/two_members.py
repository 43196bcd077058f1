"""A leader's state while its round of two members runs, one rank each."""

from typing import Any

from doubles.leader_history import member, rules
from doubles.sent import show_sent

from muster._shared.records import replace
from muster.agent.rendezvous.consensus.decisions import decide
from muster.agent.rendezvous.consensus.events import Event, Joined, LeaseChecked
from muster.agent.rendezvous.consensus.state import build_initial_state


class TwoMembers:
    """Member ids are "0", the leader's own, and "1"."""

    def __init__(self, hang_action: str) -> None:
        own = replace(rules(2, 2, max_restarts=0), join_timeout_s=600.0, hang_action=hang_action)
        self.now_s = 0.0
        self.state = build_initial_state(own, 0.0, takeover=False)
        for index in range(2):
            self.decide(Joined(member=replace(member(index), id=str(index), host="h")))
        self.decide(LeaseChecked(is_held=True))
        self.number = self.state.round_number

    def decide(self, event: Event) -> list[Any]:
        """Take the event's new state, and return the actions."""
        self.state, actions = decide(self.state, event, self.now_s)
        return show_sent(actions)
