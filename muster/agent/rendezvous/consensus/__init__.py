"""The leader's decisions. Pure: no clock, no socket, no randomness.

`decisions.decide(state, event, now_s) -> (state, actions)` is the entry point; the rules stand there. `events`,
`actions` and `state` are its input, output and state; `members` holds the rules, limits and records of members.

`membership` decides what follows when a member joins or is lost, `failures` when workers fail or hang, and
`restart_budget` whether the job may try again. `drain` decides at which step all ranks stop, from what members report;
`ceiling` is the members' rule for that report, the one module here that is not the leader's. `formation` forms the next
round or ends the job, `rank_assignment` assigns ranks, `quorum` decides which side may continue or take over when
members are silent. `waits` is the table of everything that the leader waits for.
"""
