"""Snapshots of the ranks' states in this node's memory, and copies of a neighbour's. Standard library only.

`node` looks at what the ranks of a node have saved, and does what the leader says. `memory` knows what is in the files,
and what stays in them. `keeping` is pure: it decides what a node keeps for the others, and what remains of it in the
next round. `exchange` sends parts to the neighbour, and serves them to a node that lacks them, in threads. `fetching`
gets this node's part from a node that has it. `ranges` serves workers what any rank has saved. `copies` are those of
another node that are kept here. `transfer` is how a copy travels.

`rendezvous.snapshots` decides what all nodes continue. `workers.status_page` makes the files, whose layout is
`_shared.snapshot_file`. Only `muster.snapshots` knows what is in a slot.

From outside, import `node`.
"""
