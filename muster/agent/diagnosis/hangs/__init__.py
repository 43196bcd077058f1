"""Finds which rank blocks the others, and in which collective.

`servers` asks the workers of this node (`workers.hooks.groups` is their side). `reading` turns the answers into records
(`_shared.reports.RankView`, which travels to the leader). `collectives` finds the ranks to blame, and is pure. If there
are devices, `monitor` asks NCCL's own monitor; `monitor_reports` reads its answers and `launches` judges them, and both
are pure. `page` formats what is printed of this while the job continues. `limits` learns how long a job may pause.
`sessions` reads from /proc what the workers' processes have done. `looks` looks at all of this once, or twice to see
what moves.

Not here: when a job counts as hung (`diagnosis.hang`, `rendezvous.consensus.failures`), and Python stacks
(`diagnosis.stacks`, `diagnosis.hang_cause`).

It is imported when a job with a hang limit is looked at, never before the first worker.

From outside, import `servers`, `collectives`, `launches`, `monitor`, `page`, `limits`, `sessions` and `looks`.
"""
