"""The leader: feeds messages to `consensus.decisions` as events, and sends the resulting actions to the members.

`leader` calls the decisions and acts, and detects lost members (a closed connection, silence). The table of
`consensus.waits` says what the leader waits for, and for how long. `connections` holds the members' connections, sends
what was decided, and computes until when no other node can lead. `newcomers` holds the nodes that claim the index of a
connected member, and limits what is printed about nodes that try to join.

From outside, import `leader`, `newcomers` and `connections.LeaderOptions`; `member.server` does.
"""
