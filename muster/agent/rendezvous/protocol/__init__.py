"""What travels between nodes: messages, and how they are encoded. Bytes in, records out; no sockets.

A message is declared once, as a record: `_shared.codec` encodes, validates and limits it from the types of its fields,
which are in `_shared.fields`. To add one, declare it and name it in its union below; the rest is what sends it and what
matches that union.

`member_messages` go from a member to its leader, `leader_messages` from the leader to its members; nodes exchange
`discovery_messages` before they have a leader; `messages` is the union of all. `job_rules` are the settings that must
be equal for all agents of a job. `framing` splits the stream into frames, `handshake` authenticates them.

From outside, import any module.
"""
