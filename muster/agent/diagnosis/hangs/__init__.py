"""Which rank keeps the others waiting, and in which collective.

`servers` asks the workers of this node (`workers.hooks.groups` is their side), `reading` turns the answers into records
(`_shared.reports.RankView`, which travels to the leader), `collectives` finds the ranks to blame, purely. With devices
`monitor` asks NCCL's own monitor, whose answers `monitor_reports` reads and `launches` judges, both purely. `page` is
what is printed of it while the job goes on. `limits` learns how long a job may pause. `sessions` reads from /proc what
the workers' processes have done. `looks` looks at all of it once, or twice to see what moves.

Not here: when a job counts as hung (`diagnosis.hang`, `rendezvous.consensus.failures`), Python stacks
(`diagnosis.stacks`, `diagnosis.hang_cause`).

Imported when a job with a hang limit is looked at, never before the first worker.

From outside, import `servers`, `collectives`, `launches`, `monitor`, `page`, `limits`, `sessions` and `looks`.
"""
