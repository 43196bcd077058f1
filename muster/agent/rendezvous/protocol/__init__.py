"""What travels between nodes: messages, and how they are encoded. Bytes in, records out; no sockets.

`framing` splits the stream into frames, `handshake` authenticates them, `fields` validates single values.
`member_messages` go from a member to its leader, `leader_messages` from the leader to its members; nodes exchange
`discovery_messages` before they have a leader. `payloads` are the larger parts of several messages, `job_rules` the
settings that must be equal for all agents of a job.
"""
