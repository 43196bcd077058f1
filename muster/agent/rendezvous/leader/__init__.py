"""The leader: feeds messages to `consensus.decisions` as events, and sends the resulting actions to the members.

`leader` notices lost members (a closed connection, silence), keeps time and calls the decisions. `connections` holds
the members' connections, `outgoing` sends rounds, round breaks and the job's end, `announcement` announces an acting
leader to a node 0 that returns with empty state.

From outside, import `leader` and `announcement`; `member.server` does.
"""
