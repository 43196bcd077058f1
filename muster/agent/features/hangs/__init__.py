"""The watch for hangs: reads what workers do, whether that is idle or still, and which collective each waits in.

    node             the part: begins a watch, and reads what is asked of it
    watch            when the workers of this node count as idle, and when they stand still
    limits           learns how long a job may pause
    servers          asks the workers (`workers.hooks.groups` is their side)
    reading          turns their answers into records. Pure
    monitor          asks NCCL's own monitor, if there are devices
    monitor_reports  reads its answers. Pure
    looks            looks at all of this once, or twice to see what moves

Not here: when the job counts as hung (`rendezvous.consensus.failures`), which ranks are to blame and what is printed
(`diagnosis.hangs`, `diagnosis.hang_cause`), and Python stacks (`diagnosis.stacks`).
"""
