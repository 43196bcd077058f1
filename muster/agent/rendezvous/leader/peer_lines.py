"""Lines for the console about other nodes: which was refused, and why.

A refused node tries again, and any process may connect. So each line is printed once, and their number is limited.
"""

from muster.agent.rendezvous.interface import PostNotice
from muster.agent.rendezvous.protocol.leader_messages import Rejected
from muster.agent.rendezvous.transport.links import Link

LIMIT = 50
"""How many lines one node prints."""

UNPROVED = (
    "the leader has refused this node, and shows why only on its own console, because the job has no MUSTER_TOKEN; "
    "if another job listens at this host and port, use another port (--rdzv-endpoint)"
)


def refuse(link: Link, reason: str, *, usage: bool = False) -> None:
    """Refuse a node and close its link. A node that has not proved the job's token gets no reason."""
    link.send(Rejected(reason=reason if link.is_proved else UNPROVED, usage=usage))
    link.close()


class PeerLines:
    """The lines that one node has printed."""

    def __init__(self, notify: PostNotice) -> None:
        self._notify = notify
        self._printed: set[str] = set()

    def print_once(self, line: str) -> None:
        """Print a line, unless it was printed before."""
        if line in self._printed or len(self._printed) > LIMIT:
            return
        self._printed.add(line)
        self._notify(
            line if len(self._printed) <= LIMIT else "no further lines about nodes that try to join are printed"
        )
