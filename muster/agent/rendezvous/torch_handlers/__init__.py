"""torch's registry of rendezvous handlers, in both directions. Muster's own rendezvous can be understood without it.

A handler of torch's behind our protocol (`--rdzv-backend c10d-torch`, `etcd`, `etcd-v2`, a third party's, a caller's):

    rendezvous      `TorchRendezvous`, what the supervisor calls; on the agent's loop
    messages        what passes between it and the thread: commands one way, findings the other
    thread          owns the handler, whose calls block; agrees on the ranks through the round's store
    watch           agrees on the end of a round, and on lost nodes, through that store
    caller          stands for the thread where the handler is an object of the program that drives this agent

In the other direction, `plugin` is muster's own rendezvous inside torchrun, as one of torch's handlers. pyproject.toml
names it as an entry point.

From outside, import `rendezvous`, and only where a backend is selected. `muster.elastic.rendezvous`, the other end of a
caller's handler, imports `thread` and `messages`.
"""
