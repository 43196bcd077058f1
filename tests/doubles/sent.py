"""What a leader sends, as tests look at it: each message once, with the members that get it."""

from collections.abc import Iterable
from typing import Any

from muster.agent.node import actions as node_actions
from muster.agent.rendezvous.consensus.actions import Action, RoundBreak, Send


class Sent:
    """A message that looks like itself (`isinstance`, its fields), with its recipients beside.

    A round's break is one message here: `ids` are all that get it, `leaving` those that leave.
    """

    def __init__(self, send: Send) -> None:
        self.ids = send.ids
        self.message: Any = send.message
        self.leaving = send.ids if isinstance(send.message, RoundBreak) and send.message.broken.leaves else ()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.message)

    def __getattr__(self, name: str) -> Any:
        found = self.message.broken if hasattr(self.message, "broken") else self.message
        return getattr(found if hasattr(found, name) else self.message, name)

    def __repr__(self) -> str:
        return f"Sent({self.message!r} to {self.ids})"


def show_sent(actions: Iterable[Action]) -> list[Any]:
    """The actions, with a `Sent` for each message; one that nobody gets is left out."""
    shown: list[Any] = []
    for action in actions:
        if not isinstance(action, Send):
            shown.append(action)
            continue
        sent = Sent(action)
        if shown and isinstance(shown[-1], RoundBreak) and isinstance(sent, RoundBreak):
            first = shown.pop()
            sent.ids = (*first.ids, *sent.ids)
        if sent.ids or isinstance(sent, RoundBreak):
            shown.append(sent)
    return shown


def unwrap(actions: Iterable[Any]) -> list[Any]:
    """A node's actions, with each message that it sends in place of the action."""
    return [action.message if isinstance(action, node_actions.Send) else action for action in actions]
