"""The members connected to the leader, what is sent to them, and a leader's options."""

from muster._shared.contract import show_controls
from muster._shared.records import record
from muster.agent.rendezvous.consensus.actions import JobEnd, Send
from muster.agent.rendezvous.consensus.members import ConsensusRules, find_margin_s
from muster.agent.rendezvous.consensus.quorum import QuorumRound, find_quorum_size
from muster.agent.rendezvous.consensus.state import FOREVER
from muster.agent.rendezvous.interface import PostNotice
from muster.agent.rendezvous.protocol.job_rules import JobRules
from muster.agent.rendezvous.protocol.messages import Exit, Join, LeaderMessage
from muster.agent.rendezvous.transport.links import Link, LocalLink
from muster.agent.runtime.loop import Loop, Timer


class MemberConnection:
    """One member's connection. It is made when the member joins; the leader updates the two times."""

    __slots__ = ("echoed_s", "host", "id", "index", "link", "listen_port", "received_s")

    def __init__(self, join: Join, link: Link, now_s: float) -> None:
        self.id = join.id
        self.index = join.index
        self.host = show_host(join)
        self.link = link
        self.listen_port = join.listen_port
        """Port where the member accepts links after a takeover; 0 if none."""
        self.received_s = now_s
        """When its last message was received, CLOCK_BOOTTIME."""
        self.echoed_s = now_s
        """The leader's own time stamp that the member last sent back, by CLOCK_BOOTTIME.

        The member joins no other leader for the silence limit from then on.
        """

    @property
    def is_local(self) -> bool:
        """Whether this is the member of the leader's own process."""
        return isinstance(self.link, LocalLink)


class MemberConnections:
    """The members that are connected now: by id, by link, and by node index."""

    def __init__(self) -> None:
        self._by_id: dict[str, MemberConnection] = {}
        self._by_link: dict[Link, MemberConnection] = {}
        self._by_index: dict[int, MemberConnection] = {}

    def add(self, connection: MemberConnection) -> None:
        """Add a member. An earlier one with the same id must have been removed."""
        self._by_id[connection.id] = connection
        self._by_link[connection.link] = connection
        if connection.index is not None:
            self._by_index[connection.index] = connection

    def remove(self, connection: MemberConnection) -> bool:
        """Remove a member; return False if it was removed already."""
        if self._by_id.get(connection.id) is not connection:
            return False
        del self._by_id[connection.id]
        del self._by_link[connection.link]
        if connection.index is not None and self._by_index.get(connection.index) is connection:
            del self._by_index[connection.index]
        return True

    def find(self, member_id: str) -> MemberConnection | None:
        """Return the member of this id."""
        return self._by_id.get(member_id)

    def find_link(self, link: Link) -> MemberConnection | None:
        """Return the member at the other end of this link."""
        return self._by_link.get(link)

    def find_index(self, index: int) -> MemberConnection | None:
        """Return the member with this --node-rank."""
        return self._by_index.get(index)

    def list_ids(self) -> tuple[str, ...]:
        """Return all members, in order of joining."""
        return tuple(self._by_id)

    def list_remote(self) -> list[MemberConnection]:
        """Return all but the member of the leader's own process."""
        return [connection for connection in self._by_id.values() if not connection.is_local]

    def close_all(self) -> None:
        """Close all links and remove all members."""
        for connection in self._by_id.values():
            connection.link.close()
        self._by_id.clear()
        self._by_link.clear()
        self._by_index.clear()


@record
class LeaderOptions:
    """A leader's options."""

    rules: ConsensusRules
    job_rules: JobRules
    """The rules that every member must have been started with."""
    silence_s: float
    takeover: bool
    notify: PostNotice
    own_id: str
    """Id of the member on the leader's node, and of the leader."""
    listen_port: int
    """A port on which only this process listens; a refused connection there proves that it has ended."""
    must_find_last_round: bool = False
    """Whether this node ran before and lost its memory; see `JobState`."""


def show_host(join: Join) -> str:
    """Return a node's name as messages show it, because any process that may join chose it, even with line ends."""
    return show_controls(join.host[:80]).replace("\n", r"\n").replace("\t", r"\t")


def describe_newcomer(join: Join) -> str:
    """Return the name, in messages, of a node that is not a member: "node 1 (host-b)"."""
    return f"a new node ({show_host(join)})" if join.index is None else f"node {join.index} ({show_host(join)})"


