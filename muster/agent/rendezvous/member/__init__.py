"""One node's part in rendezvous, whether it leads or follows.

`member` is the backend that the supervisor calls. `initial_role` decides whether the node leads or searches at first.
`session` holds the connection to the leader, from the first search to the end of the job, and notices a lost leader;
`discovery` decides which leader to join and when to attempt a takeover (`consensus.quorum` whether it succeeds),
`search` asks every known address. `server` owns the node's listening sockets, answers first messages, and holds the
leader when this node leads. `lease_renewal` sends heartbeats and renews the fencing lease, which fires in
`muster._shared.guard`. `recovery` keeps what a new leader needs to know, `master_ports` offers the port of the store,
`waiting_lines` words what a node prints while it waits.

From outside, import `member.Member`.
"""
