"""The node that leads: it carries messages to `consensus.decisions`, and the resulting actions back to the members.

`leader` is the leader itself, `connections` holds the members' connections, `outgoing` sends rounds, breaks and the
end, `announcement` tells a returning node 0 where the acting leader is.

From outside, import `leader` and `announcement`; `member.server` does.
"""
