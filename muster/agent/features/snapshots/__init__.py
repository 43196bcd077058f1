"""Snapshots of the ranks' states in the nodes' memory, and copies on a neighbour. Standard library only.

    node            the part: makes the memory when a worker wants it
    node_snapshots  looks at what the ranks of a node have saved, and does what the leader says
    leader          the half at the leader, pure: which snapshot a round continues, and which all ranks have
    flags           how much memory they may take, and where copies are
    messages        what the two halves say to each other
    memory          what is in the memory files, and what stays in them
    keeping         pure: what a node keeps for the others, and what remains of it in the next round
    exchange        sends parts to the neighbour, and serves them to a node that lacks them, in threads
    fetching        gets this node's part from a node that has it
    ranges          serves workers what any rank has saved
    copies          of another node's part, which are kept here
    transfer        how a copy travels

The layout of the files is `_shared.snapshot_file`. Only `muster.snapshots` knows what is in a slot.
"""
