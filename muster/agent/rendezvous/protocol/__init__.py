"""What travels between nodes: messages, and how they are encoded. Bytes in, records out; no sockets.

`framing` cuts the stream into frames, `handshake` proves who sent them, `fields` validates single values.
`member_messages` go from a member to its leader, `leader_messages` back, `discovery_messages` before either role is
settled; `payloads` are the larger parts of several messages, `job_rules` what every agent of a job must be started with
alike.
"""
