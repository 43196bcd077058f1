"""The watch for hangs: reads what workers do, whether that is idle or still, and which rank the others wait for.

    node             the part: begins a watch, and reads what is asked of it
    watch            when the workers of this node count as idle, and when they stand still
    servers          asks the workers (`workers.hooks.groups` is their side)
    reading          turns their answers into records. Pure
    monitor          asks NCCL's own monitor, if there are devices
    variables        gives that monitor an address of this job
    monitor_reports  reads its answers. Pure
    sessions         reads from /proc what the workers' processes have done
    samples          looks at all of this once, or twice to see what moves
    judge            which ranks block the others, and what is printed of all that the nodes have read, at the leader.
                     Pure, as the next two
    collectives      finds them in the views, by the number of each collective
    nccl_launches    finds them in the counts of NCCL's own monitor

Not here: when the job counts as hung (`rendezvous.consensus.failures`), and Python stacks (`diagnosis.stacks`).
"""
