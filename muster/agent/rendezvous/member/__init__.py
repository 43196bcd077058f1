"""One node's part in rendezvous, whether it leads or follows.

`member` is the backend that the supervisor calls. It feeds `decisions`, which are pure, and acts on what they say.
`seeking` decides which leader to join and when to attempt a takeover; `consensus.quorum` decides whether that succeeds.
`rounds` decides what follows from a round and from the job's end. `events` are what goes in and what comes out. `state`
is all that they follow from, with what the next leader needs to know. `search` asks every address where a leader may
be. `server` owns the node's listening sockets, answers first messages, and holds the leader when this node leads.
`lease_renewal` sends heartbeats and renews the fencing lease, which fires in `muster._shared.guard`. `waiting_lines`
words what a node prints while it waits.

From outside, import `member.Member`.
"""
