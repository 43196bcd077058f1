"""Finds which rank blocks the others, and in which collective.

`collectives` finds the ranks to blame from what `features.hangs` has read (`_shared.reports.RankView`, which travels to
the leader), and is pure. `launches` judges the counts of NCCL's own monitor, and is pure. `page` formats what is
printed of this while the job continues. `sessions` reads from /proc what the workers' processes have done.

Not here: when a job counts as hung (`rendezvous.consensus.failures`), and Python stacks (`diagnosis.stacks`,
`diagnosis.hang_cause`).

It is imported when a job with a hang limit is looked at, never before the first worker.

From outside, import `collectives`, `launches`, `page` and `sessions`.
"""
