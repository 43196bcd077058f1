"""The leader's decisions. Pure: no clock, no socket, no randomness.

`decisions.decide(state, event, now_s) -> (state, actions)` is the entry point, and its module has the rules. `events`,
`actions` and `state` are its input, output and state. `members` holds the rules, limits and records of members.

`membership` decides what follows when a member joins or is lost, and `failures` what follows when workers fail or hang.
`drain` decides at which step all ranks stop, from what members report, and counts what all ranks have saved. (The
members' own rule for that report is `rendezvous.drain_ceiling`.) `formation` assigns ranks and forms the next round, or
ends the job. `quorum` decides which side may continue or take over when members are silent. `recovery` is what every
member knows of the job, so that nothing is lost with a leader. `waits` is the table of everything that the leader waits
for. `parts` calls the halves of features at the leader, whose
functions are in `halves`.

From outside, import `decisions`, `events`, `actions`, `state`, `members`, `quorum`, `recovery` and `waits`; where a
node decides alone, `drain` and `failures` as well. Features import `halves`.
"""
