"""The leader: feeds messages to `consensus.decisions` as events, and sends the resulting actions to the members.

`leader` calls the decisions and acts. `loss_detection` detects lost members (a closed connection, silence). The table
of `consensus.waits` says what the leader waits for, and for how long. `connections` holds the members' connections,
and computes until when no other node can lead. `index_claims` holds the nodes that claim the index of a connected
member. `outgoing` sends what was decided. `announcement` announces an acting leader to a node 0 that returns with empty
state. `peer_lines` limits what is printed about nodes that try to join.

From outside, import `leader`, `announcement`, `peer_lines` and `connections.LeaderOptions`; `member.server` does.
"""
