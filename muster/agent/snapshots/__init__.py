"""Snapshots of the ranks' states in this node's memory, and copies of a neighbour's. Standard library only.

`node` looks at what the ranks of a node have saved, and does what the leader says; `memory` is what is in the files,
and what stays in them. `keeping` is pure: what a node keeps for the others, and what the next round leaves of it.
`exchange` has parts sent to the neighbour and served to one that lacks them, in threads; `fetching` gets this node's
part from a node that has it; `ranges` serves workers what any rank has saved; `copies` are those of another node that
are kept here; `transfer` is how one travels. `compile_caches` sends other things in the same way: what compilers have
made of the workers' programs.

What all nodes continue is decided in `rendezvous.snapshots`; the files are made by `workers.status_page`; their layout
is `_shared.snapshot_file`, and what is in a slot is the affair of `muster.snapshots`.

From outside, import `node` and `compile_caches`.
"""
