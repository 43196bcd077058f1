"""The leader's decisions. Pure: no clock, no socket, no randomness.

`decisions.decide(state, event, now_s) -> (state, actions)` is the way in. `events`, `actions` and `state` are what it
works on, `members` the records of who takes part. Who joins and who is lost is decided in `membership`, why a round
ends in `failures`, when the next one is formed in `formation`, who gets which rank in `rank_assignment`, who may form a
round or take over when some are silent in `quorum`. `timing` says how long a silent node keeps its place, `persistent`
holds the mapping and the set that states share without copies.
"""
