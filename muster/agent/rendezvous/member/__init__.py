"""One node's part in rendezvous, whether it leads or follows.

`member` is the backend that the supervisor talks to. `session` holds the connection to the leader, from the first
search to the end; `discovery` decides whom to join and when to stand for takeover, `search` asks every known address.
`heartbeat` and `lease` keep this node's place and renew the fencing lease; `recovery` remembers what a new leader needs
to know; `master_ports` offers the port of the store.
"""
