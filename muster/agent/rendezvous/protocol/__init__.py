"""What travels between nodes: messages, and how they are encoded. Bytes in, records out; no sockets.

A message is declared once, as a record: `_shared.codec` encodes, validates and limits it from the types of its fields,
which are in `_shared.fields`. What decisions send or decide on is declared with them: for nodes in `interface` and
`report_messages`, for members in `consensus.events` and `consensus.actions`. Here are the messages that only members,
leader and server exchange.

`member_messages` go from a member to its leader, `leader_messages` from the leader to its members; nodes exchange
`messages` before they have a leader, and the union of all is there. `job_rules` are the settings that must be equal for
all agents of a job. `framing` splits the stream into frames, `handshake` authenticates them.

From outside, import any module.
"""
