"""Computes until when no other node can lead, which is the limit of the lease of the leader's own workers.

Members that have not seen this process end can take over only with more than half of a round, and only if fewer than
`min` of it are left. That is impossible while enough members have promised to stay with this leader. With each
heartbeat a member sends back the leader's last time stamp, and joins no other leader for the silence limit from then
on. `member.lease_renewal` renews the lease up to this limit.
"""

from muster.agent.rendezvous.consensus.members import find_margin_s
from muster.agent.rendezvous.consensus.quorum import QuorumRound, find_quorum_size
from muster.agent.rendezvous.consensus.state import FOREVER
from muster.agent.rendezvous.leader.connections import LeaderOptions, MemberConnections


def find_lease_limit_s(
    quorum_rounds: tuple[QuorumRound, ...],
    connections: MemberConnections,
    options: LeaderOptions,
    boottime_s: float,
) -> float:
    """Return until when the leader's own workers may run, by CLOCK_BOOTTIME.

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
