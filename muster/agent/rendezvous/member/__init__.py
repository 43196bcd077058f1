"""One node's part in rendezvous, whether it leads or follows.

`member` is the backend that the supervisor talks to. `session` holds the connection to the leader, from the first
search to the end; `discovery` decides whom to join and when to try a takeover, `search` asks every known address.
`server` owns the node's listening sockets, answers whoever connects, and holds the leader when this node leads.
`heartbeat` and `lease` keep this node's place and renew the fencing lease, `recovery` keeps what a new leader needs to
know, `master_ports` offers the port of the store.
"""
