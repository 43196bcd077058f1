"""One node's part in rendezvous, whether it leads or follows.

`member` is the backend that the supervisor calls. `session` holds the connection to the leader, from the first search
to the end of the job; `discovery` decides which leader to join and when to attempt a takeover, `search` asks every
known address. `server` owns the node's listening sockets, answers first messages, and holds the leader when this node
leads. `heartbeat` and `lease` keep the leader from giving this member up and renew the fencing lease, `recovery` keeps
what a new leader needs to know, `master_ports` offers the port of the store.
"""
