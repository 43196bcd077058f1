"""Agreement among the nodes: which take part, with which ranks, and where MASTER_ADDR:MASTER_PORT is.

    interface        what the supervisor uses: the `Rendezvous` protocol, and the messages both ways
    report_messages  those messages that hold failures or stacks
    selection        makes the backend that `--rdzv-backend` names; `shared_token` has a token for nodes on one machine
    static           one node that agrees with itself; `local_leader` its drains, and what people ask of it
    restart_policy   which failures end the job where every agent has its own restart budget: `static`, torch's handlers
    restart_budget   pure: whether a failed job may be started again
    drain_ceiling    pure: how far a node's ranks may go before the job's step to stop at is agreed

    consensus/       the leader's decisions, pure: membership, rank assignment, failures, the step of a drain; `quorum`
                     decides whether a takeover succeeds
    leader/          notices lost members; carries messages to those decisions and their actions back to the members
    member/          one node's part: lease, rounds; `discovery` decides which leader to join and when to attempt a
                     takeover
    protocol/        the messages, and how they are framed and authenticated
    transport/       TCP links and addresses; limits unauthenticated peers
    torch_handlers/  torch's registry, and muster inside torchrun; stands apart: nothing here but `selection` knows it

From outside, import `interface`, `report_messages`, `drain_ceiling` and `selection`; `muster.elastic.rendezvous`
imports the parts of `torch_handlers` that run a handler of torch's.
"""