def find_lease_limit_s(
    quorum_rounds: tuple[QuorumRound, ...],
    connections: MemberConnections,
    options: LeaderOptions,
    boottime_s: float,
) -> float:
    """Return until when the leader's own workers may run, by CLOCK_BOOTTIME: until then no other node can lead.

    Members that have not seen this process end can take over only with more than half of a round, and only if fewer
    than `min` of it are missing. That is impossible while enough members have promised to stay with this leader. With
    each heartbeat a member sends back the leader's last time stamp, and joins no other leader for the silence limit
    from then on. `member.lease_renewal` renews the lease up to this limit.

    Args:
        quorum_rounds: the last round, preceded by those that it has not yet replaced.
        connections: those of this leader's members, with the time stamps that they sent back.
        options: the leader's.
        boottime_s: now.
    """
    lease_s = options.silence_s - find_margin_s(options.silence_s)
    # Before a commit, members without the round act on earlier ones, even this leader's.
    needed = [*(each for each in quorum_rounds[:-1] if each.has_missing()), *quorum_rounds[-1:]]
    min_nodes = options.rules.min_nodes
    promises_s = (_find_promise_s(each, min_nodes, connections, options.own_id, boottime_s) for each in needed)
    return min(promises_s, default=boottime_s) + lease_s


def _find_promise_s(
    quorum_round: QuorumRound, min_nodes: int, connections: MemberConnections, own_id: str, boottime_s: float
) -> float:
    """Return the time of the oldest promise among those that are needed to rule out a takeover."""
    needed = find_quorum_size(quorum_round, min_nodes) - (own_id in quorum_round.connected)
    if needed <= 0:
        return boottime_s
    echoed_s = sorted(
        (each.echoed_s for each in connections.list_remote() if each.id in quorum_round.connected), reverse=True
    )
    return echoed_s[needed - 1] if len(echoed_s) >= needed else -FOREVER


ACKNOWLEDGE_SILENCES = 3
"""How many silence limits the end waits for members that have not acknowledged it.

An unreachable member may come back and must then find a node that knows the end. Otherwise it would continue with
others and repeat finished work.
"""


class OutgoingMessages:
    """One leader's outgoing messages. No member exits before all have acknowledged the job's end. Close it."""

    def __init__(self, loop: Loop, connections: MemberConnections, silence_s: float) -> None:
        self._loop = loop
        self._connections = connections
        self._silence_s = silence_s
        self._unacknowledged: set[str] | None = None
        self._peak_bytes = 0
        self._end_timer: Timer | None = None

    def send(self, send: Send) -> None:
        """Send a message to its connected recipients."""
        self._send(send.ids, send.message)
        if isinstance(send.message, JobEnd):
            self._await_acknowledgements(send.ids)

    def _send(self, ids: tuple[str, ...], message: LeaderMessage) -> None:
        for member_id in ids:
            connection = self._connections.find(member_id)
            if connection is not None:
                connection.link.send(message)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _await_acknowledgements(self, ids: tuple[str, ...]) -> None:
        if self._unacknowledged is None:
            self._unacknowledged = set(ids)
            limit_s = ACKNOWLEDGE_SILENCES * self._silence_s
            self._end_timer = self._loop.call_later(limit_s, self._send_exit)
        elif not self._unacknowledged:
            self._send(ids, Exit(peak_bytes=self._peak_bytes))  # the others have exited

    def record_acknowledgement(self, member_id: str, peak_bytes: int = 0) -> None:
        """Record that a member has acknowledged the end, or that its process has ended.

        Args:
            member_id: the member.
            peak_bytes: the peak memory of its largest worker; 0 if unknown.
        """
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        if self._unacknowledged is None or member_id not in self._unacknowledged:
            return
        self._unacknowledged.discard(member_id)
        if not self._unacknowledged:
            self._send_exit()

    def _send_exit(self) -> None:
        """Let all members exit together, once all have acknowledged the end or the limit has passed."""
        self._unacknowledged = set()
        self._send(self._connections.list_ids(), Exit(peak_bytes=self._peak_bytes))

    def close(self) -> None:
        """Stop the timer. Idempotent."""
        if self._end_timer is not None:
            self._end_timer.cancel()
