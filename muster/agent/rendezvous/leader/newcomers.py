"""Nodes that try to join: claims to the index of a member that is still connected, and lines about refused nodes.

In a claim, either that member is gone, which is not known yet, or two nodes were started with the same --node-rank. The
leader connects to the member's own port, which decides the claim at once if the process has ended. Otherwise the claim
waits. It succeeds when the member is lost, and is refused when the member sends something after `DUPLICATE_S`. A claim
of the leader's own index is refused at once before the first round. Later it waits for the leader's end, because the
node may be the leader's replacement.
"""

from muster._shared.records import record
from muster.agent.rendezvous.interface import PostNotice
from muster.agent.rendezvous.leader.connections import MemberConnection, describe_newcomer
from muster.agent.rendezvous.protocol.messages import Join, Rejected
from muster.agent.rendezvous.transport.links import Link
from muster.agent.runtime.loop import Clock

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
    """The lines that one node has printed about others: which was refused, and why.

    A refused node tries again, and any process may connect. So each line is printed once, and their number is limited.
    """

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


DUPLICATE_S = 1.5
"""How long after a claim the first node must send something to count as alive."""


@record
class IndexClaim:
    """A node that joined with the index of a member that is still connected."""

    link: Link
    join: Join
    since_s: float


class IndexClaims:
    """The claims at one leader, by the id of the member whose index they claim."""

    def __init__(self, clock: Clock, lines: PeerLines) -> None:
        self._clock = clock
        self._lines = lines
        self._claims: dict[str, IndexClaim] = {}

    def add(self, holder: MemberConnection, link: Link, join: Join) -> None:
        """Add the claim of a node that has joined with the index of `holder`."""
        self._claims[holder.id] = IndexClaim(link=link, join=join, since_s=self._clock.boottime_s())

    def record_message(self, holder: MemberConnection) -> None:
        """Record a message of a member: refuse a claim to its index that has waited long enough."""
        claim = self._claims.get(holder.id)
        if claim is None or self._clock.boottime_s() < claim.since_s + DUPLICATE_S:
            return
        del self._claims[holder.id]
        self.refuse(holder, claim.link, claim.join)

    def refuse(self, holder: MemberConnection, link: Link, join: Join) -> None:
        """Tell a node that another one has its index, and print that here."""
        taken = f"node rank {holder.index} is already taken by {holder.host}: every node needs its own --node-rank"
        self._lines.print_once(f"refused another {describe_newcomer(join)} at {link.peer_host}: {taken}")
        refuse(link, taken, usage=True)

    def pop(self, member_id: str) -> IndexClaim | None:
        """Remove and return the claim to the index of a member that is lost."""
        return self._claims.pop(member_id, None)

    def remove(self, link: Link) -> None:
        """Remove the claim that was made over this link."""
        for holder_id, claim in list(self._claims.items()):
            if claim.link is link:
                del self._claims[holder_id]

    def close(self) -> None:
        """Close the links of all claims. Idempotent."""
        for claim in self._claims.values():
            claim.link.close()
        self._claims.clear()
