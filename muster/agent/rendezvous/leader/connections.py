"""Who is connected to the leader, under which names; and what a leader is made of."""

from collections.abc import Callable

from muster.agent.rendezvous.consensus.members import ConsensusRules
from muster.agent.rendezvous.protocol.job_rules import JobRules
from muster.agent.rendezvous.protocol.member_messages import Join
from muster.agent.rendezvous.transport.links import Link, LocalLink
from muster.agent.runtime.records import record


class MemberConnection:
    """One member's connection. Made when it joins; the leader keeps the two times up."""

    __slots__ = ("heard_s", "host", "id", "index", "link", "listen_port", "local_addr", "promise_s")

    def __init__(self, join: Join, link: Link, now_s: float) -> None:
        self.id = join.id
        self.index = join.index
        self.host = join.host
        self.link = link
        self.local_addr = join.local_addr
        self.listen_port = join.listen
        """Where it accepts links after a takeover; 0: nowhere."""
        self.heard_s = now_s
        """When anything was last heard, CLOCK_BOOTTIME."""
        self.promise_s = now_s
        """The leader's own time stamp that the member last sent back: it stays with this leader for the silence limit
        from then on. CLOCK_BOOTTIME."""

    @property
    def is_local(self) -> bool:
        """True for the member of the leader's own process."""
        return isinstance(self.link, LocalLink)


class MemberConnections:
    """The members connected now: by id, by link, by node index."""

    def __init__(self) -> None:
        self._by_id: dict[str, MemberConnection] = {}
        self._by_link: dict[Link, MemberConnection] = {}
        self._by_index: dict[int, MemberConnection] = {}

    def add(self, contact: MemberConnection) -> None:
        """A member is here. Another of the same id must have been removed."""
        self._by_id[contact.id] = contact
        self._by_link[contact.link] = contact
        if contact.index is not None:
            self._by_index[contact.index] = contact

    def remove(self, contact: MemberConnection) -> bool:
        """A member is gone; False when it was not here any more."""
        if self._by_id.get(contact.id) is not contact:
            return False
        del self._by_id[contact.id]
        del self._by_link[contact.link]
        if contact.index is not None and self._by_index.get(contact.index) is contact:
            del self._by_index[contact.index]
        return True

    def find(self, member_id: str) -> MemberConnection | None:
        """The member of this id."""
        return self._by_id.get(member_id)

    def find_link(self, link: Link) -> MemberConnection | None:
        """The member at the other end of this link."""
        return self._by_link.get(link)

    def find_index(self, index: int) -> MemberConnection | None:
        """The member with this --node-rank."""
        return self._by_index.get(index)

    def list_ids(self) -> tuple[str, ...]:
        """All members, in order of joining."""
        return tuple(self._by_id)

    def list_remote(self) -> list[MemberConnection]:
        """All but the member of the leader's own process."""
        return [contact for contact in self._by_id.values() if not contact.is_local]

    def hang_up(self) -> None:
        """Close all links and forget everybody."""
        for contact in self._by_id.values():
            contact.link.close()
        self._by_id.clear()
        self._by_link.clear()
        self._by_index.clear()


@record
class IndexClaim:
    """A member that came with the index of one that is still here."""

    link: Link
    join: Join
    since_s: float


@record
class LeaderOptions:
    """What a leader is made of besides the loop."""

    rules: ConsensusRules
    job_rules: JobRules
    """What every member must have been started with."""
    silence_s: float
    takeover: bool
    local_addr: str | None
    tell: Callable[[str], None]
    own_id: str
    """Of the member on the leader's node, which is the leader's id too."""
    listen_port: int
    """Where this process, and nothing but this process, listens: what is dialled to see whether it has ended."""


def name_newcomer(join: Join) -> str:
    """How people know a node that is no member: "node 1 (host-b)"."""
    return f"a new node ({join.host[:80]})" if join.index is None else f"node {join.index} ({join.host[:80]})"
