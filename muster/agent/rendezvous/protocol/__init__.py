"""What travels between nodes: messages, and how they are encoded. Bytes in, records out; no sockets.

A message is declared once, as a record. `_shared.codec` encodes, validates and limits it from the types of its fields,
which are in `_shared.fields`. Messages that decisions send or decide on are declared with them: for nodes in
`interface` and `report_messages`, for members in `consensus.events` and `consensus.actions`. This package has the
messages that only members, leader and server exchange.

`messages` go from a member to its leader and back, and between nodes before they have a leader. `job_rules` are the
settings that must be equal for all agents of a job. `framing` splits the stream into frames, and `handshake`
authenticates them.

From outside, import any module.
"""
