"""Agreement among the nodes: which take part, with which ranks, and where MASTER_ADDR:MASTER_PORT is.

    interface        what the supervisor uses: the `Rendezvous` protocol, and the messages both ways
    report_messages  those messages that hold failures or stacks
    selection        makes the backend that `--rdzv-backend` names; `shared_token` has a token for nodes on one machine
    one_node         a job of one node; `local_leader` runs the consensus with that node as the only member
    round_messages   pure: what a new round is to each member, with the addresses of the others
    faulty_nodes     pure: which nodes are at fault, which is the last choice, and which leaves
    verdicts         pure: what follows from a failure: a restart here or elsewhere, or the end of the job
    restarts         what the recovery record keeps of earlier failures
    drain_ceiling    pure: how far a node's ranks may go before the job's step to stop at is agreed

    consensus/       the leader's decisions, pure: membership, rank assignment, failures, the step of a drain; `quorum`
                     decides whether a takeover succeeds
    leader/          detects lost members; carries messages to those decisions and their actions back to the members
    member/          one node's part: `decisions`, pure, which leader to join, when to attempt a takeover, what follows
                     from rounds and from the loss of the leader; `lease_renewal`
    protocol/        the messages, and how they are framed and authenticated
    transport/       TCP links and addresses; limits unauthenticated peers
    torch_handlers/  torch's registry, and muster inside torchrun; stands apart: nothing here but `selection` knows it

From outside, import `interface`, `report_messages`, `drain_ceiling`, `protocol`, `transport.stream` and `selection`.
Features import `consensus.halves`.
`muster.elastic.rendezvous` imports the parts of `torch_handlers` that run one of torch's handlers.
"""
